// The kernels for many tokens, of one level: included after PTQ_GEMM_LEVEL, the name of its table, is defined. A panel
// of a strip is unpacked once for all tokens (csrc/gemm/strips.h).
#pragma once

#include <algorithm>
#include <new>
#include <type_traits>
#include <vector>

#include "e8p_tiled/gemm_kernels.h"
#include "e8p_tiled/numbers.h"
#include "gemm/strips.h"
#include "integer_tiled/decode_lanes.h"

namespace ptq::e8p_tiled {
namespace {

using gemm::strip;

template <Kind kind>
constexpr int64_t block_tokens = gemm::tokens_of_a_block(static_cast<int64_t>(kind));
// Those whose sums fit into registers.
#if defined(__AVX512F__)
template <Kind kind>
constexpr int64_t most_tokens = block_tokens<kind>;
#else
template <Kind kind>
constexpr int64_t most_tokens = 4;
#endif

template <Kind kind>
struct Steps {  // of a block
    static constexpr int64_t count = block_columns / static_cast<int64_t>(kind);
    using Number = std::conditional_t<kind == Kind::bytes, int32_t, float>;
    using Sum = std::conditional_t<kind == Kind::bytes, SignedInts, Lanes>;

    template <int bits>
    static Sum product(Sum sum, Dwords w, int32_t x) {
        if constexpr (kind == Kind::bytes) return integer_tiled::dot<are_wide(bits)>(sum, w, x);
#if defined(__AVX512BF16__)
        else if constexpr (kind == Kind::pairs)
            return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(x));
#endif
        else
            return fma((Lanes)w, fill(integer::from_bits(static_cast<uint32_t>(x))), sum);
    }
};

inline int64_t steps_of(const Gemm& g) {
    return blocks_in(g.w.k) * block_columns / static_cast<int64_t>(g.kind);
}

template <int64_t tokens>
void pack_of(const Gemm& g, int64_t first, int64_t last) {
    const int64_t steps = steps_of(g);
    const std::vector<int32_t> nothing(steps);
    for (int64_t b = first; b < last; b++) {
        const int32_t* rows[tokens];
        for (int64_t j = 0; j < tokens; j++) {
            const int64_t token = b * tokens + j;
            rows[j] = token < g.t ? g.rows + token * g.row_steps : nothing.data();
        }
        gemm::pack_block<tokens>(rows, steps, (g.t + tokens - 1) / tokens, b, g.x);
    }
}

void pack(const Gemm& g, int64_t first, int64_t last) {
    (g.kind == Kind::bytes ? pack_of<block_tokens<Kind::bytes>> : pack_of<block_tokens<Kind::pairs>>)(g, first, last);
}

struct Scratch {
    uint32_t* panel;  // [strip, steps_of_a_panel, 16]
    void* sums;       // [tokens, strip, 16]: of the panels before
};

// `count` blocks of some row tiles; meanwhile those that follow are fetched.
template <Kind kind, int bits, int tiles>
void unpack_panel(const Points<bits>& points, const uint8_t* blocks, int64_t tile_step, int64_t count,
                  uint32_t* panel) {
    constexpr int64_t ahead = gemm::steps_of_a_panel / Steps<kind>::count * block_bytes(bits);
    for (int r = 0; r < tiles; r++) {
        const uint8_t* from = blocks + r * tile_step;
        for (int64_t b = 0; b < count; b++, from += block_bytes(bits)) {
            for (int64_t i = 0; i < block_bytes(bits); i += 64) __builtin_prefetch(from + ahead + i, 0, 2);
            Dwords weights[quads];
            points.unpack(from, weights);
#pragma GCC unroll 8
            for (int i = 0; i < quads; i++) {
                Dwords steps[4];
                constexpr int each = 4 / static_cast<int>(kind);
                if constexpr (kind == Kind::bytes) {
                    steps[0] = weights[i];
                } else if constexpr (kind == Kind::floats) {
                    to_floats<bits>(weights[i], steps);
                } else {
#if defined(__AVX512BF16__)
                    to_pairs<bits>(weights[i], steps);
#endif
                }
                for (int s = 0; s < each; s++) store_vector(panel + 16 * s, steps[s]);
                panel += each * 16;
            }
        }
    }
}

#define PTQ_EACH_SUM \
    _Pragma("GCC unroll 8") for (int t = 0; t < tokens; t++) _Pragma("GCC unroll 4") for (int r = 0; r < tiles; r++)

// A panel and a block of tokens: sums += their products. The first panel begins with the offsets.
template <Kind kind, int bits, int tiles, int tokens>
void multiply_panel(const uint32_t* panel, int64_t steps, const int32_t* x, const int32_t* offsets,
                    typename Steps<kind>::Sum* sums) {
    using Sum = typename Steps<kind>::Sum;
    Sum sum[tokens][tiles];
    if (offsets)
        PTQ_EACH_SUM sum[t][r] = Sum{} + static_cast<typename Steps<kind>::Number>(offsets[t]);
    else
        PTQ_EACH_SUM sum[t][r] = sums[t * tiles + r];
    gemm::multiply_steps<tiles, tokens, block_tokens<kind>, Sum, Dwords>(panel, steps, x, sum,
                                                                         Steps<kind>::template product<bits>);
    PTQ_EACH_SUM sums[t * tiles + r] = sum[t][r];
}
#undef PTQ_EACH_SUM

// The same for any number of tokens up to a block; the last sums for nothing.
template <Kind kind, int bits, int tiles>
void multiply_tokens(const uint32_t* panel, int64_t steps, const int32_t* x, const int32_t* offsets,
                     typename Steps<kind>::Sum* sums, int64_t tokens) {
    if (most_tokens<kind> == 8 && tokens > 4)
        return multiply_panel<kind, bits, tiles, most_tokens<kind>>(panel, steps, x, offsets, sums);
    for (; tokens > 0; tokens -= 4, x += 4, offsets += offsets ? 4 : 0, sums += 4 * tiles)
        (tokens > 2 ? multiply_panel<kind, bits, tiles, 4> : multiply_panel<kind, bits, tiles, 2>)(panel, steps, x,
                                                                                                   offsets, sums);
}

// The last panel is done.
template <Kind kind, int tiles>
void finish(const Gemm& g, const typename Steps<kind>::Sum* sums, int64_t tile, int64_t first, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++)
        for (int r = 0; r < tiles; r++) {
            const int64_t row = (tile + r) * tile_rows, count = std::min(tile_rows, g.w.n - row);
            Lanes y = g.w.scale * converted<Lanes>(sums[t * tiles + r]);
            if (kind == Kind::bytes) y *= g.q_scale[first + t];
            if (g.bias) y += integer_tiled::load_bias(g.bias, row, count);
            integer_tiled::store_result(g.out, g.out_type, (first + t) * g.w.n + row, y, count);
        }
}

