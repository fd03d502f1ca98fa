// The kernels of one level: included after PTQ_PANELS_LEVEL, the name of its table, is defined.
//
// With AVX-512 the sums of 48 rows and eight tokens stay in 24 registers; those of integers, of four tokens, in twelve,
// beside the scaled sums of the groups before, or those of 64 rows in sixteen. A step loads three or four vectors of
// weights and a number of x for each token, well below the two loads that a cycle can do beside two products. With AVX2
// it is sixteen rows and six tokens, of integers without AVX-VNNI four, in twelve or eight of sixteen registers.
#include <new>
#include <type_traits>

#include "gemm/panels_pack.h"
#include "gemm/panels_scales.h"

namespace ptq::gemm {
namespace {

template <Mode mode>
using Sum = std::conditional_t<are_integers(mode), SignedInts, Lanes>;

// Row tiles that are multiplied at once.
#if defined(__AVX512F__)
template <Mode mode>
constexpr int strip = tiles_of(mode);
#else
template <Mode mode>
constexpr int strip = 1;
#endif

// --- products --------------------------------------------------------------------------------------------------------

// sum + the products of a step.
template <Mode mode>
inline Lanes product(Lanes sum, SignedInts w, uint32_t x) {
#if defined(__AVX512BF16__)
    if constexpr (mode == Mode::pairs)
        return (Lanes)_mm512_dpbf16_ps((__m512)sum, (__m512bh)w, (__m512bh)_mm512_set1_epi32(static_cast<int>(x)));
#endif
    return fma((Lanes)w, fill(std::bit_cast<float>(x)), sum);
}

inline SignedInts load_step(const uint8_t* from) {
    return load_vector<SignedInts>(from);
}

// A panel: [step, tile, 16]. Of numbers:
template <Mode mode>
struct Steps {
    using Sum = Lanes;
    static constexpr int64_t count = column_step / columns_of(mode), x_step = count * tokens_of(mode);
    template <int tiles>
    static constexpr int64_t codes_step = count * tiles * tile_rows * 4;

    template <int tiles, int tokens>
    PTQ_INLINE static void multiply(const uint8_t* panel, int64_t, const uint32_t* x, Lanes sum[tokens][tiles]) {
#pragma GCC unroll 8
        for (int64_t i = 0; i < count; i++) {
            SignedInts number[tiles];
#pragma GCC unroll 4
            for (int r = 0; r < tiles; r++) number[r] = load_step(panel + (i * tiles + r) * tile_rows * 4);
            PTQ_EACH_SUM sum[t][r] = product<mode>(sum[t][r], number[r], x[i * tokens_of(mode) + t]);
        }
    }
};

// Of integers with so many bits.
template <int bits>
struct QuadSteps {
    using Sum = SignedInts;
    static constexpr int64_t x_step = tiles::quads * quad_tokens;
    template <int tiles>
    static constexpr int64_t codes_step = tiles::quads * tiles * tile_rows * 4;

