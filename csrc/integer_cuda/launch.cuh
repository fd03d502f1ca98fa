// Which of the compiled shapes to launch, and how many splits of the columns fill the device. No torch here.
#pragma once

#include <algorithm>

#include "integer_cuda/dequantize.cuh"
#include "integer_cuda/linear.cuh"
#include "integer_cuda/quantized.cuh"

namespace ptq::integer_cuda {

constexpr int most_tokens = 64;  // of one pass over the weights

struct Device {
    int processors, shared_per_processor;
};

// Calls run.operator()<Shape>() with the shape for this many tokens. Four bits have all of them, other widths two: that
// keeps the time to compile short.
template <int bits, class Run>
auto with_linear_shape(int tokens, Run run) {
    if (tokens <= 8) return run.template operator()<Shape<bits, 1, 4, 2, 2>>();
    if constexpr (bits == 4) {
        if (tokens <= 16) return run.template operator()<Shape<bits, 2, 4, 2, 2>>();
        if (tokens <= 32) return run.template operator()<Shape<bits, 4, 1, 8, 1>>();
    }
    return run.template operator()<Shape<bits, 8, 1, 8, 1>>();
}
template <int bits, class Run>
auto with_quantized_shape(int tokens, Run run) {
    if (tokens <= 8) return run.template operator()<Shape<bits, 1, 1, 4, 1>>();
    if constexpr (bits == 4) {
        if (tokens <= 16) return run.template operator()<Shape<bits, 2, 1, 4, 1>>();
    }
    return run.template operator()<Shape<bits, 8, 1, 4, 1>>();
}
template <class Run>
auto with_bits(int bits, Run run) {
    switch (bits) {
        case 2:
            return run.template operator()<2>();
        case 3:
            return run.template operator()<3>();
        case 5:
            return run.template operator()<5>();
        case 6:
            return run.template operator()<6>();
        case 7:
            return run.template operator()<7>();
        case 8:
            return run.template operator()<8>();
        default:
            return run.template operator()<4>();
    }
}

template <class S, int element>
Grid grid_of(const Weights& w, int tokens, int splits) {
    return {static_cast<unsigned>((w.n + S::rows - 1) / S::rows), static_cast<unsigned>(splits),
            static_cast<unsigned>((tokens + S::tokens - 1) / S::tokens)};
}

// The fewest splits of the columns with which nine tenths of the device are busy, or the best there are.
template <class S>
int splits_of(const Weights& w, int tokens, const Device& device) {
    constexpr int most = 16;
    const Grid grid = grid_of<S, 2>(w, tokens, 1);
    const int blocks = static_cast<int>(grid.x * grid.z);
    const int resident = std::clamp(device.shared_per_processor / (Buffers<S, 2>::bytes + 1024), 1, 2048 / S::threads);
    const int at_once = device.processors * std::min(resident, 4);
    const int columns = (w.k + block_columns - 1) / block_columns;
    int best = 1;
    double best_share = 0;
    for (int s = 1; s <= std::min(most, columns / (S::along * S::steps)); s++) {
        const int count = blocks * s, waves = (count + at_once - 1) / at_once;
        const double share = static_cast<double>(count) / (static_cast<double>(waves) * at_once);
        if (share > best_share + 1e-9) best = s, best_share = share;
        if (share >= 0.9) break;
    }
    return best;
}
inline int linear_splits(const Weights& w, int bits, int tokens, const Device& device) {
    return with_bits(bits, [&]<int b>() {
        return with_linear_shape<b>(tokens, [&]<class S>() { return splits_of<S>(w, tokens, device); });
    });
}

// p.splits is what `linear_splits` says, or any smaller number.
template <class T>
const char* run_linear(const Linear& p, int bits, Stream stream) {
    const char* error = with_bits(bits, [&]<int b>() {
        return with_linear_shape<b>(p.tokens, [&]<class S>() {
            return launch<linear_kernel<T, S>>(grid_of<S, 2>(p.w, p.tokens, p.splits), S::threads, Buffers<S, 2>::bytes,
                                               stream, p);
        });
    });
    if (error || p.splits == 1) return error;
    const int64_t count = static_cast<int64_t>(p.tokens) * p.w.n;
    return launch<reduce_kernel<T>>({static_cast<unsigned>((count + reduce_threads - 1) / reduce_threads)},
                                    reduce_threads, 0, stream, p);
}

inline const char* run_quantized(const Quantized& p, int bits, Stream stream) {
    return with_bits(bits, [&]<int b>() {
        return with_quantized_shape<b>(p.tokens, [&]<class S>() {
            return launch<quantized_kernel<S>>(grid_of<S, 1>(p.w, p.tokens, 1), S::threads, Buffers<S, 1>::bytes,
                                               stream, p);
        });
    });
}

template <class T>
const char* run_dequantize(const Dequantize& p, int bits, Stream stream) {
    const int blocks = (p.w.k + block_columns - 1) / block_columns;
    const Grid grid{static_cast<unsigned>((blocks + dequantize_warps - 1) / dequantize_warps),
                    static_cast<unsigned>((p.w.n + tile_rows - 1) / tile_rows)};
    return with_bits(
        bits, [&]<int b>() { return launch<dequantize_kernel<T, b>>(grid, 32 * dequantize_warps, 0, stream, p); });
}

}  // namespace ptq::integer_cuda
