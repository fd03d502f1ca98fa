// A block of tokens times some row tiles, over the columns of a panel: sums stay in registers. Included once per level,
// into an anonymous namespace.
//
// How codes and x are multiplied is an `Op`:
//   Sum: SignedInts or Lanes; x_step: dwords of x, codes_step<tiles>: bytes of codes, from 32 columns to the next;
//   multiply(codes, tile_step, x, sum): sum[token][tile] += the products of 32 columns.
#pragma once

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "tiles/few_tokens.h"

namespace ptq::gemm {
namespace {

using tiles::tile_rows;

// Tokens of a block of integers, and row tiles of a strip: so many sums of sixteen rows stay in registers, beside the
// scaled sums of the groups before where `hold` says so. On Intel's processors ten additions begin before the first one
// ends, and more than twelve sums are faster: with AVX-512 on the level without BF16, where `has_slow_pairs` sends
// them.
#if defined(__AVXVNNI__) && !defined(__AVX512F__)
constexpr int64_t quad_tokens = 6;
#else
constexpr int64_t quad_tokens = 4;
#endif
#if defined(PTQ_VNNI) && defined(__AVX512F__) && !defined(__AVX512BF16__)
constexpr int64_t quad_tiles = 4;
#else
constexpr int64_t quad_tiles = 3;
#endif

// The codes of some row tiles that come next: they are fetched meanwhile, some lines with every 32 columns.
struct Ahead {
    const uint8_t* codes;
    int64_t tiles, tile_bytes, bytes;  // row tiles, bytes from one to the next, and of each
    int64_t each, at = 0, tile = 0;    // lines at a time; bytes of the tiles that were fetched; the next tile

