// The few things that a kernel asks of a GPU, so that the same kernel source also runs on a CPU, thread by thread, in
// the tests. Under nvcc each is one intrinsic or one line of PTX (device_gpu.h); under a host compiler it is emulated
// (device_host.h). Both headers define, in ptq::cuda:
//
//   PTQ_KERNEL(threads, blocks)   before `void name(Parameters p)`: at most `threads` in a block, and registers for at
//                                 least so many blocks on a multiprocessor
//   PTQ_DEVICE, PTQ_BOTH          before a function of the device; of device and host
//   PTQ_UNROLL, PTQ_ROLLED        before a loop
//   PTQ_CONSTANT                  before a table that the device reads
//   thread(), lane(), warp(), block_x(), block_y(), block_z(), shared()
//   block_barrier(), warp_barrier(), shuffle(value, from lane), shuffle_xor(value, mask)
//   follow_previous()             what earlier kernels wrote is there, and what they read may be overwritten: every
//                                 thread of every kernel calls it before it touches anything but packed weights and
//                                 their scales, which no kernel of a model writes. It lets the next kernel begin, which
//                                 will wait likewise
//   prefetch(from, bytes)         into the L2 cache; multiples of 16
//   prefetch_line(from)           likewise the 128 bytes around an address
//   load<V>(from), store(to, V)   aligned as V is, in global or shared memory
//   load_once(V&, from, wanted)   of global memory that is not written meanwhile nor read again, where it is wanted;
//                                 in its place in the order of instructions
//   copy_async<bytes>(shared, global), copy_commit(), copy_wait<pending>()
//   mma<T>(c, a, b0, b1)          m16n8k16, T = Half or Bfloat16, float32 sums
//   mma_u8s8(c, a, b0, b1)        m16n8k32, A unsigned, B signed bytes, int32 sums
//   mma_s4(c, a, b0, b1)          m16n8k64, four signed bits, int32 sums; on compute capability 8.x alone
//   transpose(word)               a matrix of 8 x 8 halves: lane i has numbers 2 (i % 4) and the next of row i / 4
//   dp4a(a, b, c), byte_permute(a, b, selector), and_or(a, mask, bits), xor_and(a, b, mask)
//   rotate_left(x, by), keep(x)
//   fma2<T>(a, b, c)              two packed halves, each rounded once
//   widen(T), narrow<T>(float), pack<T>(low, high), float_of(bits), bits_of(float)
//   lesser(a, b), greater(a, b)   of two float32 numbers
//   multiply, add, divide, root, round_to_int: rounded to the nearest, never contracted; exponential: e^x, nearly so,
//   accurate_exponential: to two units in the last place; divide_nearly: likewise, and 0 for divisors above 2^126;
//   maximum: of two, and a NaN wins
//   launch<kernel>(grid, threads, shared_bytes, stream, parameters) -> error text or nullptr
//
// All 32 lanes of a warp take part in every shuffle, mma and warp barrier, all threads of a block in every block
// barrier; the emulation reports where they do not.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ptq::cuda {

// What a launch may use of a GPU: multiprocessors, and bytes of shared memory.
struct Device {
    int processors, shared_per_block, shared_per_processor;
};

struct Half {
    uint16_t bits;
};
struct Bfloat16 {
    uint16_t bits;
};

// What is loaded and stored in one go.
struct alignas(16) Words4 {
    uint32_t word[4];
};
struct alignas(8) Words2 {
    uint32_t word[2];
};
struct alignas(16) Floats4 {
    float number[4];
};

// Bytes of shared memory that a block may have on every device for which there are kernels: 8.6 and 8.9 have the least.
constexpr int least_shared = 99 * 1024;

struct Grid {
    unsigned x = 1, y = 1, z = 1;
};

}  // namespace ptq::cuda

#if defined(__CUDACC__)
#include "cuda/device_gpu.h"
#else
#include "cuda/device_host.h"
#endif

namespace ptq::cuda {

// One number in any of the types that kernels read and write.
PTQ_DEVICE float widen(float x) {
    return x;
}
template <class T>
PTQ_DEVICE T convert(float x) {
    if constexpr (sizeof(T) == 4)
        return x;
    else
        return narrow<T>(x);
}
template <class T>
PTQ_DEVICE float rounded(float x) {
    return widen(convert<T>(x));
}

// `count` neighbours, of which `left` are there: as vectors where memory is `aligned` to 16 bytes. Zeros beyond.
template <class T, int count>
PTQ_DEVICE void load_numbers(const T* from, int left, bool aligned, float (&v)[count]) {
    constexpr int each = 16 / sizeof(T);
    if (count % each == 0 && aligned && left >= count) {
        PTQ_UNROLL
        for (int i = 0; i < count; i += each) {
            const Words4 words = load<Words4>(from + i);
            PTQ_UNROLL
            for (int j = 0; j < each; j++)
                if constexpr (sizeof(T) == 4)
                    v[i + j] = float_of(words.word[j]);
                else
                    v[i + j] = widen(T{static_cast<uint16_t>(words.word[j / 2] >> (16 * (j % 2)))});
        }
        return;
    }
    PTQ_UNROLL
    for (int i = 0; i < count; i++) v[i] = i < left ? widen(from[i]) : 0.0f;
}
template <class T, int count>
PTQ_DEVICE void store_numbers(T* to, int left, bool aligned, const float (&v)[count]) {
    constexpr int each = 16 / sizeof(T);
    if (count % each == 0 && aligned && left >= count) {
        PTQ_UNROLL
        for (int i = 0; i < count; i += each) {
            Words4 words;
            PTQ_UNROLL
            for (int j = 0; j < 4; j++)
                if constexpr (sizeof(T) == 4)
                    words.word[j] = bits_of(v[i + j]);
                else
                    words.word[j] = pack<T>(v[i + 2 * j], v[i + 2 * j + 1]);
            store<Words4>(to + i, words);
        }
        return;
    }
    PTQ_UNROLL
    for (int i = 0; i < count; i++)
        if (i < left) to[i] = convert<T>(v[i]);
}

}  // namespace ptq::cuda
