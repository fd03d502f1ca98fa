// The kernels for many tokens, of one level: included after PTQ_GEMM_LEVEL, the name of its table, is defined.
//
// A panel of a strip (48 rows, 512 columns) is unpacked to bytes in the first-level cache and serves every block of
// four tokens. The sums of 3 x 4 vectors stay in registers, integers and (with 32 registers) floats alike: the loads of
// four activations and three vectors of codes are then well below the two that a cycle can do beside twelve products.
#pragma once

#include <new>
#include <utility>

#include "integer_tiled/gemm_pack.h"

namespace ptq::integer_tiled {
namespace {

using gemm::Block;
using gemm::Columns;

// Row tiles of a strip at this level.
#if defined(__AVX512F__)
constexpr int strip = gemm_tiles;
#else
constexpr int strip = 1;
#endif

// --- codes -----------------------------------------------------------------------------------------------------------

// The columns of a panel of some row tiles, as bytes: [super-block][row tile][quad].
template <int bits, int tiles>
void unpack_panel(const Weight& w, int64_t tile, int64_t column, int64_t end, uint8_t* panel) {
    for (int r = 0; r < tiles; r++) {
        const uint8_t* from = w.tiles + (tile + r) * tile_bytes(w.k, bits) + column / block_columns * block_bytes(bits);
        uint8_t* to = panel + r * block_bytes(8);
        for (int64_t c = column; c < end; c += block_columns, from += block_bytes(bits), to += tiles * block_bytes(8)) {
            Dwords codes[quads];
            unpack_block<bits>(from, codes);
            for (int i = 0; i < quads; i++) store_vector(to + 64 * i, codes[i]);
        }
    }
}

// Codes of `bits` bits: as bytes of a panel, or as they are in the weight.
template <int bits, bool in_panel>
struct Codes {
    static constexpr int stored = in_panel ? 8 : bits;
    using Sum = SignedInts;
    static constexpr int64_t x_step = quads * gemm_tokens;
    template <int tiles>
    static constexpr int64_t codes_step = in_panel ? tiles * block_bytes(8) : block_bytes(stored);

