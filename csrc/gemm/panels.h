// The kernels of one level: included after PTQ_PANELS_LEVEL, the name of its table, is defined.
//
// With AVX-512 the sums of 48 rows and eight tokens stay in 24 registers; those of integers, of four tokens, in twelve,
// beside the scaled sums of the groups before. A step loads three vectors of weights and a number of x for each token,
// well below the two loads that a cycle can do beside two products.
#include <new>
#include <type_traits>

#include "gemm/panels_pack.h"

namespace ptq::gemm {
namespace {

template <Mode mode>
using Sum = std::conditional_t<mode == Mode::quads, SignedInts, Lanes>;

#if defined(__AVX512F__)
constexpr int strip = panel_tiles;
template <Mode mode>
constexpr int most_tokens = tokens_of(mode);
#else
constexpr int strip = 1;
template <Mode mode>
constexpr int most_tokens = 4;  // their sums fit into sixteen registers
#endif

// --- products --------------------------------------------------------------------------------------------------------

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

inline SignedInts load_step(const uint8_t* from) {
    SignedInts x;
    std::memcpy(&x, from, sizeof x);
    return x;
}

// A panel: [step, tile, 16].
template <Mode mode>
struct Steps {
    using Sum = gemm::Sum<mode>;
    static constexpr int64_t count = column_step / columns_of(mode), x_step = count * tokens_of(mode);
    template <int tiles>
    static constexpr int64_t codes_step = count * tiles * tile_rows * 4;

    template <int tiles, int tokens>
    PTQ_IN_REGISTERS static void multiply(const uint8_t* panel, int64_t, const uint32_t* x, Sum sum[tokens][tiles]) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < count; i++) {
            SignedInts number[tiles];
#pragma GCC unroll 3
            for (int r = 0; r < tiles; r++) number[r] = load_step(panel + (i * tiles + r) * tile_rows * 4);
            PTQ_EACH_SUM sum[t][r] = product<mode>(sum[t][r], number[r], x[i * tokens_of(mode) + t]);
        }
    }
};

struct Scratch {
    int32_t* panel;  // [panel_steps, panel_tiles, 16]
    int32_t* open;   // [tokens, panel_tiles, 16]
    float* total;    // the same
};

// A block of tokens; where it has fewer than there are sums, the last ones for nothing.
template <Mode mode, int tiles>
inline void multiply_tokens(Block b, int64_t tokens) {
    using Op = Steps<mode>;
    if (most_tokens<mode> == 8 && tokens > 4) return multiply_block<Op, tiles, most_tokens<mode>>(b);
    for (; tokens > 0; tokens -= 4) {
        tokens > 2 ? multiply_block<Op, tiles, 4>(b) : multiply_block<Op, tiles, 2>(b);
        b.x += 4, b.offset += 4, b.total += 4 * tiles * tile_rows, b.open += 4 * tiles * tile_rows, b.ahead_count = 0;
    }
}

// All of y for some row tiles and the tokens [first, last).
template <Mode mode, int tiles>
void multiply_strip(const Product& p, const Scratch& scratch, int64_t tile, int64_t first, int64_t last) {
    constexpr int64_t each = tokens_of(mode);
    const Panels& w = p.w;
    const Results results{p.token_scale, p.bias, p.out, p.out_type, p.t, w.n};
    std::memset(scratch.total, 0, (last - first + each - 1) / each * each * tiles * tile_rows * sizeof(float));
    for (int64_t column = 0; column < w.columns;) {
        const Columns c = panel_at(p, column);
        const int64_t width = c.end - c.column, group = c.column / w.group_columns;
        w.unpack(w.weight, tile, tiles, c.column, c.end, scratch.panel);
        const bool done = c.end == w.columns;
        const uint8_t* ahead =
            w.codes + (done ? (tile + tiles) * w.tile_bytes : tile * w.tile_bytes + c.end / column_step * w.step_bytes);
        Block b{};
        c.describe(b);
        b.codes = reinterpret_cast<const uint8_t*>(scratch.panel), b.ahead_bytes = w.step_bytes;
        b.x = p.packed + place(p, c.column, c.end, first / each);
        b.scale_step = w.groups * tile_rows, b.scale = w.scale + tile * b.scale_step + group * tile_rows;
        b.offset = p.offset + (first / each * w.groups + group) * each, b.offset_step = each;
        b.total = scratch.total, b.open = scratch.open;
        const int64_t x_block = width / columns_of(mode) * each;
        auto codes = Ahead::of(ahead, tiles, w.tile_bytes, (last - first + each - 1) / each);
        for (int64_t t = first; t < last; t += each) {
            codes.next(b);
            b.next = b.x + x_block;
            if (done) fetch_results<tiles>(results, tile, t + each, each);
            multiply_tokens<mode, tiles>(b, std::min(each, last - t));
            if (done) finish<tiles>(results, b.total, tile, t, std::min(each, last - t));
            b.x += x_block, b.offset += w.groups * each;
            b.total += each * tiles * tile_rows, b.open += each * tiles * tile_rows;
        }
        column = c.end;
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
