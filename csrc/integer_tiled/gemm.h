// The kernels for many tokens, of one level: included after PTQ_GEMM_LEVEL, the name of its table, is defined.
//
// A panel of a strip (48 rows, 512 columns) is unpacked to bytes in the first-level cache and serves every block of
// four tokens. The sums of 3 x 4 vectors stay in registers, integers and (with 32 registers) floats alike: the loads of
// four activations and three vectors of codes are then well below the two that a cycle can do beside twelve products.
#pragma once

#include <algorithm>
#include <new>
#include <utility>

#include "integer_tiled/gemm_dot.h"
#include "integer_tiled/gemm_pack.h"

namespace ptq::integer_tiled {
namespace {

typedef float Numbers __attribute__((vector_size(64)));

// Sixteen numbers, one for each row of a tile. (gcc 12 takes `__builtin_convertvector` from memory apart into scalars.)
inline Integers widen(const uint8_t* from) {
#if defined(__AVX512F__)
    return (Integers)_mm512_maskz_cvtepu8_epi32(0xffff, load<__m128i>(from));
#else
    Integers x;
    for (int i = 0; i < tile_rows; i++) x[i] = from[i];
    return x;
#endif
}
inline Numbers bfloat16s(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Numbers)((Integers)_mm512_maskz_cvtepu16_epi32(0xffff, load<__m256i>(from)) << 16);
#else
    Integers x;
    for (int i = 0; i < tile_rows; i++) x[i] = static_cast<int32_t>(static_cast<uint32_t>(from[i]) << 16);
    return (Numbers)x;
#endif
}

// --- weights ---------------------------------------------------------------------------------------------------------

// Columns [column, end) of some row tiles, each as super-blocks of eight bits.
template <int bits, int tiles>
void unpack_panel(const Weight& w, int64_t tile, int64_t column, int64_t end, uint8_t* panel) {
    for (int r = 0; r < tiles; r++) {
        const uint8_t* from = w.tiles + (tile + r) * tile_bytes(w.k, bits) + column / block_columns * block_bytes(bits);
        for (int64_t c = column; c < end; c += block_columns, from += block_bytes(bits), panel += block_bytes(8)) {
            Dwords codes[quads];
            unpack_block<bits>(from, codes);
            for (int i = 0; i < quads; i++) store(panel + i * 64, codes[i]);
        }
    }
}

// Scales of the groups that have columns in [column, end).
template <int tiles>
void unpack_scales(const Weight& w, int64_t tile, int64_t column, int64_t end, float* scale) {
    const int64_t size = w.group_blocks * block_columns;
    for (int64_t group = column / size; group * size < end; group++)
        for (int r = 0; r < tiles; r++, scale += tile_rows)
            store(scale, bfloat16s(w.scale + ((tile + r) * w.groups + group) * tile_rows));
}

// Quad i of a super-block with one plane.
template <int bits, int i>
inline Dwords quad_of(const uint8_t* block) {
    constexpr int fields = 8 / bits;
    const Dwords x = load<Dwords>(block + i / fields * 64) >> i % fields * bits;
    return bits == 8 ? x : x & every_byte<bits>();
}

// --- sums ------------------------------------------------------------------------------------------------------------

// One panel of some row tiles, and a block of tokens.
struct Step {
    const uint8_t* codes;   // super-blocks: of the panel, or those of the weight
    int64_t tile_step;      // bytes between row tiles of them
    const int32_t* x;       // [column / 4, token]
    const int32_t* offset;  // [group, token]
    const float* scale;     // [group from the one at `column` on, tile, 16]
    float* total;           // [token, tile, 16]: of the groups before
    int32_t* open;          // the same: sums of a group that began in the panel before
    int64_t tile, column, end;
    const uint8_t* ahead;  // what to fetch meanwhile
    int64_t ahead_bytes;   // of it for each super-block
};

#define PTQ_EACH_SUM \
    _Pragma("GCC unroll 4") for (int t = 0; t < tokens; t++) _Pragma("GCC unroll 4") for (int r = 0; r < tiles; r++)

template <int tiles, int tokens>
inline void begin_group(const Weight& w, const Step& s, int64_t group, Integers sum[tokens][tiles]) {
    const int32_t* offset = s.offset + group * gemm_tokens;
    if (w.zero) {
        Integers zero[tiles];
        for (int r = 0; r < tiles; r++) zero[r] = widen(w.zero + ((s.tile + r) * w.groups + group) * tile_rows);
        PTQ_EACH_SUM sum[t][r] = zero[r] * offset[t];
    } else {
        PTQ_EACH_SUM sum[t][r] = Integers{} + offset[t];
    }
}

// The last columns of a group are there: total + scale * sum.
template <int tiles, int tokens>
inline void end_group(const Weight& w, const Step& s, int64_t group, Integers sum[tokens][tiles],
                      Numbers total[tokens][tiles]) {
    const float* scale = s.scale + (group - s.column / (w.group_blocks * block_columns)) * tiles * tile_rows;
    PTQ_EACH_SUM {
        const Numbers product = load<Numbers>(scale + r * tile_rows) * __builtin_convertvector(sum[t][r], Numbers);
        float* to = s.total + (t * tiles + r) * tile_rows;
        if constexpr (hold)
            total[t][r] += product;
        else
            store(to, load<Numbers>(to) + product);
    }
}

// One super-block, in which codes have `stored` bits.
template <int stored, bool wide, int tiles, int tokens>
inline void multiply_codes(const uint8_t* codes, int64_t tile_step, const int32_t* x, Integers sum[tokens][tiles]) {
    const auto quad = [&]<int i>() {
        Dwords c[tiles];
#pragma GCC unroll 4
        for (int r = 0; r < tiles; r++) c[r] = quad_of<stored, i>(codes + r * tile_step);
        PTQ_EACH_SUM sum[t][r] = dot<wide>(sum[t][r], c[r], x[i * gemm_tokens + t]);
    };
    [&]<int... i>(std::integer_sequence<int, i...>) {
        (quad.template operator()<i>(), ...);
    }(std::make_integer_sequence<int, quads>{});
}

template <int stored, bool wide, int tiles, int tokens>
void multiply_block(const Weight& w, const Step& s) {
    const int64_t size = w.group_blocks * block_columns;
    const uint8_t *codes = s.codes, *ahead = s.ahead;
    const int32_t* x = s.x;
    Numbers total[tokens][tiles];
    if constexpr (hold) PTQ_EACH_SUM total[t][r] = load<Numbers>(s.total + (t * tiles + r) * tile_rows);
    for (int64_t column = s.column, group = column / size; column < s.end; group++) {
        const int64_t stop = std::min(s.end, (group + 1) * size);
        Integers sum[tokens][tiles];
        if (column == group * size)
            begin_group<tiles, tokens>(w, s, group, sum);
        else
            PTQ_EACH_SUM sum[t][r] = load<Integers>(s.open + (t * tiles + r) * tile_rows);
        for (; column < stop; column += block_columns, codes += block_bytes(stored), x += quads * gemm_tokens) {
            for (const uint8_t* end = ahead + s.ahead_bytes; ahead < end; ahead += 64) __builtin_prefetch(ahead, 0, 2);
            multiply_codes<stored, wide, tiles, tokens>(codes, s.tile_step, x, sum);
        }
        if (column == (group + 1) * size)
            end_group<tiles, tokens>(w, s, group, sum, total);
        else
            PTQ_EACH_SUM store(s.open + (t * tiles + r) * tile_rows, sum[t][r]);
    }
    if constexpr (hold) PTQ_EACH_SUM store(s.total + (t * tiles + r) * tile_rows, total[t][r]);
}
#undef PTQ_EACH_SUM

// --- results ---------------------------------------------------------------------------------------------------------

// The first `count` of sixteen results, from element `at` on.
inline void store_result(const Quantized& p, int64_t at, Numbers y, int64_t count) {
    if (p.out_type == Number::float32) {
        float* to = static_cast<float*>(p.out) + at;
        count == tile_rows ? store(to, y) : static_cast<void>(std::memcpy(to, &y, count * sizeof(float)));
        return;
    }
    const Dwords bits = (Dwords)y, nearest = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
    const Dwords halves = y == y ? nearest : Dwords{} + 0x7fc0u;
    typedef uint16_t Halves __attribute__((vector_size(32)));
#if defined(__AVX512F__)
    const Halves out = (Halves)_mm512_maskz_cvtepi32_epi16(0xffff, (__m512i)halves);
#else
    const Halves out = __builtin_convertvector(halves, Halves);
#endif
    std::memcpy(static_cast<uint16_t*>(p.out) + at, &out, count * sizeof(uint16_t));
}

template <int tiles>
void finish(const Quantized& p, const float* total, int64_t tile, int64_t first, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++)
        for (int r = 0; r < tiles; r++) {
            const int64_t row = (tile + r) * tile_rows, count = std::min(tile_rows, p.w.n - row);
            Numbers y = load<Numbers>(total + (t * tiles + r) * tile_rows) * p.q_scale[first + t];
            if (p.bias) {
                Numbers bias{};
                std::memcpy(&bias, p.bias + row, count * sizeof(float));
                y += bias;
            }
            store_result(p, (first + t) * p.w.n + row, y, count);
        }
}

