// The kernels of one level: included after PTQ_PANELS_LEVEL, the name of its table, is defined.
//
// With AVX-512 the sums of 48 rows and 8 tokens stay in 24 registers. A step loads three vectors of weights and eight
// numbers of x for 24 products, well below the two loads that a cycle can do beside two products.
#include <new>
#include <type_traits>

#include "gemm/panels_kernels.h"
#include "gemm/panels_pack.h"
#include "integer_tiled/decode_lanes.h"

namespace ptq::gemm {
namespace {

using integer::Lanes;
using integer::SignedInts;
template <Mode mode>
using Sum = std::conditional_t<mode == Mode::quads, SignedInts, Lanes>;

#if defined(__AVX512F__)
constexpr int strip = panel_tiles, most_tokens = 8;
#else
constexpr int strip = 1, most_tokens = 4;  // their sums fit into sixteen registers
#endif

// --- sums ------------------------------------------------------------------------------------------------------------

// sum + the products of a step.
template <Mode mode>
inline Sum<mode> product(Sum<mode> sum, SignedInts w, uint32_t x) {
    if constexpr (mode == Mode::quads) {
        return integer_tiled::dot<false>(sum, (integer_tiled::Dwords)w, static_cast<int32_t>(x));
#if defined(__AVX512BF16__)
    } else if constexpr (mode == Mode::pairs) {
        return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)));
#endif
    } else {
        return integer::fma((Lanes)w, integer::fill(integer::from_bits(x)), sum);
    }
}

