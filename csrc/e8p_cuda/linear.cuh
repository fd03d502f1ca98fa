// Tokens times an E8P weight in fragments: int8 tokens, to the bit as quip_sharp/tiled_ops.py defines it (exact integer
// sums), and float16 or bfloat16 ones (points are exact in both types, sums are float32). The tensor cores take the
// weight as operand A, also for one token: with dp4a, two instructions would multiply a code instead of half a one.
// Sums over warps along the columns are added in their order. No torch here.
#pragma once

#include "e8p_cuda/decode.cuh"

namespace ptq::e8p_cuda {

template <int bits_, int token_tiles, int across, int along>
struct Shape : StreamShape<2 * bits_, block_columns, token_tiles, 1, across, along> {
    static constexpr int bits = bits_, stages_of_code = stages_of<bits_>;
};

struct Linear {
    Weights w;
    const void* x;         // [tokens, k]
    const float* q_scale;  // [tokens], of int8 tokens
    void* out;             // [tokens, n]
    Number out_kind;
    const void* bias;
    Number bias_kind;
    int tokens, rows;  // in all, and in a pass
    int groups, grid;  // of S::across row tiles; blocks of threads that share them
    int log_copies, buffers;
    bool aligned;  // x and its rows are multiples of 16 bytes
};

// Sums of int8 tokens. The nibbles of the two stages of 3 and 4 bits have sums of their own: to add up the stages of
// each weight would take more instructions than it saves. `ones`: of the tokens alone, for the offset of the nibbles.
template <class X, class S>
struct Product {
    Tables<S::bits> tables;
    int32_t low[S::stages_of_code][S::token_tiles][4] = {}, high[S::stages_of_code][S::token_tiles][4] = {},
            ones[S::token_tiles][4] = {};

    PTQ_DEVICE explicit Product(const Linear& p) : tables(p.log_copies) {}
    PTQ_DEVICE void prepare(int) {}
    PTQ_DEVICE void begin() {
        PTQ_UNROLL
        for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            ones[m][i] = 0;
            PTQ_UNROLL
            for (int stage = 0; stage < S::stages_of_code; stage++) low[stage][m][i] = high[stage][m][i] = 0;
        }
    }
    PTQ_DEVICE void step(int, const uint32_t (&words)[1][S::words], const uint8_t* tokens) {
        PTQ_UNROLL
        for (int h = 0; h < 2; h++) {
            uint32_t b[S::token_tiles][2][2];  // lower and upper columns of two codes: as the operands lie in registers
            PTQ_UNROLL
            for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
            for (int i = 0; i < 4; i++)
                b[m][i / 2][i % 2] =
                    load<uint32_t>(tokens + 8 * m * Buffers<S, 1>::row_bytes + 64 * h + 32 * (i % 2) + 4 * (i / 2));
            PTQ_UNROLL
            for (int stage = 0; stage < S::stages_of_code; stage++) {
                uint32_t lower[4], upper[4];
                PTQ_UNROLL
                for (int i = 0; i < 4; i++) {
                    const auto [word, flips] = tables.nibbles(words[0], stage, h, i);
                    lower[i] = xor_and(word, flips, 0x0f0f0f0fu);
                    upper[i] = xor_and(word, flips, 0xf0f0f0f0u);
                }
                PTQ_UNROLL
                for (int m = 0; m < S::token_tiles; m++) {
                    mma_u8s8(low[stage][m], lower, b[m][0][0], b[m][0][1]);
                    mma_u8s8(high[stage][m], upper, b[m][1][0], b[m][1][1]);
                }
            }
            const uint32_t one[4] = {0x01010101u, 0x01010101u, 0x01010101u, 0x01010101u};
            PTQ_UNROLL
            for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
            for (int half = 0; half < 2; half++) mma_u8s8(ones[m], one, b[m][half][0], b[m][half][1]);
        }
    }
    template <int stage = 0>
    PTQ_DEVICE int32_t sum(int m, int i) const {
        using W = Worth<S::bits, stage>;
        const int32_t all = W::times * (low[stage][m][i] + high[stage][m][i] / 16) - W::minus * ones[m][i];
        if constexpr (stage + 1 < S::stages_of_code) return all + sum<stage + 1>(m, i);
        return all;
    }
    using Sum = int32_t;
    // Of the sum of all columns.
    PTQ_DEVICE static float result(const Linear& p, int32_t sum, int token) {
        return multiply(multiply(*p.w.scale, static_cast<float>(sum)), p.q_scale[token]);
    }
};

// Sums of float16 or bfloat16 tokens: of half the points. The scale is multiplied at the end.
template <class T, class S>
    requires(sizeof(T) == 2)
struct Product<T, S> {
    Tables<S::bits> tables;
    HalfPoints<T, S::bits> points;
    float total[S::token_tiles][4] = {};
    float scale;

