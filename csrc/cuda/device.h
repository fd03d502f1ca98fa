// The few things that a kernel asks of a GPU, so that the same kernel source also runs on a CPU, thread by thread, in
// the tests. Under nvcc each is one intrinsic or one line of PTX (device_gpu.h); under a host compiler it is emulated
// (device_host.h). Both headers define, in ptq::cuda:
//
//   PTQ_KERNEL(threads, blocks)   before `void name(Parameters p)`: at most `threads` in a block, `blocks` per SM
//   PTQ_DEVICE, PTQ_BOTH          before a function of the device; of device and host
//   PTQ_UNROLL, PTQ_CONSTANT      before a loop; before a table that the device reads
//   thread(), lane(), warp(), block_x(), block_y(), block_z(), shared()
//   block_barrier(), warp_barrier(), shuffle(value, from lane), shuffle_xor(value, mask)
//   load<V>(from), store(to, V)   aligned as V is, in global or shared memory
//   copy_async<bytes>(shared, global), copy_commit(), copy_wait<pending>()
//   mma<T>(c, a, b0, b1)          m16n8k16, T = Half or Bfloat16, float32 sums
//   mma_u8s8(c, a, b0, b1)        m16n8k32, A unsigned, B signed bytes, int32 sums
//   dp4a(a, b, c), byte_permute(a, b, selector), and_or(a, mask, bits), xor_and(a, b, mask)
//   rotate_left(x, by), keep(x)
//   fma2<T>(a, b, c)              two packed halves, each rounded once
//   widen(T), narrow<T>(float), pack<T>(low, high), float_of(bits), bits_of(float)
//   multiply, add, divide, round_to_int: rounded to the nearest, never contracted; exponential: e^x, nearly so
//   launch<kernel>(grid, threads, shared_bytes, stream, parameters) -> error text or nullptr
//
// All 32 lanes of a warp take part in every shuffle, mma and warp barrier, all threads of a block in every block
// barrier; the emulation reports where they do not.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ptq::cuda {

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

}  // namespace ptq::cuda
