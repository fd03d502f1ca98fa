// y = x W^T + bias for tokens x in float16 or bfloat16, with W in fragments: decoded in registers, multiplied on the
// tensor cores with W as operand A. The numbers of codes are exact in both types; a group's sum is float32 and is
// multiplied with the group's scale in float32. Sums over splits of the columns are added in their order.
//
// Of up to 8 tokens, codes are multiplied as they are stored (`raw`), in a fifth fewer instructions; where that leaves
// their zero in, the tokens are added up as well, by one more mma, to take it off each sum. No torch here.
#pragma once

#include "fragments_cuda/weights.cuh"

namespace ptq::fragments {

struct Linear {
    Weights w;
    const void* x;   // [tokens, k]
    void* out;       // [tokens, n]
    float* partial;  // [splits, tokens, n] where there is more than one split
    const void* bias;
    Number out_kind, bias_kind;
    const float* token_scale;  // [tokens], of the result before the bias; or null
    int tokens, splits;
    bool aligned;         // x is a multiple of 16 and k of 8
    int blocks, buffers;  // said by `launch_linear`: blocks of threads for all rows, buffers of tokens
};

// What a warp adds up: `sum` in the group that it is in, `total` over the groups before.
template <class T, class S>
struct Sums {
    using Code = typename S::Code;
    static constexpr bool raw = Code::has_raw && S::token_tiles == 1, has_ones = raw && Code::raw_one != 0;
    const Weights& w;
    const int first_half;
    Scales<S> scales, next;
    float sum[S::tiles][S::token_tiles][4] = {}, total[S::tiles][S::token_tiles][4] = {};
    float ones[S::token_tiles][4] = {};  // of the tokens, in the group
    float scale[S::tiles][2] = {}, zero[S::tiles][2] = {};
    typename Code::template Offset<T> offset[S::tiles][2] = {};

    PTQ_DEVICE Sums(const Weights& w_, Range range, int tile)
        : w(w_), first_half(2 * range.first), scales(w_, first_half, tile), next(scales) {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int second = 0; second < 2; second++) offset[r][second].set(Code::zero);
    }
    PTQ_DEVICE void prepare(int tile) { next = Scales<S>(w, first_half, tile); }
    // The rows that were prepared for.
    PTQ_DEVICE void begin() {
        scales = next;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
        for (int i = 0; i < 4; i++) total[r][m][i] = 0;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) scale[r][0] = scale[r][1] = 0;  // one that is no number stays behind
    }
    PTQ_DEVICE void flush() {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            if constexpr (has_ones) sum[r][m][i] -= (Code::has_zeros ? zero[r][i / 2] : Code::zero) * ones[m][i];
            total[r][m][i] += scale[r][i / 2] * sum[r][m][i];
            sum[r][m][i] = 0;
        }
        PTQ_UNROLL
        for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
        for (int i = 0; i < 4; i++) ones[m][i] = 0;
    }
    PTQ_DEVICE void enter() {
        flush();
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int second = 0; second < 2; second++) {
            scale[r][second] = scales.number(r, second);
            if constexpr (raw)
                zero[r][second] = static_cast<float>(scales.zero[r][second]);
            else if (scales.zero_from)
                offset[r][second].set(scales.zero[r][second]);
        }
        scales.advance();
    }
    PTQ_DEVICE void step(int block, const uint32_t (&stored)[S::tiles][S::words], const uint8_t* tokens) {
        const Words<S> words(stored);
        PTQ_UNROLL
        for (int h = 0; h < 2; h++) {
            if (scales.enters(block, h)) enter();
            Words4 b[S::token_tiles];
            PTQ_UNROLL
            for (int m = 0; m < S::token_tiles; m++) {
                b[m] = load<Words4>(tokens + 8 * m * Buffers<S, 2>::row_bytes + 2 * half_columns * h);
                if constexpr (raw)
                    for (uint32_t& word : b[m].word) word = lifted<T>(word);
            }
            PTQ_UNROLL
            for (int u = 0; u < 2; u++) multiply(words, 2 * h + u, b);
        }
    }
    // One mma step of every row tile.
    PTQ_DEVICE void multiply(const Words<S>& words, int s, const Words4 (&b)[S::token_tiles]) {
        const int u = s % 2;
        uint32_t a[4];
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) {
            PTQ_UNROLL
            for (int j = 0; j < 4; j++) {
                if constexpr (raw)
                    a[j] = Code::template raw<T>(words.of[r], s, j);
                else
                    a[j] = Code::template numbers<T>(words.of[r], s, j, offset[r][j % 2]);
            }
            PTQ_UNROLL
            for (int m = 0; m < S::token_tiles; m++) mma<T>(sum[r][m], a, b[m].word[2 * u], b[m].word[2 * u + 1]);
        }
        if constexpr (has_ones) {
            PTQ_UNROLL
            for (int j = 0; j < 4; j++) a[j] = Code::raw_one << 4 * (j % 2);
            PTQ_UNROLL
            for (int m = 0; m < S::token_tiles; m++) mma<T>(ones[m], a, b[m].word[2 * u], b[m].word[2 * u + 1]);
        }
    }
    // What a total of row `row` of a tile is to be multiplied with.
    PTQ_DEVICE static float factor(int row) {
        if constexpr (raw)
            return Code::template raw_factor<T>(row / 8);
        else
            return Code::template factor<T>;
    }
};

