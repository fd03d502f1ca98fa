// Quantised tokens times fragments, to the bit as quarot/tiled_ops.py and fp6/tiled_ops.py define it: per group an
// exact integer sum on the tensor cores (unsigned bytes times signed ones, minus the zero times the sum of the signed
// ones); in float32, each operation rounded, group after group: acc = acc + scale * sum; y = acc * (q_scale 2^-shift)
// (+ bias). No torch here.
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
    bool aligned;  // q and k are multiples of 16
};

// Groups must be added in their order, so one warp has all columns of its rows. Only where a row is one group may warps
// share the columns, since integers can be added in any order.
template <class S>
struct IntegerSums {
    using Code = typename S::Code;
    Scales<S> scales;
    int32_t sum[S::tiles][S::token_tiles][4] = {};
    int32_t bytes[S::token_tiles] = {};  // this lane's part of the sum of the group's bytes of token 8 m + g
    float total[S::tiles][S::token_tiles][4] = {};
    float scale[S::tiles][2] = {};
    int zero[S::tiles][2] = {};

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
    PTQ_DEVICE void take_scales() {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int second = 0; second < 2; second++) {
            scale[r][second] = scales.number(r, second);
            zero[r][second] = scales.zero[r][second];
        }
    }
    PTQ_DEVICE void enter() {
        flush();
        take_scales();
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

template <class S>
PTQ_KERNEL(S::threads, 1)
void quantized_kernel(const Quantized p) {
    const int across = warp() % S::across, along = warp() / S::across;
    const Place place = place_of<S>(p.tokens);
    const int tile = (place.rows * S::across + across) * S::tiles;
    const Range range = range_of<S>(p.w.k, along, S::along);
    prefetch_weights<S>(p.w, range, tile);
    follow_previous();
    IntegerSums<S> sums{Scales<S>(p.w, 2 * range.first, tile)};
    const TokenRows<int8_t> tokens{p.q + static_cast<int64_t>(place.first_token) * p.w.k, place.count,
                                   kept_rows<S>(p.tokens), p.aligned};
    Feed<S, int8_t>(p.w.fragments, p.w.n, p.w.k, tokens, tile, along, shared()).run(sums);
    if (S::along > 1 && p.w.groups == 1) {  // the scale is still the one that was loaded, also without columns
        sums.settle();
        if (!add_along<S>(sums.sum, across, along)) return;
        sums.take_scales();
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) sums.zero[r][0] = sums.zero[r][1] = 0;
        sums.flush();
    } else {
        sums.flush();
        if (!add_along<S>(sums.total, across, along)) return;
    }
    PTQ_UNROLL
    for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
    for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
    for (int i = 0; i < 4; i++)
        write_quantized(p, sums.total[r][m][i], 1.0f / (1 << S::Code::shift),
                        tile_rows * (tile + r) + lane() / 4 + 8 * (i / 2),
                        place.first_token + 8 * m + 2 * (lane() % 4) + i % 2);
}

}  // namespace ptq::fragments