    template <int tiles, int tokens>
    PTQ_INLINE static void multiply(const uint8_t* codes, int64_t step, const uint32_t* x,
                                    SignedInts sum[tokens][tiles]) {
        const int64_t tile_step = in_panel ? block_bytes(8) : step;
        BlockSum<bits> part[tokens][tiles];
        const auto quad = [&]<int i>() __attribute__((always_inline)) {
            Dwords c[tiles];
#pragma GCC unroll 3
            for (int r = 0; r < tiles; r++) c[r] = quad_of<stored, i>(codes + r * tile_step);
            PTQ_EACH_SUM part[t][r].template add<i>(sum[t][r], c[r], static_cast<int32_t>(x[i * gemm_tokens + t]));
        };
        [&]<int... i>(std::integer_sequence<int, i...>) __attribute__((always_inline)) {
            (quad.template operator()<i>(), ...);
        }(std::make_integer_sequence<int, quads>{});
    }
};

// --- a strip ---------------------------------------------------------------------------------------------------------

inline int64_t strips_of(const Weight& w) {
    return (row_tiles(w.n) + gemm_tiles - 1) / gemm_tiles;
}

struct Scratch {
    uint8_t* panel;  // [gemm_columns / 32, strip, 8, 64]
    float* total;    // [tokens, strip, 16]
    int32_t* open;   // the same
    float* scale;    // [groups, strip, 16]
};

// Up to here, taking codes apart for every block of tokens costs less than a panel (measured on Zen 5).
template <int bits>
constexpr int64_t direct_tokens = bits == 8                ? 1 << 30
                                  : bits == 4 || bits == 2 ? 32
                                                           : 0;

// Bits of the codes in a panel, as far as they make a difference to products: eight take another path, and are never in
// a panel.
#if defined(__AVX512F__)
template <int bits>
constexpr int panel_bits = 7;
#else
template <int bits>
constexpr int panel_bits = bits;
#endif

// A panel and the tokens [first, last).
template <class Op, int tiles>
void multiply_tokens(const Gemm& g, const Columns& c, Block b, int64_t tile, int64_t first, int64_t last,
                     gemm::Ahead& ahead) {
    const Quantized& p = g.p;
    const gemm::Results results{p.q_scale, p.bias, p.out, p.out_type, p.t, p.w.n};
    const int64_t group = c.column / c.group;
    const bool done = c.end == c.all;
    b.x = reinterpret_cast<const uint32_t*>(g.x) + place(p, c.column, c.end, first / gemm_tokens);
    b.x_step = (c.end - c.column) / 4 * gemm_tokens;
    b.offset = g.offset + first * p.w.groups + group * gemm_tokens, b.offset_step = gemm_tokens;
    b.scale += group * tiles * tile_rows;
    b.zero_step = p.w.groups * tile_rows;
    b.zero = p.w.zero ? p.w.zero + tile * b.zero_step + group * tile_rows : nullptr;
    b.ahead = &ahead;
    c.describe(b);
    for (int64_t t = first; t < last; t += gemm_tokens) {
        if (done) gemm::fetch_results<tiles>(results, tile, t + gemm_tokens, gemm_tokens);
        last - t > 2 ? gemm::multiply_block<Op, tiles, 4>(b) : gemm::multiply_block<Op, tiles, 2>(b);
        if (done) gemm::finish<tiles>(results, b.total, nullptr, tile, t, std::min(gemm_tokens, last - t));
        b.x += b.x_step, b.offset += p.w.groups * gemm_tokens;
        b.total += gemm_tokens * tiles * tile_rows, b.open += gemm_tokens * tiles * tile_rows;
    }
}

// All of y for some row tiles and the tokens [first, last). The strip that comes next is fetched meanwhile.
template <int bits, int tiles>
void multiply_strip(const Gemm& g, const Run& run, const Scratch& scratch, int64_t tile, int64_t first, int64_t last) {
    const Weight& w = g.p.w;
    const int64_t bytes = tile_bytes(w.k, bits), blocks = (last - first + gemm_tokens - 1) / gemm_tokens;
    const auto scales = [&](int64_t tile) { return w.scale + tile * w.groups * tile_rows; };
    gemm::load_scales<tiles>(scales(tile), w.groups, scratch.scale);
    std::memset(scratch.total, 0, blocks * gemm_tokens * tiles * tile_rows * sizeof(float));
    for (int64_t column = 0, width = columns(g.p); column < width;) {
        const Columns c = panel_at(g.p, column);
        const auto codes = [&](int64_t tile, int64_t column) {
            return w.tiles + tile * bytes + column / block_columns * block_bytes(bits);
        };
        const uint8_t* next = codes(tile, c.end);
        if (c.end == width) {
            const int64_t following = run.likely() % strips_of(w) * gemm_tiles;
            for (int64_t i = 0; i < tiles * w.groups * tile_rows; i += 32)
                __builtin_prefetch(scales(following) + i, 0, 2);
            next = codes(following, 0);
        }
        const int64_t panel_bytes = (c.end - c.column) / block_columns * block_bytes(bits);
        auto ahead = gemm::Ahead::of(next, tiles, bytes, panel_bytes, (c.end - c.column) / block_columns * blocks);
        Block b{};
        b.tile_step = bytes, b.scale = scratch.scale, b.total = scratch.total, b.open = scratch.open;
        column = c.end;
        if constexpr (direct_tokens<bits> > 0)
            if (last - first <= direct_tokens<bits>) {
                b.codes = codes(tile, c.column);
                multiply_tokens<Codes<bits, false>, tiles>(g, c, b, tile, first, last, ahead);
                continue;
            }
        unpack_panel<bits, tiles>(w, tile, c.column, c.end, scratch.panel);
        b.codes = scratch.panel;
        multiply_tokens<Codes<panel_bits<bits>, true>, tiles>(g, c, b, tile, first, last, ahead);
    }
}

template <int bits>
void multiply_of(const Gemm& g, Units& units) {
    const int64_t tiles = row_tiles(g.p.w.n), strips = strips_of(g.p.w);
    const int64_t panel = gemm_columns * strip * tile_rows, outputs = g.tokens * strip * tile_rows;
    const int64_t bytes = panel + 4 * (2 * outputs + g.p.w.groups * strip * tile_rows);
    auto* memory = static_cast<uint8_t*>(::operator new(bytes, std::align_val_t{64}));
    auto* numbers = reinterpret_cast<float*>(memory + panel);
    const Scratch scratch{memory, numbers, reinterpret_cast<int32_t*>(numbers + outputs), numbers + 2 * outputs};
    for (Run run{units}; run.next();) {
        const int64_t from = run.unit / strips * g.tokens, to = std::min(g.p.t, from + g.tokens);
        int64_t tile = run.unit % strips * gemm_tiles;
        const int64_t last = std::min(tiles, tile + gemm_tiles);
        for (; tile + strip <= last; tile += strip) multiply_strip<bits, strip>(g, run, scratch, tile, from, to);
        if constexpr (strip == 3) {
            if (last - tile == 2) multiply_strip<bits, 2>(g, run, scratch, tile, from, to);
            if (last - tile == 1) multiply_strip<bits, 1>(g, run, scratch, tile, from, to);
        }
    }
    ::operator delete(memory, std::align_val_t{64});
}

void multiply(const Gemm& g, Units& units) {
    constexpr decltype(&multiply_of<2>) of[] = {multiply_of<2>, multiply_of<3>, multiply_of<4>, multiply_of<5>,
                                                multiply_of<6>, multiply_of<7>, multiply_of<8>};
    of[g.p.w.bits - 2](g, units);
}

}  // namespace

const GemmKernels PTQ_GEMM_LEVEL{pack, multiply};

}  // namespace ptq::integer_tiled