    PTQ_DEVICE explicit Product(const Linear& p) : tables(p.log_copies), scale(2 * *p.w.scale) {}
    PTQ_DEVICE void prepare(int) {}
    PTQ_DEVICE void begin() {
        PTQ_UNROLL
        for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
        for (int i = 0; i < 4; i++) total[m][i] = 0;
    }
    PTQ_DEVICE void step(int, const uint32_t (&words)[1][S::words], const uint8_t* tokens) {
        PTQ_UNROLL
        for (int h = 0; h < 2; h++) PTQ_UNROLL
        for (int v = 0; v < 2; v++) {
            Words4 b[S::token_tiles];
            PTQ_UNROLL
            for (int m = 0; m < S::token_tiles; m++)
                b[m] = load<Words4>(tokens + 8 * m * Buffers<S, 2>::row_bytes + 128 * h + 64 * v);
            uint32_t code[2][2] = {};  // of rows g and g + 8, of both stages
            PTQ_UNROLL
            for (int r = 0; r < 2; r++) PTQ_UNROLL
            for (int stage = 0; stage < S::stages_of_code; stage++) {
                const auto [word, flips] = tables.nibbles(words[0], stage, h, 2 * v + r);
                code[r][stage] = word ^ flips;
            }
            PTQ_UNROLL
            for (int u = 0; u < 2; u++) {
                uint32_t a[4];
                PTQ_UNROLL
                for (int i = 0; i < 4; i++) a[i] = points.pair(code[i % 2][0], code[i % 2][1], 2 * u + i / 2);
                PTQ_UNROLL
                for (int m = 0; m < S::token_tiles; m++) mma<T>(total[m], a, b[m].word[2 * u], b[m].word[2 * u + 1]);
            }
        }
    }
    PTQ_DEVICE float sum(int m, int i) const { return scale * total[m][i]; }
    using Sum = float;
    PTQ_DEVICE static float result(const Linear&, float sum, int) { return sum; }
};

// Adds up the warps along the columns, and writes rows from `first_row` on.
template <class S, class X, class P>
PTQ_DEVICE void finish(const Linear& p, const P& product, int first_row, int first_token, uint8_t* rooms, int turn) {
    using Sum = typename P::Sum;
    Sum sums[1][S::token_tiles][4];
    PTQ_UNROLL
    for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
    for (int i = 0; i < 4; i++) sums[0][m][i] = product.sum(m, i);
    hand_over<S, sizeof(X)>(sums, rooms, turn, [&](int across, int, int in_tile, int token, Sum sum) {
        const int row = first_row + tile_rows * across + in_tile;
        if (row >= p.w.n || token >= p.rows || first_token + token >= p.tokens) return;
        float y = P::result(p, sum, first_token + token);
        if (p.bias_kind != Number::none) y = add(y, number_at(p.bias, p.bias_kind, row));
        store_number(p.out, p.out_kind, static_cast<int64_t>(first_token + token) * p.w.n + row, y);
    });
}

template <class X, class S>
PTQ_KERNEL(S::threads, 1)
void linear_kernel(const Linear p) {
    uint8_t* memory = shared() + tables_bytes(S::bits, p.log_copies);
    const int first_token = block_y() * p.rows;
    const int count = p.tokens - first_token < p.rows ? p.tokens - first_token : p.rows;
    const TokenRows<X> tokens{static_cast<const X*>(p.x) + static_cast<int64_t>(first_token) * p.w.k, count,
                              S::token_tiles == 1 ? p.rows : S::tokens, p.aligned, p.buffers};
    const auto tile_of = [&](int group) { return group * S::across + warp() % S::across; };
    Product<X, S> product(p);
    Feed<S, X> feed(p.w.fragments, p.w.n, p.w.k, tokens, tile_of(block_x()), warp() / S::across, memory);
    fill_tables<X, S::bits, S::threads>(p.log_copies);
    follow_previous();
    feed.begin();
    uint8_t* rooms = memory + p.buffers * Buffers<S, sizeof(X)>::token_bytes(tokens.rows);
    int turn = 0;
    for (int group = block_x(); group < p.groups; group += p.grid) {
        feed.run(product, group + p.grid < p.groups ? tile_of(group + p.grid) : -1);
        finish<S, X>(p, product, tile_rows * S::across * group, first_token, rooms, turn++);
        product.begin();
    }
}

// What of a result the plain product of points with many int8 tokens leaves to do.
struct Scaled {
    const int32_t* sums;  // [token, row]
    const float *scale, *q_scale;
    void* out;
    Number out_kind;
    const void* bias;
    Number bias_kind;
    int64_t count;
    int n;
};
constexpr int scale_threads = 256;
PTQ_KERNEL(scale_threads, 2)
static void scale_kernel(const Scaled p) {
    follow_previous();
    const int64_t i = static_cast<int64_t>(block_x()) * scale_threads + thread();
    if (i >= p.count) return;
    float y = multiply(multiply(*p.scale, static_cast<float>(p.sums[i])), p.q_scale[i / p.n]);
    if (p.bias_kind != Number::none) y = add(y, number_at(p.bias, p.bias_kind, i % p.n));
    store_number(p.out, p.out_kind, i, y);
}

}  // namespace ptq::e8p_cuda