// Results are written with large strides: without this, each line would be waited for.
template <int tiles>
void fetch_results(const Quantized& p, int64_t tile, int64_t first) {
    const int64_t size = p.out_type == Number::float32 ? 4 : 2;
    for (int64_t t = first; t < std::min(p.t, first + gemm_tokens); t++)
        for (int64_t at = 0; at < tiles * tile_rows * size; at += 64)
            __builtin_prefetch(static_cast<const uint8_t*>(p.out) + (t * p.w.n + tile * tile_rows) * size + at, 1, 2);
}

// --- a strip ---------------------------------------------------------------------------------------------------------

struct Scratch {
    uint8_t* panel;  // [strip, gemm_columns / 32, 8, 64]
    float* scale;    // [gemm_columns / 32, strip, 16]
    float* total;    // [tokens, strip, 16]
    int32_t* open;   // the same
};

// Up to here, taking codes apart for every block of tokens costs less than a panel (measured on Zen 5).
template <int bits>
constexpr int64_t direct_tokens = bits == 8                ? 1 << 30
                                  : bits == 4 || bits == 2 ? 32
                                                           : 0;

template <int stored, bool wide, int tiles>
void multiply_tokens(const Gemm& g, Step s, int64_t first, int64_t last) {
    const Quantized& p = g.p;
    const bool done = s.end == columns(p);
    const uint8_t* ahead = s.ahead;
    const int64_t bytes = s.ahead_bytes;
    for (int64_t t = first, at = 0; t < last; t += gemm_tokens, at++) {
        const int64_t b = t / gemm_tokens;
        s.x = g.x + place(p, s.column, b), s.offset = g.offset + b * p.w.groups * gemm_tokens;
        // A row tile of the panel that comes next with each of the first blocks, then the activations that come next.
        if (at < tiles)
            s.ahead = ahead + at * tile_bytes(p.w.k, p.w.bits), s.ahead_bytes = bytes;
        else
            s.ahead = reinterpret_cast<const uint8_t*>(s.x + s.end - s.column), s.ahead_bytes = 4 * block_columns;
        if (done) fetch_results<tiles>(p, s.tile, t);
        last - t > 2 ? multiply_block<stored, wide, tiles, 4>(p.w, s) : multiply_block<stored, wide, tiles, 2>(p.w, s);
        if (done) finish<tiles>(p, s.total, s.tile, t, std::min(gemm_tokens, last - t));
        s.total += gemm_tokens * tiles * tile_rows, s.open += gemm_tokens * tiles * tile_rows;
    }
}

