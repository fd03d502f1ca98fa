// Quantised tokens times fragments, to the bit as quarot/tiled_ops.py defines it: per group an exact integer sum on the
// tensor cores (unsigned codes times signed bytes, minus the zero times the sum of the bytes); in float32, each
// operation rounded, group after group: acc = acc + scale * sum; y = acc * q_scale (+ bias). No torch here.
#pragma once

#include "integer_cuda/stream.cuh"

namespace ptq::integer_cuda {

struct Quantized {
    Weights w;
    const int8_t* q;       // [tokens, k]
    const float* q_scale;  // [tokens]
    void* out;             // [tokens, n]
    Number out_kind;
    const void* bias;
    Number bias_kind;
    int tokens;
    bool aligned;  // q and k are multiples of 16
};

// Groups must be added in their order, so one warp has all columns of its rows.
template <class S>
struct IntegerSums {
    int32_t sum[S::tiles][S::token_tiles][4] = {};
    int32_t bytes[S::token_tiles] = {};  // this lane's part of the sum of the group's bytes of token 8 m + g
    float total[S::tiles][S::token_tiles][4] = {};
    float scale[S::tiles][2] = {};
    int zero[S::tiles][2] = {};
    int group = -1;

    PTQ_DEVICE void flush() {
        PTQ_UNROLL
        for (int m = 0; m < S::token_tiles; m++) {
            int32_t of_token = bytes[m];  // lanes 4 g .. 4 g + 3 hold parts of token g
            of_token += shuffle_xor(of_token, 1);
            of_token += shuffle_xor(of_token, 2);
            // This lane's outputs are tokens 2 t and 2 t + 1, whose sums are in lanes 8 t and 8 t + 4.
            int32_t of_column[2];
            PTQ_UNROLL
            for (int i = 0; i < 2; i++) of_column[i] = shuffle(of_token, 8 * (lane() % 4) + 4 * i);
            PTQ_UNROLL
            for (int r = 0; r < S::tiles; r++)
                PTQ_UNROLL
            for (int i = 0; i < 4; i++) {
                const int32_t exact = sum[r][m][i] - zero[r][i / 2] * of_column[i % 2];
                total[r][m][i] = add(total[r][m][i], cuda::multiply(scale[r][i / 2], static_cast<float>(exact)));
                sum[r][m][i] = 0;
            }
            bytes[m] = 0;
        }
    }
    PTQ_DEVICE void enter(const Walk<S>& walk, int i, int h) {
        const int next = group_of(walk.w, 2 * walk.block(i) + h);
        if (next == group) return;
        if (group >= 0) flush();
        group = next;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++)
            PTQ_UNROLL
        for (int second = 0; second < 2; second++) {
            if (!walk.there(i, r)) continue;
            scale[r][second] = walk.scale(i, r, h, second);
            zero[r][second] = walk.zero(i, r, h, second);
        }
    }
    PTQ_DEVICE void multiply(const Walk<S>& walk, int i, const uint8_t* tokens, int count) {
        uint32_t words[S::tiles][S::bits];
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++)
            if (walk.there(i, r)) load_block<S::bits>(walk.stage(i, r), words[r]);
        const int column = (walk.block(i) - walk.range.first) % S::chunk_blocks * block_columns;
        PTQ_UNROLL
        for (int h = 0; h < 2; h++) {
            if (half_columns * (2 * walk.block(i) + h) >= walk.w.k) continue;  // zeros: no group of its own
            enter(walk, i, h);
            uint32_t b[S::token_tiles][2];
            PTQ_UNROLL
            for (int m = 0; m < S::token_tiles; m++) {
                const int row = 8 * m + lane() / 4;
                const uint8_t* at = tokens + row * Buffers<S, 1>::row_bytes + column + half_columns * h + 8 * (lane() % 4);
                const Words2 v = row < count ? load<Words2>(at) : Words2{};
                PTQ_UNROLL
                for (int u = 0; u < 2; u++) {
                    b[m][u] = byte_permute(v.word[u], 0, 0x3120);  // columns 0, 2, 1, 3, as the codes come
                    bytes[m] = dp4a(v.word[u], 0x01010101u, bytes[m]);
                }
            }
            PTQ_UNROLL
            for (int r = 0; r < S::tiles; r++) {
                if (!walk.there(i, r)) continue;
                uint32_t a[4];
                PTQ_UNROLL
                for (int j = 0; j < 4; j++) a[j] = code_bytes(words[r], 2 * h + j / 2, j % 2);
                PTQ_UNROLL
                for (int m = 0; m < S::token_tiles; m++) mma_u8s8(sum[r][m], a, b[m][0], b[m][1]);
            }
        }
    }
};

template <class S>
PTQ_KERNEL(S::threads, 1) void quantized_kernel(const Quantized p) {
    static_assert(S::along == 1);
    using B = Buffers<S, 1>;
    uint8_t* tokens = shared();
    const int first_token = block_z() * S::tokens;
    const int count = p.tokens - first_token < S::tokens ? p.tokens - first_token : S::tokens;
    const int8_t* q = p.q + static_cast<int64_t>(first_token) * p.w.k;
    const Walk<S> walk{p.w,
                       range_of(p.w.k, 0, 1),
                       (block_x() * S::across + warp()) * S::tiles,
                       0,
                       (p.w.n + tile_rows - 1) / tile_rows,
                       tokens + 2 * B::token_bytes + warp() * S::stages * S::stage_bytes};
    const int chunks = walk.chunks(), iterations = chunks * S::steps;
    copy_tokens<S>(q, p.w.k, count, p.aligned, walk.range.first, 0, tokens);
    for (int i = 0; i < S::stages - 1; i++) {
        if (i < iterations) walk.copy(i);
        copy_commit();
    }
    IntegerSums<S> sums;
    for (int i = 0; i < iterations; i++) {
        const int chunk = i / S::steps;
        copy_wait<S::stages - 2>();
        if (i % S::steps == 0) {
            block_barrier();
            if (chunk + 1 < chunks) copy_tokens<S>(q, p.w.k, count, p.aligned, walk.range.first, chunk + 1, tokens);
        } else {
            warp_barrier();
        }
        if (i + S::stages - 1 < iterations) walk.copy(i + S::stages - 1);
        copy_commit();
        if (walk.block(i) < walk.range.last) sums.multiply(walk, i, tokens + chunk % 2 * B::token_bytes, count);
    }
    sums.flush();
    copy_wait<0>();
    PTQ_UNROLL
    for (int r = 0; r < S::tiles; r++)
        PTQ_UNROLL
    for (int m = 0; m < S::token_tiles; m++)
        PTQ_UNROLL
    for (int i = 0; i < 4; i++) {
        const int row = tile_rows * (walk.tile + r) + lane() / 4 + 8 * (i / 2);
        const int token = first_token + 8 * m + 2 * (lane() % 4) + i % 2;
        if (row >= p.w.n || token >= p.tokens) continue;
        float y = cuda::multiply(sums.total[r][m][i], p.q_scale[token]);
        if (p.bias_kind != Number::none) y = add(y, number_at(p.bias, p.bias_kind, row));
        store_number(p.out, p.out_kind, static_cast<int64_t>(token) * p.w.n + row, y);
    }
}

}  // namespace ptq::integer_cuda