PTQ_DEVICE void finish(const Linear& p, float y, int row, int token) {
    if (p.token_scale) y *= p.token_scale[token];
    store_number(p.out, p.out_kind, static_cast<int64_t>(token) * p.w.n + row, y + number_at(p.bias, p.bias_kind, row));
}
PTQ_DEVICE void write_out(const Linear& p, float y, int row, int token) {
    if (row >= p.w.n || token >= p.tokens) return;
    if (p.splits > 1)
        p.partial[(static_cast<int64_t>(block_y()) * p.tokens + token) * p.w.n + row] = y;
    else
        finish(p, y, row, token);
}

template <class T, class S>
PTQ_KERNEL(S::threads, S::resident)
void linear_kernel(const Linear p) {
    const int across = warp() % S::across, along = warp() / S::across, groups = groups_of_rows<S>(p.w);
    const BlockWork work = work_of<S>(p.tokens);
    const auto tile_of = [&](int rows) { return (rows * S::across + across) * S::tiles; };
    const T* x = static_cast<const T*>(p.x) + static_cast<int64_t>(work.first_token) * p.w.k;
    const Range range = range_of<S>(p.w.k, block_y() * S::along + along, p.splits * S::along);
    prefetch_weights<S>(p.w, range, tile_of(work.rows));
    Sums<T, S> sums(p.w, range, tile_of(work.rows));
    const TokenRows<T> tokens{x, work.count, kept_rows<S>(p.tokens), p.aligned, p.buffers, block_y(), p.splits};
    Feed<S, T> feed(p.w.fragments, p.w.n, p.w.k, tokens, tile_of(work.rows), along, shared());
    follow_previous();
    feed.begin();
    uint8_t* rooms = shared() + p.buffers * Buffers<S, 2>::token_bytes(tokens.rows);
    int turn = 0;
    for (int rows = work.rows; rows < groups; rows += p.blocks) {
        feed.run(sums, S::roams && rows + p.blocks < groups ? tile_of(rows + p.blocks) : -1);
        sums.flush();
        hand_over<S, 2>(sums.total, rooms, turn++, [&](int a, int r, int row, int token, float sum) {
            write_out(p, sum * Sums<T, S>::factor(row), tile_rows * ((rows * S::across + a) * S::tiles + r) + row,
                      work.first_token + token);
        });
        if constexpr (!S::roams) return;
        sums.begin();
    }
}

// The sum over the splits, in their order, and what remains to do.
template <int threads>
PTQ_KERNEL(threads, 2)
void reduce_kernel(const Linear p) {
    const int64_t i = static_cast<int64_t>(block_x()) * threads + thread(),
                  count = static_cast<int64_t>(p.tokens) * p.w.n;
    follow_previous();
    if (i >= count) return;
    float y = p.partial[i];
    for (int s = 1; s < p.splits; s++) y += p.partial[s * count + i];
    finish(p, y, static_cast<int>(i % p.w.n), static_cast<int>(i / p.w.n));
}

}  // namespace ptq::fragments
