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

#include "integer_tiled/decode_lanes.h"

namespace ptq::gemm {
namespace {

using integer::Lanes;
using integer::SignedInts;
using integer_tiled::tile_rows;

struct Block {
    const uint8_t* codes;
    int64_t tile_step;     // bytes between the row tiles of codes, where they are not in a panel
    const uint32_t* x;     // [step, token]
    const uint32_t* next;  // the x that comes then: it is fetched meanwhile
    const uint8_t* ahead;  // what else to fetch: `ahead_count` streams, `ahead_step` apart,
    int64_t ahead_count, ahead_step, ahead_bytes;  // so much of each for 32 columns
    const uint16_t* scale;  // [tile, group, 16], bits of bfloat16, from the first group of the panel on
    const uint8_t* zero;    // likewise, or null
    int64_t scale_step;     // numbers from tile to tile of both
    const int32_t* offset;  // [group, `offset_step`], likewise: integers begin with offset of a token, times zero
    int64_t offset_step;
    float* total;    // [token, tile, 16]: of the groups before, times their scales
    int32_t* open;   // the same: sums of a group that began in the panel before
    int64_t groups;  // that are whole; none: there is a part of one, and whether its first and last columns
    bool begins, ends;
    int64_t blocks;  // 32 columns each, in a group, or in the part
};

// Whether totals, too, have registers.
#if defined(__AVX512F__)
template <int tiles, int tokens>
constexpr bool hold = tiles * tokens <= 12;
#else
template <int tiles, int tokens>
constexpr bool hold = false;
#endif

// total + scale * sum. Integers: each operation rounded, as it is defined.
inline Lanes scaled(Lanes total, Lanes scale, Lanes sum) {
    return integer::fma(scale, sum, total);
}
inline Lanes scaled(Lanes total, Lanes scale, SignedInts sum) {
    return total + scale * __builtin_convertvector(sum, Lanes);
}

#define PTQ_EACH_SUM \
    _Pragma("GCC unroll 8") for (int t = 0; t < tokens; t++) _Pragma("GCC unroll 3") for (int r = 0; r < tiles; r++)
// Sums that are not taken apart into registers would be many times slower.
#define PTQ_IN_REGISTERS [[gnu::always_inline]] inline

template <class Sum, int tiles, int tokens>
PTQ_IN_REGISTERS void begin_group(const Block& b, Sum sum[tokens][tiles]) {
    if constexpr (std::is_same_v<Sum, Lanes>) {
        PTQ_EACH_SUM sum[t][r] = Lanes{};
    } else if (b.zero) {
        SignedInts zero[tiles];
        for (int r = 0; r < tiles; r++) zero[r] = integer_tiled::load_zero(b.zero + r * b.scale_step);
        PTQ_EACH_SUM sum[t][r] = zero[r] * b.offset[t];
    } else {
        PTQ_EACH_SUM sum[t][r] = SignedInts{} + b.offset[t];
    }
}

template <class Op, int tiles, int tokens>
PTQ_IN_REGISTERS void multiply_columns(Block& b, typename Op::Sum sum[tokens][tiles]) {
    for (int64_t i = 0; i < b.blocks; i++) {
#pragma GCC unroll 16
        for (int64_t line = 0; line < Op::x_step; line += 16) __builtin_prefetch(b.next + line, 0, 3);
        for (int64_t stream = 0; stream < b.ahead_count; stream++)
            for (int64_t at = 0; at < b.ahead_bytes; at += 64)
                __builtin_prefetch(b.ahead + stream * b.ahead_step + at, 0, 2);
        b.ahead += b.ahead_bytes;
        Op::template multiply<tiles, tokens>(b.codes, b.tile_step, b.x, sum);
        b.codes += Op::template codes_step<tiles>, b.x += Op::x_step, b.next += Op::x_step;
    }
}

template <class Op, int tiles, int tokens>
void multiply_groups(Block b) {
    constexpr bool held = hold<tiles, tokens>;
    Lanes total[tokens][tiles];
    if constexpr (held) PTQ_EACH_SUM total[t][r] = integer::load(b.total + (t * tiles + r) * tile_rows);
    for (int64_t group = 0; group < b.groups; group++) {
        typename Op::Sum sum[tokens][tiles];
        begin_group<typename Op::Sum, tiles, tokens>(b, sum);
        multiply_columns<Op, tiles, tokens>(b, sum);
        Lanes scale[tiles];
#pragma GCC unroll 3
        for (int r = 0; r < tiles; r++) scale[r] = integer_tiled::load_scale(b.scale + r * b.scale_step);
        PTQ_EACH_SUM {
            float* to = b.total + (t * tiles + r) * tile_rows;
            if constexpr (held)
                total[t][r] = scaled(total[t][r], scale[r], sum[t][r]);
            else
                integer::store(to, scaled(integer::load(to), scale[r], sum[t][r]));
        }
        b.offset += b.offset_step, b.scale += tile_rows, b.zero += b.zero ? tile_rows : 0;
    }
    if constexpr (held) PTQ_EACH_SUM integer::store(b.total + (t * tiles + r) * tile_rows, total[t][r]);
}

template <class Op, int tiles, int tokens>
void multiply_part(Block b) {
    typename Op::Sum sum[tokens][tiles];
    if (b.begins)
        begin_group<typename Op::Sum, tiles, tokens>(b, sum);
    else
        PTQ_EACH_SUM std::memcpy(&sum[t][r], b.open + (t * tiles + r) * tile_rows, sizeof sum[t][r]);
    multiply_columns<Op, tiles, tokens>(b, sum);
    if (!b.ends) {
        PTQ_EACH_SUM std::memcpy(b.open + (t * tiles + r) * tile_rows, &sum[t][r], sizeof sum[t][r]);
        return;
    }
    Lanes scale[tiles];
    for (int r = 0; r < tiles; r++) scale[r] = integer_tiled::load_scale(b.scale + r * b.scale_step);
    PTQ_EACH_SUM {
        float* to = b.total + (t * tiles + r) * tile_rows;
        integer::store(to, scaled(integer::load(to), scale[r], sum[t][r]));
    }
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
        b.blocks = (b.groups ? group : width) / integer_tiled::block_columns;
    }
};

// The codes of some row tiles that come next, shared out among the first blocks of tokens.
struct Ahead {
    const uint8_t* codes;
    int64_t tiles, tile_bytes, each;  // row tiles, and how many go with a block

