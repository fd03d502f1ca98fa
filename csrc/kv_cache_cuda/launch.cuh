// How the kernels of the packed KV cache are launched. No torch here.
#pragma once

#include "kv_cache_cuda/append.cuh"
#include "kv_cache_cuda/attend.cuh"

namespace ptq::kv_cache_cuda {

inline const char* run_append(const Append& p, Stream stream) {
    const int units = p.to.heads * p.count;
    return launch<append_kernel>({static_cast<unsigned>((units + append_warps - 1) / append_warps)}, 32 * append_warps,
                                 append_warps * (most_channels + 32), stream, p);
}

inline const char* run_dequantize(const Dequantize& p, Stream stream) {
    const int64_t count = static_cast<int64_t>(p.length) * p.from.d;
    const Grid grid{static_cast<unsigned>((count + dequantize_threads - 1) / dequantize_threads),
                    static_cast<unsigned>(p.from.heads)};
    return launch<dequantize_kernel>(grid, dequantize_threads, 0, stream, p);
}

inline const char* run_attend(const Attend& p, Stream stream) {
    const Grid grid{static_cast<unsigned>(p.chunks()), static_cast<unsigned>(p.k.heads),
                    static_cast<unsigned>((p.rows() + rows_at_once - 1) / rows_at_once)};
    const auto run = [&]<int bits>() {
        return launch<attend_kernel<bits>>(grid, 32 * attend_warps, static_cast<size_t>(p.shared_bytes()), stream, p);
    };
    const char* error = p.v.bits == 2   ? run.operator()<2>()
                        : p.v.bits == 3 ? run.operator()<3>()
                        : p.v.bits == 4 ? run.operator()<4>()
                        : p.v.bits == 6 ? run.operator()<6>()
                                        : run.operator()<8>();
    if (error) return error;
    return launch<merge_kernel>({static_cast<unsigned>(p.rows()), static_cast<unsigned>(p.k.heads)}, merge_threads, 0,
                                stream, p);
}

}  // namespace ptq::kv_cache_cuda