    // `steps`: how often `next` will be called.
    static Ahead of(const uint8_t* codes, int64_t tiles, int64_t tile_bytes, int64_t bytes, int64_t steps) {
        return {codes, tiles, tile_bytes, bytes, (tiles * bytes / 64 + steps - 1) / steps};
    }
    [[gnu::always_inline]] void next() {
        for (int64_t i = 0; i < each && at < bytes; i++) {
            __builtin_prefetch(codes + tile * tile_bytes + at, 0, 2);
            if (++tile == tiles) tile = 0, at += 64;
        }
    }
};

struct Block {
    const uint8_t* codes;
    int64_t tile_step;  // bytes between the row tiles of codes, where they are not in a panel
    const uint32_t* x;  // [step, token]
    int64_t x_step;     // dwords to the x of the next tokens, or panel: fetched meanwhile, be it there or not
    float* total;       // [token, tile, 16]: integers: of the groups before, times their scales (with integer scales of
                        // 32 bits); floats: the sums
    int64_t groups;     // that are whole; none: there is a part of one, and whether its first and last columns
    bool begins, ends;
    int64_t blocks;  // 32 columns each, in a group, or in the part
    Ahead* ahead;
    // [group, tile, 16], from the first group of the panel on. Integers: scales. Floats: what brings the sums of the
    // groups before into the unit of the group.
    const float* scale;
    // Integers:
    const uint8_t* zero;    // [tile, group, 16], from the first group of the panel on, or null
    int64_t zero_step;      // bytes from tile to tile
    const int32_t* offset;  // [group, `offset_step`], likewise: sums begin with offset of a token, times zero
    int64_t offset_step;
    int32_t* open;  // [token, tile, 16]: sums of a group that began in the panel before
};

// The most columns of a panel of codes where they lie.
constexpr int64_t direct_columns = 512;

// Whether totals, too, have registers.
#if defined(__AVX512F__)
template <int tiles, int tokens>
constexpr bool hold = tiles * tokens <= 12;
#else
template <int tiles, int tokens>
constexpr bool hold = false;
#endif

// total + scale * sum, each operation rounded, as it is defined; with integer scales exact.
inline Lanes scaled(Lanes total, Lanes scale, SignedInts sum) {
    return total + scale * converted<Lanes>(sum);
}
inline SignedInts scaled(SignedInts total, Lanes scale, SignedInts sum) {
    return total + converted<SignedInts>(scale) * sum;
}

#define PTQ_EACH_SUM \
    _Pragma("GCC unroll 8") for (int t = 0; t < tokens; t++) _Pragma("GCC unroll 4") for (int r = 0; r < tiles; r++)
template <int tiles, int tokens>
PTQ_INLINE void begin_group(const Block& b, int64_t group, SignedInts sum[tokens][tiles]) {
    const int32_t* offset = b.offset + group * b.offset_step;
    if (b.zero) {
        SignedInts zero[tiles];
        for (int r = 0; r < tiles; r++) zero[r] = tiles::load_zero(b.zero + group * tile_rows + r * b.zero_step);
        PTQ_EACH_SUM sum[t][r] = zero[r] * offset[t];
    } else {
        PTQ_EACH_SUM sum[t][r] = SignedInts{} + offset[t];
    }
}

// What the next group is multiplied with. A block itself is only read: to copy it in one piece, as compilers do, would
// wait for all that was just written into it.
struct Cursor {
    const uint8_t* codes;
    const uint32_t* x;
};

// The columns of a group, or part; `blocks` where it is known, 0 where it is not.
template <class Op, int tiles, int tokens, int blocks>
PTQ_INLINE void multiply_columns(const Block& b, Cursor& at, typename Op::Sum sum[tokens][tiles]) {
    const int64_t count = blocks ? blocks : b.blocks, tile_step = b.tile_step, x_step = b.x_step;
    Ahead* const ahead = b.ahead;
#pragma GCC unroll 1
    for (int64_t i = 0; i < count; i++) {
        ahead->next();
#pragma GCC unroll 8
        for (int64_t line = 0; line < Op::x_step; line += 16) __builtin_prefetch(at.x + x_step + line, 0, 3);
        Op::template multiply<tiles, tokens>(at.codes, tile_step, at.x, sum);
        at.codes += Op::template codes_step<tiles>, at.x += Op::x_step;
    }
}

template <class Op, class Total, int tiles, int tokens, int blocks>
void multiply_groups(const Block& b) {
    // Integer scales: floats hold the sums of a panel exactly, in two steps; integers would take a slow product.
    constexpr bool held = hold<tiles, tokens>, whole = std::is_same_v<Total, SignedInts>;
    static_assert(direct_columns * 15 * 8 * 128 < 1 << 24);
    Cursor at{b.codes, b.x};
    const float* scales = b.scale;
    Lanes total[tokens][tiles] = {};
    if constexpr (held && !whole) PTQ_EACH_SUM total[t][r] = load(b.total + (t * tiles + r) * tile_rows);
    for (int64_t group = 0, groups = b.groups; group < groups; group++) {
        SignedInts sum[tokens][tiles];
        begin_group<tiles, tokens>(b, group, sum);
        multiply_columns<Op, tiles, tokens, blocks>(b, at, sum);
        Lanes scale[tiles];
#pragma GCC unroll 4
        for (int r = 0; r < tiles; r++) scale[r] = load(scales + r * tile_rows);
        PTQ_EACH_SUM {
            float* to = b.total + (t * tiles + r) * tile_rows;
            if constexpr (held && whole)
                total[t][r] = fma(scale[r], converted<Lanes>(sum[t][r]), total[t][r]);
            else if constexpr (held)
                total[t][r] = scaled(total[t][r], scale[r], sum[t][r]);
            else
                store_vector(to, scaled(load_vector<Total>(to), scale[r], sum[t][r]));
        }
        scales += tiles * tile_rows;
    }
    if constexpr (held) PTQ_EACH_SUM {
            float* to = b.total + (t * tiles + r) * tile_rows;
            if constexpr (whole)
                store_vector(to, load_vector<SignedInts>(to) + converted<SignedInts>(total[t][r]));
            else
                store(to, total[t][r]);
        }
}

template <class Op, class Total, int tiles, int tokens>
void multiply_part(const Block& b) {
    SignedInts sum[tokens][tiles];
    Cursor at{b.codes, b.x};
    if (b.begins)
        begin_group<tiles, tokens>(b, 0, sum);
    else
        PTQ_EACH_SUM sum[t][r] = load_vector<SignedInts>(b.open + (t * tiles + r) * tile_rows);
    multiply_columns<Op, tiles, tokens, 0>(b, at, sum);
    if (!b.ends) {
        PTQ_EACH_SUM store_vector(b.open + (t * tiles + r) * tile_rows, sum[t][r]);
        return;
    }
    Lanes scale[tiles];
    for (int r = 0; r < tiles; r++) scale[r] = load(b.scale + r * tile_rows);
    PTQ_EACH_SUM {
        float* to = b.total + (t * tiles + r) * tile_rows;
        store_vector(to, scaled(load_vector<Total>(to), scale[r], sum[t][r]));
    }
}

// Floats: sums go on from group to group, in the unit of each, so that its end costs one product.
template <class Op, int tiles, int tokens, int blocks>
void multiply_floats(const Block& b) {
    Cursor at{b.codes, b.x};
    const float* ratios = b.scale;
    const bool begins = b.begins;
    Lanes sum[tokens][tiles];
    PTQ_EACH_SUM sum[t][r] = load(b.total + (t * tiles + r) * tile_rows);
    const int64_t groups = std::max(b.groups, int64_t{1});
    for (int64_t group = 0; group < groups; group++) {
        if (begins) {
            Lanes ratio[tiles];
#pragma GCC unroll 4
            for (int r = 0; r < tiles; r++) ratio[r] = load(ratios + r * tile_rows);
            PTQ_EACH_SUM sum[t][r] *= ratio[r];
            ratios += tiles * tile_rows;
        }
        multiply_columns<Op, tiles, tokens, blocks>(b, at, sum);
    }
    PTQ_EACH_SUM store(b.total + (t * tiles + r) * tile_rows, sum[t][r]);
}

// Total: of integers, SignedInts with integer scales.
template <class Op, int tiles, int tokens, class Total = Lanes>
void multiply_block(const Block& b) {
    constexpr int usual = 4;  // groups of 128: a loop of a fixed length is faster
    const bool whole = b.groups > 0 && b.blocks == usual;
    if constexpr (std::is_same_v<typename Op::Sum, Lanes>)
        whole ? multiply_floats<Op, tiles, tokens, usual>(b) : multiply_floats<Op, tiles, tokens, 0>(b);
    else if (whole)
        multiply_groups<Op, Total, tiles, tokens, usual>(b);
    else
        b.groups ? multiply_groups<Op, Total, tiles, tokens, 0>(b) : multiply_part<Op, Total, tiles, tokens>(b);
}

// Which columns of which groups a panel has.
struct Columns {
    int64_t column, end, all, group;  // [column, end) of `all`, in groups of so many (the last one may have fewer)