    static Ahead of(const uint8_t* codes, int64_t tiles, int64_t tile_bytes, int64_t blocks) {
        return {codes, tiles, tile_bytes, (tiles + blocks - 1) / blocks};
    }
    void next(Block& b) {
        b.ahead = codes, b.ahead_step = tile_bytes, b.ahead_count = std::min(tiles, each);
        codes += b.ahead_count * tile_bytes, tiles -= b.ahead_count;
    }
};

template <class Op, int tiles, int tokens>
void multiply_block(const Block& b) {
    b.groups ? multiply_groups<Op, tiles, tokens>(b) : multiply_part<Op, tiles, tokens>(b);
}

// --- results ---------------------------------------------------------------------------------------------------------

// Where results go.
struct Results {
    const float* token_scale;  // [t], or null
    const float* bias;         // [n], or null
    void* out;                 // [t, n]
    integer_tiled::Number type;
    int64_t t, n;
};

template <int tiles>
void finish(const Results& p, const float* total, int64_t tile, int64_t first, int64_t tokens) {
    const int64_t row = tile * tile_rows;
    if (p.type == integer_tiled::Number::float32 && p.token_scale && !p.bias && row + tiles * tile_rows <= p.n) {
        float* to = static_cast<float*>(p.out) + first * p.n + row;
        for (int64_t t = 0; t < tokens; t++, to += p.n, total += tiles * tile_rows)
#pragma GCC unroll 3
            for (int64_t i = 0; i < tiles * tile_rows; i += tile_rows)
                integer::store(to + i, integer::load(total + i) * p.token_scale[first + t]);
        return;
    }
    for (int64_t t = 0; t < tokens; t++)
        for (int64_t i = 0; i < tiles * tile_rows; i += tile_rows, total += tile_rows) {
            const int64_t count = std::min(tile_rows, p.n - row - i);
            Lanes y = integer::load(total);
            if (p.token_scale) y *= p.token_scale[first + t];
            if (p.bias) y += integer_tiled::load_bias(p.bias, row + i, count);
            integer_tiled::store_result(p.out, p.type, (first + t) * p.n + row + i, y, count);
        }
}

// Results are written with large strides: without this, each line would be waited for.
template <int tiles>
void fetch_results(const Results& p, int64_t tile, int64_t first, int64_t tokens) {
    const int64_t size = p.type == integer_tiled::Number::float32 ? 4 : 2;
    for (int64_t t = first; t < std::min(p.t, first + tokens); t++)
        for (int64_t at = 0; at < tiles * tile_rows * size; at += 64)
            __builtin_prefetch(static_cast<const uint8_t*>(p.out) + (t * p.n + tile * tile_rows) * size + at, 1, 2);
}

}  // namespace
}  // namespace ptq::gemm