// Results are written with large strides: without this, each line would be waited for.
template <int tiles>
void fetch_results(const Gemm& g, int64_t tile, int64_t first, int64_t tokens) {
    const int64_t size = g.out_type == Number::float32 ? 4 : 2;
    for (int64_t t = first; t < std::min(g.t, first + tokens); t++)
        for (int64_t at = 0; at < tiles * tile_rows * size; at += 64)
            __builtin_prefetch(static_cast<const uint8_t*>(g.out) + (t * g.w.n + tile * tile_rows) * size + at, 1, 2);
}

// All of y for some row tiles and the tokens [first, last).
template <Kind kind, int bits, int tiles>
void multiply_strip(const Gemm& g, const Points<bits>& points, const Scratch& scratch, int64_t tile, int64_t first,
                    int64_t last) {
    const int64_t steps = steps_of(g), tile_step = tile_bytes(g.w.k, bits);
    const uint8_t* blocks = g.w.tiles + tile * tile_step;
    for (int64_t step = 0; step < steps; step += gemm::steps_of_a_panel) {
        const int64_t count = std::min(gemm::steps_of_a_panel, steps - step), block = step / Steps<kind>::count;
        unpack_panel<kind, bits, tiles>(points, blocks + block * block_bytes(bits), tile_step,
                                        count / Steps<kind>::count, scratch.panel);
        constexpr int64_t each = block_tokens<kind>;
        const bool done = step + count == steps;
        for (int64_t t = first; t < last; t += each) {
            const int64_t tokens = std::min(each, last - t);
            int32_t offsets[each] = {};
            if (kind == Kind::bytes) std::copy_n(g.offsets + t, tokens, offsets);
            const int32_t* x = g.x + gemm::place(steps, (g.t + each - 1) / each, each, step, t / each);
            auto* sums = static_cast<typename Steps<kind>::Sum*>(scratch.sums) + (t - first) * tiles;
            if (done) fetch_results<tiles>(g, tile, t, each);
            multiply_tokens<kind, bits, tiles>(scratch.panel, count, x, step ? nullptr : offsets, sums, tokens);
            if (done) finish<kind, tiles>(g, sums, tile, t, tokens);
        }
    }
}

template <Kind kind, int bits>
void multiply_of(const Gemm& g, int64_t first, int64_t last) {
    const Points<bits> points(tables());
    const int64_t tiles = row_tiles(g.w.n), most = gemm::row_tiles_of_a_strip, strips = (tiles + most - 1) / most;
    const int64_t panel = gemm::steps_of_a_panel * strip * 64, outputs = g.tokens * strip * 64;
    auto* memory = static_cast<uint8_t*>(::operator new(panel + outputs, std::align_val_t{64}));
    const Scratch scratch{reinterpret_cast<uint32_t*>(memory), memory + panel};
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t from = unit / strips * g.tokens, to = std::min(g.t, from + g.tokens);
        int64_t tile = unit % strips * most;
        const int64_t end = std::min(tiles, tile + most);
        for (; tile + strip <= end; tile += strip)
            multiply_strip<kind, bits, strip>(g, points, scratch, tile, from, to);
        if constexpr (strip == 3) {
            if (end - tile == 2) multiply_strip<kind, bits, 2>(g, points, scratch, tile, from, to);
            if (end - tile == 1) multiply_strip<kind, bits, 1>(g, points, scratch, tile, from, to);
        }
    }
    ::operator delete(memory, std::align_val_t{64});
}

template <Kind kind>
void multiply_kind(const Gemm& g, int64_t first, int64_t last) {
    constexpr decltype(&multiply_of<kind, 2>) of[] = {multiply_of<kind, 2>, multiply_of<kind, 3>, multiply_of<kind, 4>};
    of[g.w.bits - 2](g, first, last);
}

void multiply(const Gemm& g, int64_t first, int64_t last) {
    if (g.kind == Kind::bytes) return multiply_kind<Kind::bytes>(g, first, last);
#if defined(__AVX512BF16__)
    if (g.kind == Kind::pairs) return multiply_kind<Kind::pairs>(g, first, last);
#endif
    multiply_kind<Kind::floats>(g, first, last);
}

}  // namespace

const GemmKernels PTQ_GEMM_LEVEL{pack, multiply};

}  // namespace ptq::e8p_tiled