    // Where the panel that begins at a column ends: panels are whole groups, or a part of one.
    static Columns panel(int64_t column, int64_t all, int64_t group, int64_t most) {
        const int64_t whole = std::min(most, all - column) / group * group, next = (column / group + 1) * group;
        return {column, whole > 0 && column % group == 0 ? column + whole : std::min({all, next, column + most}), all,
                group};
    }

    // Says so in a block.
    void describe(Block& b) const {
        const int64_t width = end - column;
        b.begins = column % group == 0, b.ends = end % group == 0 || end == all;
        b.groups = b.begins && width % group == 0 ? width / group : 0;
        b.blocks = (b.groups ? group : width) / tiles::block_columns;
    }
};

// --- results ---------------------------------------------------------------------------------------------------------

// Where results go.
struct Results {
    const float* token_scale;  // [t], or null
    const float* bias;         // [n], or null
    void* out;                 // [t, n]
    Number type;
    int64_t t, n;
    bool add = false;  // to what `out` holds, in float32
};

// factor [tiles, 16]: of the totals, or null.
template <int tiles>
void finish(const Results& p, const float* total, const float* factor, int64_t tile, int64_t first, int64_t tokens) {
    const int64_t row = tile * tile_rows;
    if (!factor && p.type == Number::float32 && p.token_scale && !p.bias && !p.add && row + tiles * tile_rows <= p.n) {
        float* to = static_cast<float*>(p.out) + first * p.n + row;
        for (int64_t t = 0; t < tokens; t++, to += p.n, total += tiles * tile_rows)
#pragma GCC unroll 4
            for (int64_t i = 0; i < tiles * tile_rows; i += tile_rows)
                store(to + i, load(total + i) * p.token_scale[first + t]);
        return;
    }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < tiles * tile_rows; i += tile_rows, total += tile_rows) {
            const int64_t count = std::min(tile_rows, p.n - row - i);
            Lanes y = load(total);
            if (factor) y *= load(factor + i);
            if (p.token_scale) y *= p.token_scale[first + t];
            if (p.bias) y += tiles::load_bias(p.bias, row + i, count);
            if (p.add) y += load(static_cast<const float*>(p.out) + (first + t) * p.n + row + i, count);
            tiles::store_result(p.out, p.type, (first + t) * p.n + row + i, y, count);
        }
}

// Results are written with large strides: without this, each line would be waited for.
template <int tiles>
void fetch_results(const Results& p, int64_t tile, int64_t first, int64_t tokens) {
    const int64_t size = p.type == Number::float32 ? 4 : 2;
    for (int64_t t = first; t < std::min(p.t, first + tokens); t++)
        for (int64_t at = 0; at < tiles * tile_rows * size; at += 64)
            __builtin_prefetch(static_cast<const uint8_t*>(p.out) + (t * p.n + tile * tile_rows) * size + at, 1, 2);
}

}  // namespace
}  // namespace ptq::gemm
