// y = x W^T + bias for a few tokens x in float16 or bfloat16, with W in fragments: decoded in registers, multiplied on
// the tensor cores with W as operand A. Codes minus zeros are exact in both types; a group's sum is float32 and is
// multiplied with the group's scale in float32. Sums over splits of the columns are added in their order. No torch
// here.
#pragma once

#include "integer_cuda/stream.cuh"

namespace ptq::integer_cuda {

struct Linear {
    Weights w;
    const void* x;   // [tokens, k]
    void* out;       // [tokens, n], of the type of x
    float* partial;  // [splits, tokens, n] where there is more than one split
    const void* bias;
    Number bias_kind;
    int tokens, splits;
    bool aligned;  // x is a multiple of 16 and k of 8
};

// What a warp adds up: `sum` in the group that it is in, `total` over the groups before.
template <class T, class S>
struct Sums {
    Scales<S> scales;
    float sum[S::tiles][S::token_tiles][4] = {}, total[S::tiles][S::token_tiles][4] = {};
    float scale[S::tiles][2] = {};
    Offset<T, S::bits> offset[S::tiles][2] = {};

    PTQ_DEVICE void flush() {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            total[r][m][i] += scale[r][i / 2] * sum[r][m][i];
            sum[r][m][i] = 0;
        }
    }
    PTQ_DEVICE void enter() {
        flush();
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int second = 0; second < 2; second++) {
            scale[r][second] = float_of(scales.scale[r][second]);
            if (scales.zero_from) offset[r][second].set(scales.zero[r][second]);
        }
        scales.advance();
    }
    PTQ_DEVICE void step(const Walk<S>& walk, int stage, const uint8_t* tokens) {
        uint32_t words[S::tiles][S::bits];
        walk.load_words(stage, words);
        PTQ_UNROLL
        for (int h = 0; h < 2; h++) {
            if (scales.enters(2 * walk.block + h)) enter();
            Words4 b[S::token_tiles];
            PTQ_UNROLL
            for (int m = 0; m < S::token_tiles; m++)
                b[m] = load<Words4>(tokens + 8 * m * Buffers<S, 2>::row_bytes + 2 * half_columns * h);
            PTQ_UNROLL
            for (int u = 0; u < 2; u++) PTQ_UNROLL
            for (int r = 0; r < S::tiles; r++) {
                uint32_t a[4];
                PTQ_UNROLL
                for (int j = 0; j < 4; j++) a[j] = number_pair<T, S::bits>(words[r], 2 * h + u, j, offset[r][j % 2]);
                PTQ_UNROLL
                for (int m = 0; m < S::token_tiles; m++) mma<T>(sum[r][m], a, b[m].word[2 * u], b[m].word[2 * u + 1]);
            }
        }
    }
};

template <class T, class S>
PTQ_DEVICE void write_out(const Linear& p, float y, int row, int token) {
    if (row >= p.w.n || token >= p.tokens) return;
    if (p.splits > 1)
        p.partial[(static_cast<int64_t>(block_y()) * p.tokens + token) * p.w.n + row] = y;
    else
        static_cast<T*>(p.out)[static_cast<int64_t>(token) * p.w.n + row] =
            narrow<T>(y + number_at(p.bias, p.bias_kind, row));
}

template <class T, class S>
PTQ_KERNEL(S::threads, 1)
void linear_kernel(const Linear p) {
    const int across = warp() % S::across, along = warp() / S::across;
    const int tile = (block_x() * S::across + across) * S::tiles, first_token = block_z() * S::tokens;
    const int count = p.tokens - first_token < S::tokens ? p.tokens - first_token : S::tokens;
    const T* x = static_cast<const T*>(p.x) + static_cast<int64_t>(first_token) * p.w.k;
    Sums<T, S> sums{Scales<S>(p.w, 2 * range_of(p.w.k, block_y() * S::along + along, p.splits * S::along).first, tile)};
    PTQ_UNROLL
    for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
    for (int second = 0; second < 2; second++) sums.offset[r][second].set(1 << (S::bits - 1));
    stream<S>(p.w, x, count, p.aligned, block_y(), p.splits, tile, along, shared(), sums);
    sums.flush();
    if constexpr (S::along > 1) {  // the warps that share columns, added in their order
        constexpr int numbers = S::tiles * S::token_tiles * 4;
        float* exchange = reinterpret_cast<float*>(shared());
        block_barrier();
        if (along > 0) {
            float* to = exchange + ((along - 1) * S::across + across) * numbers * 32 + lane();
            PTQ_UNROLL
            for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
            for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
            for (int i = 0; i < 4; i++) to[32 * ((r * S::token_tiles + m) * 4 + i)] = sums.total[r][m][i];
        }
        block_barrier();
        if (along > 0) return;
        PTQ_UNROLL
        for (int other = 1; other < S::along; other++) {
            const float* from = exchange + ((other - 1) * S::across + across) * numbers * 32 + lane();
            PTQ_UNROLL
            for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
            for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
            for (int i = 0; i < 4; i++) sums.total[r][m][i] += from[32 * ((r * S::token_tiles + m) * 4 + i)];
        }
    }
    PTQ_UNROLL
    for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
    for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
    for (int i = 0; i < 4; i++)
        write_out<T, S>(p, sums.total[r][m][i], tile_rows * (tile + r) + lane() / 4 + 8 * (i / 2),
                        first_token + 8 * m + 2 * (lane() % 4) + i % 2);
}

// The sum over the splits, in their order, and the bias.
constexpr int reduce_threads = 256;
template <class T>
PTQ_KERNEL(reduce_threads, 2)
void reduce_kernel(const Linear p) {
    const int64_t i = static_cast<int64_t>(block_x()) * reduce_threads + thread(),
                  count = static_cast<int64_t>(p.tokens) * p.w.n;
    if (i >= count) return;
    float y = p.partial[i];
    for (int s = 1; s < p.splits; s++) y += p.partial[s * count + i];
    static_cast<T*>(p.out)[i] = narrow<T>(y + number_at(p.bias, p.bias_kind, i % p.w.n));
}

}  // namespace ptq::integer_cuda
