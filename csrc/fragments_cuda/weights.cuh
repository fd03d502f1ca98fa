// Weights in fragments (ptq/ops/fragments.py) for the tensor cores' operand A, shared by the formats that have them. A
// block is 16 rows x 64 columns, lane l of a warp owns `bits` words of it, with g = l / 4, t = l % 4: rows g and g + 8,
// columns 32 h + 8 t + 4 u + 0 .. 3 (h, u in {0, 1}), which are step s = 2 h + u of four mma steps. Pair j of a step:
// j = 0: row g, its columns 0 and 1; 1: row g + 8; 2: row g, columns 2 and 3; 3: row g + 8. No torch here.
//
// A format brings a Code, which makes numbers of a lane's words:
//   bits, words                        stored words; words in all, once `complete(words)` has made the others
//   numbers<T>(words, s, j, offset)    a pair in packed halves: code values times 1 / factor<T>, exactly
//   factor<T>                          a power of two
//   Offset<T>                          of a row and a group; set(zero)
//   has_raw, raw<T>(words, s, j)       likewise in fewer instructions, or none: a pair as it is stored, zero included;
//   raw_factor<T>(second)              of rows g + 8 second: values times 1 / raw_factor, once tokens are `lifted`
//   raw_one                            1 likewise, of j = 0 (of 1 and 3 it lies 4 bits higher); 0 if there are no zeros
//   bytes(words, s, second)            step s of row g + 8 second, columns 0, 2, 1, 3: values times 2^shift, plus zero
//   whole_bytes                        whether all eight bits of them differ
//   shift, zero                        of `bytes`; `zero` unless zeros are stored, which they can be if `has_zeros`
#pragma once

#include <type_traits>

#include "cuda/numbers.cuh"
#include "cuda/stream.cuh"

namespace ptq::fragments {

using namespace ptq::cuda;

constexpr int block_columns = 64, half_columns = 32;
PTQ_BOTH constexpr int block_bytes(int bits) {
    return 128 * bits;
}

struct Weights {
    const uint8_t* fragments;  // [row tiles, blocks, 128 bits]
    const uint16_t* scale;     // [row tiles, groups, 16], bits of bfloat16
    const uint8_t* zero;       // likewise, or null
    int n, k, groups;
    int halves;  // of 32 columns, in a group (rounded up, where a row is one group)
};
inline int halves_of(int k, int groups) {
    return k > groups ? (k / groups + half_columns - 1) / half_columns : 1;
}

template <class Code_, int token_tiles_, int tiles_, int across_, int along_>
struct Shape : StreamShape<Code_::bits, block_columns, token_tiles_, tiles_, across_, along_> {
    using Code = Code_;
};

// bfloat16 tokens that meet `raw` numbers, which are so small that products would vanish: times 2^80, so below 2^48.
constexpr int lift = 80;
template <class T>
PTQ_DEVICE uint32_t lifted(uint32_t pair) {
    if constexpr (std::is_same_v<T, Half>) return pair;
    return fma2<T>(pair, static_cast<uint32_t>(127 + lift) << 7 | static_cast<uint32_t>(127 + lift) << 23, 0x80008000u);
}
PTQ_BOTH constexpr float power_of_two(int e) {
    return e < 0 ? 0.5f * power_of_two(e + 1) : e > 0 ? 2 * power_of_two(e - 1) : 1;
}

// Before the wait for the kernel that makes the tokens: the blocks that a warp begins with, and their scales, into the
// L2 cache.
template <class S>
PTQ_DEVICE void prefetch_weights(const Weights& w, Range range, int tile) {
    const int row_tiles = (w.n + tile_rows - 1) / tile_rows, r = lane() % 16;
    if (r >= S::tiles || tile + r >= row_tiles || range.first >= range.last) return;
    const int64_t t = tile + r, blocks = (w.k + S::columns - 1) / S::columns;
    const int count = range.last - range.first < S::prefetched ? range.last - range.first : S::prefetched;
    if (lane() < 16) {
        prefetch(w.fragments + (t * blocks + range.first) * S::block_bytes, count * S::block_bytes);
    } else {
        const int first = 2 * range.first / w.halves, groups = 2 * count / w.halves + 1;
        if (first < w.groups)
            prefetch(w.scale + (t * w.groups + first) * tile_rows,
                     2 * tile_rows * (groups < w.groups - first ? groups : w.groups - first));
    }
}

// All words of a lane, for every row tile.
template <class S>
struct Words {
    uint32_t of[S::tiles][S::Code::words];

