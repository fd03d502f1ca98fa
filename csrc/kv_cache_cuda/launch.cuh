// How the kernels on keys and values, packed or plain, are launched. No torch here.
#pragma once

#include <cmath>

#include "common/bits.h"
#include "kv_cache_cuda/append.cuh"
#include "kv_cache_cuda/attend.cuh"
#include "kv_cache_cuda/decode.cuh"
#include "kv_cache_cuda/input.cuh"
#include "kv_cache_cuda/merge.cuh"
#include "kv_cache_cuda/plain.cuh"

namespace ptq::kv_cache_cuda {

inline const char* run_append(const Append& p, Stream stream) {
    const int units = p.to.heads * p.count;
    const Grid grid{static_cast<unsigned>((units + append_warps - 1) / append_warps)};
    const auto run = [&]<class T>() {
        return p.to.d <= 128 ? launch<append_kernel<T, 1>>(grid, 32 * append_warps, 0, stream, p)
                             : launch<append_kernel<T, most_channels / 128>>(grid, 32 * append_warps, 0, stream, p);
    };
    return p.kind == Number::float32   ? run.template operator()<float>()
           : p.kind == Number::float16 ? run.template operator()<Half>()
                                       : run.template operator()<Bfloat16>();
}

// Fills in what follows from the rest. `kind`: of all numbers.
template <class Room>
const char* run_input(Input<Room> p, Number kind, Stream stream) {
    p.scale = p.order > 1 ? 1 / std::sqrt(static_cast<float>(p.order)) : 1;
    const int64_t units = int64_t{p.batch} * p.tokens * p.heads();
    const Grid grid{static_cast<unsigned>((units + input_warps - 1) / input_warps)};
    const auto run = [&]<class T>() {
        return p.d <= 128
                   ? launch<input_kernel<T, 1, Room>>(grid, 32 * input_warps, 0, stream, p)
                   : launch<input_kernel<T, most_input_channels / 128, Room>>(grid, 32 * input_warps, 0, stream, p);
    };
    return kind == Number::float32   ? run.template operator()<float>()
           : kind == Number::float16 ? run.template operator()<Half>()
                                     : run.template operator()<Bfloat16>();
}

inline const char* run_dequantize(const Dequantize& p, Stream stream) {
    const int64_t count = static_cast<int64_t>(p.length) * p.from.d;
    const Grid grid{static_cast<unsigned>((count + dequantize_threads - 1) / dequantize_threads),
                    static_cast<unsigned>(p.from.heads)};
    return launch<dequantize_kernel>(grid, dequantize_threads, 0, stream, p);
}

// What blocks of threads that share a context have found comes together.
static inline const char* run_merge(const Attend& p, Stream stream) {
    const Grid grid{static_cast<unsigned>(p.rows()), static_cast<unsigned>(p.k.heads),
                    static_cast<unsigned>((p.v.d + merge_channels - 1) / merge_channels)};
    return launch<merge_kernel>(grid, 32 * merge_warps, merge_warps * merge_channels * 4, stream, p);
}

// Whether decode_kernel can do it; attend_kernel does the rest.
inline bool is_common(const Attend& p) {
    return p.k.bits == p.v.bits && p.parts <= 2 && !p.starts && p.k.d % 16 == 0 && p.k.d <= 256;
}
// How many blocks of threads of decode_kernel or plain_kernel share the context. By the shape alone: the same bits on
// every device.
inline int shares_of(const Attend& p) {
    constexpr int most_blocks = 384, alone = 4;  // about three for each processor; what one block does without a merge
    const int groups = (p.length + decode_warps * block_tokens - 1) / (decode_warps * block_tokens);
    const int blocks = most_blocks / (p.k.heads * p.row_blocks()), most = blocks ? blocks : 1;
    const int each = groups <= alone ? alone : (groups + most - 1) / most;
    return (groups + each - 1) / each;
}
inline int splits_of(const Attend& p) {
    return is_common(p) ? shares_of(p) : p.chunks();
}

inline const char* run_decode(const Attend& p, Stream stream) {
    const Grid grid{static_cast<unsigned>(p.splits), static_cast<unsigned>(p.k.heads),
                    static_cast<unsigned>(p.row_blocks())};
    const auto run = [&]<int bits, int most_d, int parts>() {
        return launch<decode_kernel<bits, most_d, parts>>(grid, 32 * decode_warps, decode_shared<bits, most_d, parts>(),
                                                          stream, p);
    };
    const auto with_parts = [&]<int bits, int most_d>() {
        return p.parts == 1 ? run.template operator()<bits, most_d, 1>() : run.template operator()<bits, most_d, 2>();
    };
    const auto with_d = [&]<int bits>() {
        return p.k.d <= 64    ? with_parts.template operator()<bits, 64>()
               : p.k.d <= 128 ? with_parts.template operator()<bits, 128>()
                              : with_parts.template operator()<bits, 256>();
    };
    return with_bits<2, 3, 4, 6, 8>(p.k.bits, with_d);
}
inline const char* run_general(const Attend& p, Stream stream) {
    const Grid grid{static_cast<unsigned>(p.chunks()), static_cast<unsigned>(p.k.heads),
                    static_cast<unsigned>(p.row_blocks())};
    return with_bits<2, 3, 4, 6, 8>(p.v.bits, [&]<int bits>() {
        return launch<attend_kernel<bits>>(grid, 32 * attend_warps, static_cast<size_t>(p.shared_bytes()), stream, p);
    });
}

// `splits` is what splits_of says.
inline const char* run_attend(const Attend& p, Stream stream) {
    const bool common = is_common(p);
    const char* error = common ? run_decode(p, stream) : run_general(p, stream);
    if (error || (common && p.splits == 1)) return error;
    return run_merge(p, stream);
}

// `splits` is what shares_of says. Heads of whole 8 channels, at most 256; all at multiples of 16 bytes.
inline const char* run_plain(const Plain& p, Stream stream) {
    const Attend& a = p.attend;
    const Grid grid{static_cast<unsigned>(a.splits), static_cast<unsigned>(a.k.heads),
                    static_cast<unsigned>(a.row_blocks())};
    const auto run = [&]<class T, int most_d>() {
        return launch<plain_kernel<T, most_d>>(grid, 32 * decode_warps, plain_shared<T, most_d>(), stream, p);
    };
    const auto with_d = [&]<class T>() {
        return a.k.d <= 64    ? run.template operator()<T, 64>()
               : a.k.d <= 128 ? run.template operator()<T, 128>()
                              : run.template operator()<T, 256>();
    };
    const char* error =
        a.q_kind == Number::float16 ? with_d.template operator()<Half>() : with_d.template operator()<Bfloat16>();
    return error || a.splits == 1 ? error : run_merge(a, stream);
}

}  // namespace ptq::kv_cache_cuda