inline SignedInts load_step(const int32_t* from) {
    SignedInts x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// total + scale * sum. Integers: each operation rounded, as it is defined.
inline Lanes scaled(Lanes total, Lanes scale, Lanes sum) {
    return integer::fma(scale, sum, total);
}
inline Lanes scaled(Lanes total, Lanes scale, SignedInts sum) {
    return total + scale * __builtin_convertvector(sum, Lanes);
}

// One panel of some row tiles, and a block of tokens.
struct Step {
    const int32_t* panel;   // [step, tile, 16]
    const uint32_t* x;      // [step, block_tokens]
    const int32_t* offset;  // [group, block_tokens], quads only
    const uint16_t* scale;  // of the first tile
    float* total;           // [token, tile, 16]: of the groups before, times their scales
    int32_t* open;          // the same: sums of a group that began in a panel before
    int64_t column, end;
    const uint8_t* ahead;  // what to fetch meanwhile: `ahead_count` streams, so many bytes of each for every 32 columns
    int64_t ahead_bytes, ahead_step, ahead_count;
};

#define PTQ_EACH_SUM \
    _Pragma("GCC unroll 8") for (int t = 0; t < tokens; t++) _Pragma("GCC unroll 3") for (int r = 0; r < tiles; r++)

template <Mode mode, int tiles, int tokens>
void multiply_block(const Panels& w, const Step& s) {
    constexpr int steps = column_step / columns_of(mode);
    const int32_t* panel = s.panel;
    const uint32_t* x = s.x;
    const uint8_t* ahead = s.ahead;
    for (int64_t column = s.column, group = column / w.group_columns; column < s.end; group++) {
        const int64_t whole = std::min(w.columns, (group + 1) * w.group_columns), stop = std::min(s.end, whole);
        Sum<mode> sum[tokens][tiles];
        PTQ_EACH_SUM {
            if (column != group * w.group_columns)
                std::memcpy(&sum[t][r], s.open + (t * tiles + r) * tile_rows, sizeof sum[t][r]);
            else if constexpr (mode == Mode::quads)
                sum[t][r] = SignedInts{} + s.offset[group * block_tokens + t];
            else
                sum[t][r] = Lanes{};
        }
        for (; column < stop; column += column_step) {
            for (int64_t i = 0; i < s.ahead_count; i++)
                for (int64_t at = 0; at < s.ahead_bytes; at += 64)
                    __builtin_prefetch(ahead + i * s.ahead_step + at, 0, 3);
            ahead += s.ahead_bytes;
            for (int i = 0; i < steps; i++, panel += tiles * tile_rows, x += block_tokens) {
                SignedInts number[tiles];
#pragma GCC unroll 3
                for (int r = 0; r < tiles; r++) number[r] = load_step(panel + r * tile_rows);
                PTQ_EACH_SUM sum[t][r] = product<mode>(sum[t][r], number[r], x[t]);
            }
        }
        if (stop < whole) {
            PTQ_EACH_SUM std::memcpy(s.open + (t * tiles + r) * tile_rows, &sum[t][r], sizeof sum[t][r]);
            continue;
        }
        Lanes scale[tiles];
#pragma GCC unroll 3
        for (int r = 0; r < tiles; r++)
            scale[r] = integer_tiled::load_scale(s.scale + (r * w.groups + group) * tile_rows);
        PTQ_EACH_SUM {
            float* to = s.total + (t * tiles + r) * tile_rows;
            integer::store(to, scaled(integer::load(to), scale[r], sum[t][r]));
        }
    }
}
#undef PTQ_EACH_SUM

// --- results ---------------------------------------------------------------------------------------------------------

template <int tiles>
void finish(const Product& p, const float* total, int64_t tile, int64_t first, int64_t tokens) {
    for (int64_t t = 0; t < tokens; t++)
        for (int r = 0; r < tiles; r++) {
            const int64_t row = (tile + r) * tile_rows, count = std::min(tile_rows, p.w.n - row);
            Lanes y = integer::load(total + (t * tiles + r) * tile_rows);
            if (p.token_scale) y *= p.token_scale[first + t];
            if (p.bias) y += integer_tiled::load_bias(p.bias, row, count);
            integer_tiled::store_result(p.out, p.out_type, (first + t) * p.w.n + row, y, count);
        }
}

// Results are written with large strides: without this, each line would be waited for.
template <int tiles>
void fetch_results(const Product& p, int64_t tile, int64_t first) {
    const int64_t size = p.out_type == Number::float32 ? 4 : 2;
    for (int64_t t = first; t < std::min(p.t, first + block_tokens); t++)
        for (int64_t at = 0; at < tiles * tile_rows * size; at += 64)
            __builtin_prefetch(static_cast<const uint8_t*>(p.out) + (t * p.w.n + tile * tile_rows) * size + at, 1, 2);
}

struct Scratch {
    int32_t* panel;  // [panel_steps, panel_tiles, 16]
    int32_t* open;   // [tokens, panel_tiles, 16]
    float* total;    // the same
};

// A block of tokens; where it has fewer than there are sums, the last ones for nothing.
template <Mode mode, int tiles>
inline void multiply_tokens(const Panels& w, Step s, int64_t tokens) {
    if (most_tokens == 8 && tokens > 4) return multiply_block<mode, tiles, most_tokens>(w, s);
    for (; tokens > 0; tokens -= 4) {
        (tokens > 2 ? multiply_block<mode, tiles, 4> : multiply_block<mode, tiles, 2>)(w, s);
        s.x += 4, s.offset += 4, s.total += 4 * tiles * tile_rows, s.open += 4 * tiles * tile_rows, s.ahead_count = 0;
    }
}

// All of y for some row tiles and the tokens [first, last).
template <Mode mode, int tiles>
void multiply_strip(const Product& p, const Scratch& scratch, int64_t tile, int64_t first, int64_t last) {
    const Panels& w = p.w;
    const int64_t blocks = (last - first + block_tokens - 1) / block_tokens;
    const int64_t a_time = (tiles + blocks - 1) / blocks;  // row tiles that are fetched during a block
    std::memset(scratch.total, 0, blocks * block_tokens * tiles * tile_rows * sizeof(float));
    for (int64_t column = 0, end; column < w.columns; column = end) {
        end = panel_end(p, column);
        w.unpack(w.weight, tile, tiles, column, end, scratch.panel);
        const bool done = end == w.columns;
        const uint8_t* ahead =
            w.codes + (done ? (tile + tiles) * w.tile_bytes : tile * w.tile_bytes + end / column_step * w.step_bytes);
        const uint16_t* scale = w.scale + tile * w.groups * tile_rows;
        Step s{scratch.panel, nullptr, nullptr, scale, scratch.total, scratch.open,
               column,        end,     nullptr, 0,     w.tile_bytes,  0};
        for (int64_t t = first, at = 0; t < last; t += block_tokens, at++) {
            const int64_t b = t / block_tokens, tokens = std::min(block_tokens, last - t);
            s.x = p.packed + place(p, column, end, b), s.offset = p.offset + b * w.groups * block_tokens;
            // The row tiles of the panel that comes next during the first blocks, then the x that comes next.
            const int64_t first_tile = std::min<int64_t>(tiles, at * a_time),
                          last_tile = std::min<int64_t>(tiles, (at + 1) * a_time);
            s.ahead_count = last_tile - first_tile;
            if (s.ahead_count > 0)
                s.ahead = ahead + first_tile * w.tile_bytes, s.ahead_bytes = w.step_bytes;
            else
                s.ahead = reinterpret_cast<const uint8_t*>(p.packed + place(p, column, end, b + 1)), s.ahead_count = 1,
                s.ahead_bytes = column_step / columns_of(mode) * block_tokens * 4;
            if (done) fetch_results<tiles>(p, tile, t);
            multiply_tokens<mode, tiles>(w, s, tokens);
            if (done) finish<tiles>(p, s.total, tile, t, tokens);
            s.total += block_tokens * tiles * tile_rows, s.open += block_tokens * tiles * tile_rows;
        }
    }
}

template <Mode mode>
void multiply_of(const Product& p, int64_t first, int64_t last) {
    const int64_t tiles = (p.w.n + tile_rows - 1) / tile_rows, strips = (tiles + panel_tiles - 1) / panel_tiles;
    const int64_t panel = panel_steps * panel_tiles * tile_rows, outputs = p.tokens * panel_tiles * tile_rows;
    auto* memory = static_cast<int32_t*>(::operator new(4 * (panel + 2 * outputs), std::align_val_t{64}));
    const Scratch scratch{memory, memory + panel, reinterpret_cast<float*>(memory + panel + outputs)};
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t from = unit / strips * p.tokens, to = std::min(p.t, from + p.tokens);
        int64_t tile = unit % strips * panel_tiles;
        const int64_t end = std::min(tiles, tile + panel_tiles);
        for (; tile + strip <= end; tile += strip) multiply_strip<mode, strip>(p, scratch, tile, from, to);
        if constexpr (strip == 3) {
            if (end - tile == 2) multiply_strip<mode, 2>(p, scratch, tile, from, to);
            if (end - tile == 1) multiply_strip<mode, 1>(p, scratch, tile, from, to);
        }
    }
    ::operator delete(memory, std::align_val_t{64});
}

void multiply(const Product& p, int64_t first, int64_t last) {
    if (p.mode == Mode::quads) return multiply_of<Mode::quads>(p, first, last);
#if defined(__AVX512BF16__)
    if (p.mode == Mode::pairs) return multiply_of<Mode::pairs>(p, first, last);
#endif
    multiply_of<Mode::floats>(p, first, last);
}

}  // namespace

const PanelKernels PTQ_PANELS_LEVEL{pack, multiply};

}  // namespace ptq::gemm
