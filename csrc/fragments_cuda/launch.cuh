// How many blocks of threads, and how many splits of the columns fill the device. Which shapes there are is said by the
// formats. No torch here.
#pragma once

#include <algorithm>

#include "fragments_cuda/dequantize.cuh"
#include "fragments_cuda/linear.cuh"
#include "fragments_cuda/quantized.cuh"

namespace ptq::fragments {

struct Device {
    int processors, shared_per_processor, shared_per_block;
};

// Whether a block of this shape has room for so many tokens.
template <class S>
bool has_room(int tokens, const Device& device) {
    return Buffers<S, 2>::bytes(kept_rows<S>(tokens)) <= device.shared_per_block;
}

// The fewest splits of the columns with which four fifths of the device are busy, or the best there are. Busy: 32 KiB
// of weights are on their way to every processor, which is the bandwidth of an H200 times 0.8 microseconds.
template <class S>
int splits_of(const Weights& w, int tokens, const Device& device) {
    constexpr int most = 16, in_flight = S::threads / 32 * S::steps * S::tiles * S::block_bytes;
    const int blocks = static_cast<int>(grid_of<S>(w, tokens, 1).x);
    const int shared_bytes = Buffers<S, 2>::bytes(kept_rows<S>(tokens)) + 1024;
    const int resident = std::clamp(device.shared_per_processor / shared_bytes, 1, 2048 / S::threads);
    const int at_once = device.processors * std::min(resident, (32 * 1024 + in_flight - 1) / in_flight);
    const int columns = (w.k + block_columns - 1) / block_columns;
    int best = 1;
    double best_share = 0;
    for (int s = 1; s <= std::min(most, columns / (S::along * S::steps)); s++) {
        const int count = blocks * s, waves = (count + at_once - 1) / at_once;
        const double share = static_cast<double>(count) / (static_cast<double>(waves) * at_once);
        if (share > best_share + 1e-9) best = s, best_share = share;
        if (share >= 0.8) break;
    }
    return best;
}

inline const char* launch_reduce(const Linear& p, Stream stream) {
    constexpr int threads = 256;
    const int64_t count = static_cast<int64_t>(p.tokens) * p.w.n;
    return launch<reduce_kernel<threads>>({static_cast<unsigned>((count + threads - 1) / threads)}, threads, 0, stream,
                                          p);
}
// p.splits is what `splits_of` says, or any smaller number.
template <class T, class S>
const char* launch_linear(const Linear& p, Stream stream) {
    // Others are for devices that have more (`has_room`), with one tile of tokens.
    static_assert(S::token_tiles == 1 || Buffers<S, 2>::bytes() <= least_shared);
    const char* error = launch<linear_kernel<T, S>>(grid_of<S>(p.w, p.tokens, p.splits), S::threads,
                                                    Buffers<S, 2>::bytes(kept_rows<S>(p.tokens)), stream, p);
    return error || p.splits == 1 ? error : launch_reduce(p, stream);
}
template <class S>
const char* launch_quantized(const Quantized& p, Stream stream) {
    static_assert(Buffers<S, 1>::bytes() <= least_shared);
    return launch<quantized_kernel<S>>(grid_of<S>(p.w, p.tokens, 1), S::threads,
                                       Buffers<S, 1>::bytes(kept_rows<S>(p.tokens)), stream, p);
}
template <class T, class Code>
const char* launch_dequantize(const Dequantize& p, Stream stream) {
    const int blocks = (p.w.k + block_columns - 1) / block_columns;
    const Grid grid{static_cast<unsigned>((p.w.n + tile_rows - 1) / tile_rows),  // on x: y ends at 65535
                    static_cast<unsigned>((blocks + dequantize_warps - 1) / dequantize_warps)};
    return launch<dequantize_kernel<T, Code>>(grid, 32 * dequantize_warps, 0, stream, p);
}

}  // namespace ptq::fragments
