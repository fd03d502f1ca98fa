// Which shape of the kernels for compute capability 9.0 to launch. No torch here.
#pragma once

#include "fragments_cuda/launch.cuh"
#include "fragments_cuda/wgmma_linear.cuh"
#include "fragments_cuda/wgmma_quantized.cuh"

namespace ptq::fragments {

// Up to these, linear.cuh and quantized.cuh: a product waits for its weights. They hold out longer with numbers of two
// bytes, and longest with weights of few rows, of which wgmma takes 128 at a time.
template <class X>
int few_wgmma_tokens(const Weights& w) {
    return sizeof(X) == 1 ? 16 : w.n >= 8192 ? 32 : 64;
}

// Row tiles of a warp, and splits of the columns.
struct WgmmaPlan {
    int tiles, splits;
};

// The one with which the device is done first, by counting: waves of blocks of threads, times the length of one (k /
// 140 microseconds on an H200). Two row tiles take nine tenths of the time of two times one, as tokens are fetched half
// as often; splits of the columns write and read their sums, at 3.5 MB in a microsecond.
inline WgmmaPlan wgmma_plan(const Weights& w, int tokens, int processors, int most_tiles, int most_splits) {
    const int blocks = (w.k + block_columns - 1) / block_columns;
    WgmmaPlan best{1, 1};
    double least = 0;
    for (int tiles = 1; tiles <= (w.groups == 1 ? most_tiles : 1); tiles++)
        for (int splits = 1; splits <= std::max(1, std::min(most_splits, blocks / 8)); splits++) {
            const int64_t rows = 128 * tiles, each = (int64_t{tokens} + wgmma_tokens - 1) / wgmma_tokens;
            const int64_t count = (w.n + rows - 1) / rows * each * splits,
                          waves = (count + processors - 1) / processors;
            const double sums = splits > 1 ? 8.0 * splits * tokens * w.n / 3.5e6 / (w.k / 140.0) : 0;
            const double time = static_cast<double>(waves) * (tiles == 1 ? 1 : 1.8) / splits + sums;
            if (least == 0 || time < least) least = time, best = {tiles, splits};
        }
    return best;
}

// Codes of the usual widths have both shapes, others one: that keeps the time to compile short.
constexpr int wgmma_tiles(int bits) {
    return bits == 4 || bits == 6 ? 2 : 1;
}
// Calls run.operator()<Shape>() with the shape of a plan.
template <class Code, class X, class Run>
auto with_wgmma_shape(const WgmmaPlan& plan, Run run) {
    if constexpr (wgmma_tiles(Code::bits) == 2)
        if (plan.tiles == 2) return run.template operator()<WgmmaShape<Code, X, 2, false>>();
    return run.template operator()<WgmmaShape<Code, X, 1, true>>();
}

// p.x are arranged tokens, p.splits are the plan's; where `suits_wgmma`.
template <class T, class Code>
const char* launch_wgmma_linear(const Linear& p, const WgmmaPlan& plan, Stream stream) {
    const char* error = with_wgmma_shape<Code, T>(plan, [&]<class S>() {
        return launch<wgmma_linear_kernel<S>>(grid_of<S>(p.w, p.tokens, p.splits), S::threads, S::shared_bytes, stream,
                                              p);
    });
    return error || p.splits == 1 ? error : launch_reduce(p, stream);
}
template <class Code>
const char* launch_wgmma_quantized(const Quantized& p, const WgmmaPlan& plan, Stream stream) {
    return with_wgmma_shape<Code, int8_t>(plan, [&]<class S>() {
        return launch<wgmma_quantized_kernel<S>>(grid_of<S>(p.w, p.tokens, 1), S::threads, S::shared_bytes, stream, p);
    });
}

}  // namespace ptq::fragments