// All of y for some row tiles and the tokens [first, last).
template <int bits, int tiles>
void multiply_strip(const Gemm& g, const Scratch& scratch, int64_t tile, int64_t first, int64_t last) {
    const Weight& w = g.p.w;
    const int64_t bytes = tile_bytes(w.k, bits), width = columns(g.p);
    const int64_t blocks = (last - first + gemm_tokens - 1) / gemm_tokens;
    const auto* scales =
        reinterpret_cast<const uint8_t*>(w.scale + (tile + tiles) * w.groups * tile_rows);  // that follow
    for (int64_t at = 0; at < tiles * w.groups * tile_rows * 2; at += 64) __builtin_prefetch(scales + at, 0, 2);
    std::memset(scratch.total, 0, blocks * gemm_tokens * tiles * tile_rows * sizeof(float));
    for (int64_t column = 0; column < width; column += gemm_columns) {
        const int64_t end = std::min(width, column + gemm_columns);
        const uint8_t* codes = w.tiles + tile * bytes + column / block_columns * block_bytes(bits);
        const uint8_t* ahead =
            end < width ? codes + gemm_columns / block_columns * block_bytes(bits) : w.tiles + (tile + tiles) * bytes;
        unpack_scales<tiles>(w, tile, column, end, scratch.scale);
        Step s{codes,        bytes, nullptr, nullptr, scratch.scale, scratch.total,
               scratch.open, tile,  column,  end,     ahead,         block_bytes(bits)};
        if constexpr (direct_tokens<bits> > 0)
            if (last - first <= direct_tokens<bits>) {
                multiply_tokens<bits, (bits > 7), tiles>(g, s, first, last);
                continue;
            }
        unpack_panel<bits, tiles>(w, tile, column, end, scratch.panel);
        s.codes = scratch.panel, s.tile_step = (end - column) * tile_rows;
        multiply_tokens<8, false, tiles>(g, s, first, last);
    }
}

