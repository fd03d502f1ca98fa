// Quantised tokens times fragments, as quarot/tiled_ops.py and fp6/tiled_ops.py define it: per group an exact integer
// sum on the tensor cores (unsigned bytes times signed ones, minus the zero times the sum of the signed ones); in
// float32, each operation rounded, group after group: acc = acc + scale * sum; y = acc * (q_scale 2^-shift) (+ bias).
// To the bit where a row is one group: else each of the warps that share the columns adds up groups of its own. No
// torch here.
#pragma once

#include "fragments_cuda/weights.cuh"

namespace ptq::fragments {

struct Quantized {
    Weights w;
    const int8_t* q;       // [tokens, k]
    const float* q_scale;  // [tokens]
    void* out;             // [tokens, n]
    const void* bias;
    Number out_kind, bias_kind;
    int tokens;
    bool aligned;         // q and k are multiples of 16
    int blocks, buffers;  // said by `launch_quantized`: blocks of threads for all rows, buffers of tokens
};

template <class S>
struct IntegerSums {
    using Code = typename S::Code;
    const Weights& w;
    const int first_half;
    Scales<S> scales, next;
    int32_t sum[S::tiles][S::token_tiles][4] = {};
    int32_t bytes[S::token_tiles] = {};  // this lane's part of the sum of the group's bytes of token 8 m + g
    float total[S::tiles][S::token_tiles][4] = {};
    float scale[S::tiles][2] = {};
    int zero[S::tiles][2] = {};

    PTQ_DEVICE IntegerSums(const Weights& w_, Range range, int tile)
        : w(w_), first_half(2 * range.first), scales(w_, first_half, tile), next(scales) {}
    PTQ_DEVICE void prepare(int tile) { next = Scales<S>(w, first_half, tile); }
    // The rows that were prepared for.
    PTQ_DEVICE void begin() {
        scales = next;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            sum[r][m][i] = 0;
            total[r][m][i] = 0;
        }
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) scale[r][0] = scale[r][1] = 0;  // one that is no number stays behind
    }
    // The sum of the group, without the zeros.
    PTQ_DEVICE void settle() {
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
            for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
            for (int i = 0; i < 4; i++) sum[r][m][i] -= zero[r][i / 2] * of_column[i % 2];
            bytes[m] = 0;
        }
    }
    PTQ_DEVICE void flush() {
        settle();
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            total[r][m][i] = add(total[r][m][i], cuda::multiply(scale[r][i / 2], static_cast<float>(sum[r][m][i])));
            sum[r][m][i] = 0;
        }
    }
    PTQ_DEVICE void enter() {
        flush();
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int second = 0; second < 2; second++) {
            scale[r][second] = scales.number(r, second);
            zero[r][second] = scales.zero[r][second];
        }
        scales.advance();
    }
    PTQ_DEVICE void step(int block, const uint32_t (&stored)[S::tiles][S::words], const uint8_t* tokens) {
        const Words<S> words(stored);
        PTQ_UNROLL
        for (int h = 0; h < 2; h++) {
            if (scales.enters(block, h)) enter();
            uint32_t b[S::token_tiles][2];
            PTQ_UNROLL
            for (int m = 0; m < S::token_tiles; m++) {
                const Words2 v = load<Words2>(tokens + 8 * m * Buffers<S, 1>::row_bytes + half_columns * h);
                PTQ_UNROLL
                for (int u = 0; u < 2; u++) {
                    b[m][u] = byte_permute(v.word[u], 0, 0x3120);  // columns 0, 2, 1, 3, as the codes come
                    bytes[m] = dp4a(v.word[u], 0x01010101u, bytes[m]);
                }
            }
            PTQ_UNROLL
            for (int r = 0; r < S::tiles; r++) {
                uint32_t a[4];
                PTQ_UNROLL
                for (int j = 0; j < 4; j++) a[j] = Code::bytes(words.of[r], 2 * h + j / 2, j % 2);
                PTQ_UNROLL
                for (int m = 0; m < S::token_tiles; m++) mma_u8s8(sum[r][m], a, b[m][0], b[m][1]);
            }
        }
    }
};

// y = total * (q_scale * of_values) (+ bias), to its place.
PTQ_DEVICE void write_quantized(const Quantized& p, float total, float of_values, int row, int token) {
    if (row >= p.w.n || token >= p.tokens) return;
    float y = cuda::multiply(total, cuda::multiply(p.q_scale[token], of_values));
    if (p.bias_kind != Number::none) y = add(y, number_at(p.bias, p.bias_kind, row));
    store_number(p.out, p.out_kind, static_cast<int64_t>(token) * p.w.n + row, y);
}

// The scale of a row that is one group.
PTQ_DEVICE float row_scale(const Weights& w, int row) {
    return row < w.n ? widen(Bfloat16{w.scale[row]}) : 0;
}

template <class S>
PTQ_KERNEL(S::threads, S::resident)
void quantized_kernel(const Quantized p) {
    const int across = warp() % S::across, along = warp() / S::across, groups = groups_of_rows<S>(p.w);
    const BlockWork work = work_of<S>(p.tokens);
    const auto tile_of = [&](int rows) { return (rows * S::across + across) * S::tiles; };
    const Range range = range_of<S>(p.w.k, along, S::along);
    prefetch_weights<S>(p.w, range, tile_of(work.rows));
    IntegerSums<S> sums(p.w, range, tile_of(work.rows));
    const TokenRows<int8_t> tokens{p.q + static_cast<int64_t>(work.first_token) * p.w.k, work.count,
                                   kept_rows<S>(p.tokens), p.aligned, p.buffers};
    Feed<S, int8_t> feed(p.w.fragments, p.w.n, p.w.k, tokens, tile_of(work.rows), along, shared());
    follow_previous();
    feed.begin();
    uint8_t* rooms = shared() + p.buffers * Buffers<S, 1>::token_bytes(tokens.rows);
    constexpr float of_values = 1.0f / (1 << S::Code::shift);
    int turn = 0;
    for (int rows = work.rows; rows < groups; rows += p.blocks) {
        feed.run(sums, S::roams && rows + p.blocks < groups ? tile_of(rows + p.blocks) : -1);
        const auto row_of = [&](int a, int r, int row) {
            return tile_rows * ((rows * S::across + a) * S::tiles + r) + row;
        };
        if (p.w.groups == 1) {  // integers can be added in any order
            sums.settle();
            hand_over<S, 1>(sums.sum, rooms, turn++, [&](int a, int r, int row, int token, int32_t sum) {
                row = row_of(a, r, row);
                const float total = cuda::multiply(row_scale(p.w, row), static_cast<float>(sum));
                write_quantized(p, total, of_values, row, work.first_token + token);
            });
        } else {
            sums.flush();
            hand_over<S, 1>(sums.total, rooms, turn++, [&](int a, int r, int row, int token, float sum) {
                write_quantized(p, sum, of_values, row_of(a, r, row), work.first_token + token);
            });
        }
        if constexpr (!S::roams) return;
        sums.begin();
    }
}

}  // namespace ptq::fragments
