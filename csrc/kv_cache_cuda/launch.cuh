// How the kernels of the packed KV cache are launched. No torch here.
#pragma once

#include "kv_cache_cuda/append.cuh"
#include "kv_cache_cuda/attend.cuh"
#include "kv_cache_cuda/decode.cuh"
#include "kv_cache_cuda/merge.cuh"

namespace ptq::kv_cache_cuda {

// What run<bits>() says.
template <class Run>
const char* with_bits(int bits, const Run& run) {
    return bits == 2   ? run.template operator()<2>()
           : bits == 3 ? run.template operator()<3>()
           : bits == 4 ? run.template operator()<4>()
           : bits == 6 ? run.template operator()<6>()
                       : run.template operator()<8>();
}

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

inline const char* run_dequantize(const Dequantize& p, Stream stream) {
    const int64_t count = static_cast<int64_t>(p.length) * p.from.d;
    const Grid grid{static_cast<unsigned>((count + dequantize_threads - 1) / dequantize_threads),
                    static_cast<unsigned>(p.from.heads)};
    return launch<dequantize_kernel>(grid, dequantize_threads, 0, stream, p);
}

// Whether decode_kernel can do it; attend_kernel does the rest.
inline bool is_common(const Attend& p) {
    return p.k.bits == p.v.bits && p.parts <= 2 && !p.starts && p.k.d % 16 == 0 && p.k.d <= 256;
}
// How many blocks of threads share the context. By the shape alone: the same bits on every device.
inline int splits_of(const Attend& p) {
    if (!is_common(p)) return p.chunks();
    constexpr int most_blocks = 384, alone = 4;  // about three for each processor; what one block does without a merge
    const int groups = (p.length + decode_warps * block_tokens - 1) / (decode_warps * block_tokens);
    const int blocks = most_blocks / (p.k.heads * p.row_blocks()), most = blocks ? blocks : 1;
    const int each = groups <= alone ? alone : (groups + most - 1) / most;
    return (groups + each - 1) / each;
}

inline const char* run_decode(const Attend& p, Stream stream) {
    const Grid grid{static_cast<unsigned>(p.splits), static_cast<unsigned>(p.k.heads),
                    static_cast<unsigned>(p.row_blocks())};
    const auto run = [&]<int bits, int most_d, int parts>() {
        return launch<decode_kernel<bits, bits, most_d, parts>>(grid, 32 * decode_warps,
                                                                decode_shared<bits, bits, most_d, parts>(), stream, p);
    };
    const auto with_parts = [&]<int bits, int most_d>() {
        return p.parts == 1 ? run.template operator()<bits, most_d, 1>() : run.template operator()<bits, most_d, 2>();
    };
    const auto with_d = [&]<int bits>() {
        return p.k.d <= 64    ? with_parts.template operator()<bits, 64>()
               : p.k.d <= 128 ? with_parts.template operator()<bits, 128>()
                              : with_parts.template operator()<bits, 256>();
    };
    return with_bits(p.k.bits, with_d);
}
inline const char* run_general(const Attend& p, Stream stream) {
    const Grid grid{static_cast<unsigned>(p.chunks()), static_cast<unsigned>(p.k.heads),
                    static_cast<unsigned>(p.row_blocks())};
    return with_bits(p.v.bits, [&]<int bits>() {
        return launch<attend_kernel<bits>>(grid, 32 * attend_warps, static_cast<size_t>(p.shared_bytes()), stream, p);
    });
}

// `splits` is what splits_of says.
inline const char* run_attend(const Attend& p, Stream stream) {
    const bool common = is_common(p);
    const char* error = common ? run_decode(p, stream) : run_general(p, stream);
    if (error || (common && p.splits == 1)) return error;
    const Grid grid{static_cast<unsigned>(p.rows()), static_cast<unsigned>(p.k.heads),
                    static_cast<unsigned>((p.v.d + merge_channels - 1) / merge_channels)};
    return launch<merge_kernel>(grid, 32 * merge_warps, merge_warps * merge_channels * 4, stream, p);
}

}  // namespace ptq::kv_cache_cuda
