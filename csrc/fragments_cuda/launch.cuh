// How many blocks of threads, and how many splits of the columns fill the device. Which shapes there are is said by the
// formats. No torch here.
#pragma once

#include <algorithm>

#include "fragments_cuda/dequantize.cuh"
#include "fragments_cuda/linear.cuh"
#include "fragments_cuda/quantized.cuh"

namespace ptq::fragments {

using cuda::Device;

// Whether a block of this shape has room for so many tokens of `element` bytes.
template <class S, int element>
bool has_room(int tokens, const Device& device) {
    return Buffers<S, element>::bytes(kept_rows<S>(tokens)) <= device.shared_per_block;
}

// How a product of few tokens is spread over the device: `buffers` of tokens, all of them where that leaves room for as
// many blocks of threads as registers do, and as many `blocks` for all rows as run at once.
struct Spread {
    int buffers, blocks;
    size_t shared_bytes;
};
template <class S, int element>
Spread spread_of(const Weights& w, int tokens, int splits, const Device& device) {
    const int rows = kept_rows<S>(tokens), chunks = chunks_of<S>(w.k, splits), groups = groups_of_rows<S>(w);
    const auto bytes = [&](int buffers) { return Buffers<S, element>::bytes(rows, buffers); };
    const int room = std::min(device.shared_per_block, device.shared_per_processor / S::resident - 1024);
    const int buffers = bytes(chunks) <= room ? chunks : 2;
    if (!S::roams) return {buffers, groups, static_cast<size_t>(bytes(buffers))};
    const int resident = std::clamp(device.shared_per_processor / (bytes(buffers) + 1024), 1, S::resident);
    const int at_once = std::max(1, device.processors * resident / splits);
    return {buffers, std::min(groups, at_once), static_cast<size_t>(bytes(buffers))};
}

// Splits of the columns, where the rows alone would leave most of the device idle: with few of them, or, of products of
// many tokens, as many as keep four fifths of it busy, or the best there are.
template <class S>
int splits_of(const Weights& w, int tokens, const Device& device) {
    constexpr int most = 16;
    const int blocks = static_cast<int>(grid_of<S>(w, tokens, 1).x),
              columns = (w.k + block_columns - 1) / block_columns;
    int best = 1;
    double best_share = 0;
    for (int s = 1; s <= std::min(most, columns / (S::along * S::steps)); s++) {
        const int count = blocks * s, waves = (count + device.processors - 1) / device.processors;
        const double share = static_cast<double>(count) / (static_cast<double>(waves) * device.processors);
        if (share > best_share + 1e-9) best = s, best_share = share;
        if (!S::roams ? share >= 0.8 : 2 * count >= device.processors) break;
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
const char* launch_linear(Linear p, const Device& device, Stream stream) {
    // Others are for devices that have more (`has_room`).
    static_assert(S::roams || Buffers<S, 2>::bytes() <= least_shared);
    const Spread spread = spread_of<S, 2>(p.w, p.tokens, p.splits, device);
    p.blocks = spread.blocks, p.buffers = spread.buffers;
    const char* error = launch<linear_kernel<T, S>>(grid_of<S>(p.w, p.tokens, p.splits, p.blocks), S::threads,
                                                    spread.shared_bytes, stream, p);
    return error || p.splits == 1 ? error : launch_reduce(p, stream);
}
template <class S>
const char* launch_quantized(Quantized p, const Device& device, Stream stream) {
    static_assert(S::roams || Buffers<S, 1>::bytes() <= least_shared);
    const Spread spread = spread_of<S, 1>(p.w, p.tokens, 1, device);
    p.blocks = spread.blocks, p.buffers = spread.buffers;
    return launch<quantized_kernel<S>>(grid_of<S>(p.w, p.tokens, 1, p.blocks), S::threads, spread.shared_bytes, stream,
                                       p);
}
template <class T, class Code>
const char* launch_dequantize(const Dequantize& p, Stream stream) {
    const int blocks = (p.w.k + block_columns - 1) / block_columns;
    const Grid grid{static_cast<unsigned>((p.w.n + tile_rows - 1) / tile_rows),  // on x: y ends at 65535
                    static_cast<unsigned>((blocks + dequantize_warps - 1) / dequantize_warps)};
    return launch<dequantize_kernel<T, Code>>(grid, 32 * dequantize_warps, 0, stream, p);
}

}  // namespace ptq::fragments