    template <int tiles, int tokens>
    PTQ_INLINE static void multiply(const uint8_t* panel, int64_t, const uint32_t* x, SignedInts sum[tokens][tiles]) {
        tiles::multiply_quads<bits, tiles, tokens>(
            [&]<int i>(int r)
                __attribute__((always_inline)) { return (Dwords)load_step(panel + (i * tiles + r) * tile_rows * 4); },
            x, quad_tokens, sum);
    }
};
template <>
struct Steps<Mode::quads> : QuadSteps<7> {};
template <>
struct Steps<Mode::nibbles> : QuadSteps<4> {};
template <>
struct Steps<Mode::wide> : QuadSteps<8> {};

struct Scratch {
    int32_t* panel;  // [panel_steps(p), tiles, 16]
    float* total;    // [tokens, tiles, 16]
    int32_t* open;   // the same; floats whose groups are added one by one: their sum, as floats
    float* scale;    // [groups, tiles, 16], then [tiles, 16]: see `load_scales`; floats: ratios, and the last scales
};

// A block of tokens; where it has fewer than there are sums, the last ones for nothing.
template <Mode mode, int tiles>
inline void multiply_tokens(const Block& b, int64_t tokens) {
    using Op = Steps<mode>;
    if (tokens <= 2) return multiply_block<Op, tiles, 2>(b);
    if (tokens <= 4) return multiply_block<Op, tiles, 4>(b);
    if constexpr (tokens_of(mode) > 4) multiply_block<Op, tiles, tokens_of(mode)>(b);
}

// --- a strip ---------------------------------------------------------------------------------------------------------

// Row tiles and tokens of y.
struct Part {
    int64_t tile, first, last;
};

inline const uint8_t* codes_at(const Panels& w, int64_t tile, int64_t column) {
    return w.codes + tile * w.tile_bytes + column / column_step * w.step_bytes;
}

// Columns c of a panel, for all tokens. `done`: they are the last ones, and what is then multiplied with the sums.
template <Mode mode, int tiles>
void multiply_columns_of(const Product& p, const Scratch& scratch, const Part& part, const Columns& panel,
                         const Columns& c, Ahead& ahead, bool done, const float* factor) {
    constexpr int64_t each = tokens_of(mode);
    const auto [tile, first, last] = part;
    const Panels& w = p.w;
    const Results results{p.token_scale, p.bias, p.out, p.out_type, p.t, w.n, p.add};
    const int64_t group = c.column / w.group_columns, before = (c.column - panel.column) / columns_of(mode);
    Block b{};
    c.describe(b);
    const bool direct = p.is_direct();
    b.codes = direct ? codes_at(w, tile, c.column)
                     : reinterpret_cast<const uint8_t*>(scratch.panel + before * tiles * tile_rows);
    b.tile_step = w.tile_bytes, b.zero_step = w.groups * tile_rows;
    b.zero = w.zero ? w.zero + tile * b.zero_step + group * tile_rows : nullptr;
    b.x = p.packed + place(p, panel.column, panel.end, first / each) + before * each;
    b.scale = scratch.scale + group * tiles * tile_rows;
    b.offset = p.offset + (first / each * w.groups + group) * each, b.offset_step = each;
    b.x_step = (panel.end - panel.column) / columns_of(mode) * each;
    b.total = scratch.total, b.open = scratch.open, b.ahead = &ahead;
    for (int64_t t = first; t < last; t += each) {
        if (done) fetch_results<tiles>(results, tile, t + each, each);
        const int64_t tokens = std::min(each, last - t);
        direct ? w.direct.multiply(&b, tiles, last - t) : multiply_tokens<mode, tiles>(b, tokens);
        if (done && are_integers(mode) && w.multiples)
            count_steps<tiles>(scratch.scale + w.groups * tiles * tile_rows, b.total, tokens);
        if (done) finish<tiles>(results, b.total, factor, tile, t, tokens);
        b.x += b.x_step, b.offset += w.groups * each;
        b.total += each * tiles * tile_rows, b.open += each * tiles * tile_rows;
    }
}

// Groups one by one.
template <Mode mode, int tiles>
void multiply_apart(const Product& p, const Scratch& scratch, const Part& part, const Columns& panel, Ahead& ahead) {
    auto* sum = reinterpret_cast<float*>(scratch.open);
    for (Columns c = panel; c.column < panel.end; c.column = c.end) {
        const int64_t group = c.column / c.group;
        c.end = std::min(panel.end, (group + 1) * c.group);
        multiply_columns_of<mode, tiles>(p, scratch, part, panel, c, ahead, false, nullptr);
        if (c.end % c.group == 0 || c.end == c.all)
            add_group<tiles>(p.w, part.tile, group, part.last - part.first, scratch.total, sum);
    }
    if (panel.end == panel.all) {
        const Results results{p.token_scale, p.bias, p.out, p.out_type, p.t, p.w.n, p.add};
        finish<tiles>(results, sum, nullptr, part.tile, part.first, part.last - part.first);
    }
}

// All of y for some row tiles and tokens. The strip that comes next is fetched meanwhile.
template <Mode mode, int tiles>
void multiply_strip(const Product& p, const Run& run, const Scratch& scratch, const Part& part) {
    constexpr int64_t each = tokens_of(mode);
    constexpr bool floats = std::is_same_v<Sum<mode>, Lanes>;
    const Panels& w = p.w;
    const int64_t blocks = (part.last - part.first + each - 1) / each, sums = blocks * each * tiles * tile_rows;
    const float* factor = floats ? scratch.scale + w.groups * tiles * tile_rows : nullptr;
    Scales scales{};
    if constexpr (floats)
        scales = find_ratios<tiles>(w, part.tile, scratch.scale);
    else
        load_scales<tiles>(w, part.tile, scratch.scale);
    std::memset(scratch.total, 0, sums * sizeof(float));
    if (scales.apart) std::memset(scratch.open, 0, sums * sizeof(float));
    for (int64_t column = 0; column < w.columns;) {
        const Columns panel = panel_at(p, column);
        if (!p.is_direct()) w.unpack(w.weight, part.tile, tiles, column, panel.end, scratch.panel);
        column = panel.end;
        const bool done = column == w.columns;
        const int64_t following = run.likely() % p.strips() * p.strip_tiles;
        const uint8_t* next = done ? codes_at(w, following, 0) : codes_at(w, part.tile, column);
        if (done) fetch_scales(w, following, tiles);
        const int64_t bytes = (panel.end - panel.column) / column_step * w.step_bytes;
        const int64_t steps = (panel.end - panel.column) / column_step * blocks;
        Ahead ahead = Ahead::of(next, tiles, w.tile_bytes, bytes, steps);
        if (scales.apart) {
            multiply_apart<mode, tiles>(p, scratch, part, panel, ahead);
            continue;
        }
        if (scales.zeros) clear_zeros<mode, tiles>(w, part.tile, panel, scratch.panel);
        multiply_columns_of<mode, tiles>(p, scratch, part, panel, panel, ahead, done, factor);
    }
}

template <Mode mode>
void multiply_of(const Product& p, Units& units) {
    constexpr int most = strip<mode>;
    constexpr int64_t panel = panel_vectors(mode) * tile_rows;
    const int64_t tiles = p.w.tiles(), strips = p.strips(), rows = p.strip_tiles * tile_rows, outputs = p.tokens * rows;
    const int64_t count = panel + 2 * outputs + (p.w.groups + 1) * rows;
    auto* memory = static_cast<int32_t*>(::operator new(4 * count, std::align_val_t{64}));
    auto* numbers = reinterpret_cast<float*>(memory + panel + outputs);
    const Scratch scratch{memory, numbers, memory + panel, numbers + outputs};
    for (Run run{units}; run.next();) {
        const int64_t from = run.unit / strips * p.tokens, to = std::min(p.t, from + p.tokens);
        int64_t tile = run.unit % strips * p.strip_tiles;
        if (p.diagonal >= 0 && tile * tile_rows >= p.diagonal + to) continue;
        const int64_t last = std::min(tiles, tile + p.strip_tiles);
        for (; tile + most <= last; tile += most) multiply_strip<mode, most>(p, run, scratch, {tile, from, to});
        [&]<int... i>(std::integer_sequence<int, i...>) {
            (void)((last - tile == i + 1 && (multiply_strip<mode, i + 1>(p, run, scratch, {tile, from, to}), true)) ||
                   ...);
        }(std::make_integer_sequence<int, most - 1>{});
    }
    ::operator delete(memory, std::align_val_t{64});
}

void multiply(const Product& p, Units& units) {
#if !defined(PTQ_VNNI)  // else all integers are alike
    if (p.mode == Mode::wide) return multiply_of<Mode::wide>(p, units);
#endif
#if defined(PTQ_SUMS_OF_16_BITS)
    if (p.mode == Mode::nibbles) return multiply_of<Mode::nibbles>(p, units);
#endif
    if (are_integers(p.mode)) return multiply_of<Mode::quads>(p, units);
#if defined(__AVX512BF16__)
    if (p.mode == Mode::pairs) return multiply_of<Mode::pairs>(p, units);
#endif
    multiply_of<Mode::floats>(p, units);
}

}  // namespace

const PanelKernels PTQ_PANELS_LEVEL{
    {tokens_of(Mode::quads), tiles_of(Mode::quads)}, {tokens_of(Mode::floats), tiles_of(Mode::floats)}, pack, multiply};

}  // namespace ptq::gemm