template <int bits>
void multiply_of(const Gemm& g, int64_t first, int64_t last) {
    const int64_t tiles = row_tiles(g.p.w.n), strips = (tiles + gemm_tiles - 1) / gemm_tiles;
    const int64_t panel = gemm_columns * strip * tile_rows, scales = panel / block_columns,
                  outputs = g.tokens * strip * tile_rows;
    auto* memory = static_cast<uint8_t*>(::operator new(panel + 4 * scales + 8 * outputs, std::align_val_t{64}));
    auto* numbers = reinterpret_cast<float*>(memory + panel);
    const Scratch scratch{memory, numbers, numbers + scales, reinterpret_cast<int32_t*>(numbers + scales + outputs)};
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t from = unit / strips * g.tokens, to = std::min(g.p.t, from + g.tokens);
        int64_t tile = unit % strips * gemm_tiles;
        const int64_t end = std::min(tiles, tile + gemm_tiles);
        for (; tile + strip <= end; tile += strip) multiply_strip<bits, strip>(g, scratch, tile, from, to);
        if constexpr (strip == 3) {
            if (end - tile == 2) multiply_strip<bits, 2>(g, scratch, tile, from, to);
            if (end - tile == 1) multiply_strip<bits, 1>(g, scratch, tile, from, to);
        }
    }
    ::operator delete(memory, std::align_val_t{64});
}

void multiply(const Gemm& g, int64_t first, int64_t last) {
    constexpr decltype(&multiply_of<2>) of[] = {multiply_of<2>, multiply_of<3>, multiply_of<4>, multiply_of<5>,
                                                multiply_of<6>, multiply_of<7>, multiply_of<8>};
    of[g.p.w.bits - 2](g, first, last);
}

}  // namespace

const GemmKernels PTQ_GEMM_LEVEL{pack, multiply};

}  // namespace ptq::integer_tiled