    PTQ_DEVICE explicit Words(const uint32_t (&stored)[S::tiles][S::words]) {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) {
            PTQ_UNROLL
            for (int i = 0; i < S::words; i++) of[r][i] = stored[r][i];
            S::Code::complete(of[r]);
        }
    }
};

// Scales and zeros of rows g and g + 8, loaded into registers a group ahead.
template <class S>
struct Scales {
    const uint16_t* scale_from;
    const uint8_t* zero_from;  // or null
    int at[S::tiles];          // of row g of the group that was loaded
    int left;                  // groups from that one on
    int begins;                // its first half of 32 columns
    int halves;
    bool inside;                  // whether a group may begin inside a block
    uint32_t scale[S::tiles][2];  // bits of bfloat16: to do anything with them here would wait for them
    int zero[S::tiles][2];

    PTQ_DEVICE Scales(const Weights& w, int first_half, int tile) {
        scale_from = w.scale;
        zero_from = S::Code::has_zeros ? w.zero : nullptr;
        halves = w.halves;
        inside = w.groups > 1 && halves % 2;
        int group = first_half / halves;
        group = group < w.groups ? group : w.groups - 1;
        left = w.groups - group;
        begins = group * halves;
        const int row_tiles = (w.n + tile_rows - 1) / tile_rows;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) {
            const int t = tile + r < row_tiles ? tile + r : row_tiles - 1;
            at[r] = (t * w.groups + group) * tile_rows + lane() / 4;
            zero[r][0] = zero[r][1] = S::Code::zero;
        }
        fetch();
    }
    PTQ_DEVICE void fetch() {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int second = 0; second < 2; second++) scale[r][second] = scale_from[at[r] + 8 * second];
        if (!zero_from) return;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int second = 0; second < 2; second++) zero[r][second] = zero_from[at[r] + 8 * second];
    }
    PTQ_DEVICE float number(int r, int second) const { return float_of(scale[r][second] << 16); }
    // Whether half `half` begins the group that was loaded. Beyond the last group there are only zero columns.
    PTQ_DEVICE bool enters(int half) const { return half >= begins; }
    // Half h of a block: where all groups are whole blocks, nothing begins in the middle of one.
    PTQ_DEVICE bool enters(int block, int h) const { return (h == 0 || inside) && enters(2 * block + h); }
    // After its scales and zeros were taken: the next one.
    PTQ_DEVICE void advance() {
        constexpr int never = 0x7fffffff;
        begins = --left ? begins + halves : never;
        if (left == 0) return;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) at[r] += tile_rows;
        fetch();
    }
};

// Blocks of threads follow each other along the tokens first, so that those which read the same weights run at the same
// time, and all but the first find them in the L2 cache. `rows`: the first group of rows.
struct BlockWork {
    int rows, first_token, count;
};
template <class S>
PTQ_DEVICE BlockWork work_of(int tokens, int block = block_x()) {
    const int blocks = (tokens + S::tokens - 1) / S::tokens, first = block % blocks * S::tokens;
    return {block / blocks, first, tokens - first < S::tokens ? tokens - first : S::tokens};
}
template <class S>
PTQ_BOTH int groups_of_rows(const Weights& w) {
    return (w.n + S::rows - 1) / S::rows;
}
// Blocks of threads: `blocks` of them share the groups of rows (all where it is 0).
template <class S>
Grid grid_of(const Weights& w, int tokens, int splits, int blocks = 0) {
    const int64_t rows = blocks ? blocks : groups_of_rows<S>(w), each = (tokens + S::tokens - 1) / S::tokens;
    return {static_cast<unsigned>(rows * each), static_cast<unsigned>(splits)};
}

// Rows of tokens in shared memory.
template <class S>
PTQ_BOTH int kept_rows(int tokens) {
    return S::token_tiles == 1 && tokens < S::tokens ? tokens : S::tokens;
}

}  // namespace ptq::fragments
