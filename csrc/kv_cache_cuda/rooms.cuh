// What decode attention (attend.cuh, decode.cuh, plain.cuh, merge.cuh) is given, and what a block of threads of
// attend.cuh keeps in shared memory. No torch here.
#pragma once

#include "kv_cache_cuda/layout.cuh"

namespace ptq::kv_cache_cuda {

constexpr int rows_at_once = 8, attend_warps = 8, warp_blocks = chunk_blocks / attend_warps;
constexpr int weight_row = chunk + 16;  // numbers: rows of weights begin in different banks
constexpr float none = -__builtin_inff();

// Channels of values at once: what the registers hold.
PTQ_BOTH constexpr int segment_of(int bits) {
    return bits < 4 ? 256 : 128;
}

struct Attend {
    const void* q;  // [heads, rows, d]: a row is a query head of the group and a query token, the token innermost
    Number q_kind;
    int parts;  // bfloat16 numbers whose sum a query, or a weight, is
    Side k, v;
    const uint8_t* mask;                   // [batch or 1, tokens, length], 0: hidden; or null
    int64_t mask_batch;                    // 0 where all rows of the batch share one mask
    const int64_t* starts;                 // [batch], or null: no sinks
    const float *sink_keys, *sink_values;  // [heads, sinks, d]
    float* partial;                        // what softmax_of and sums_of say, work_numbers() in all
    void* out;                             // [batch, tokens, q heads, d]
    Number out_kind;
    int kv_heads, groups, tokens, sinks, length;
    int splits;  // of the context: as many blocks of threads share it, and merge_kernel adds up what they find
    float scaling;
    int64_t* stored;  // or null; that number counts what the cache holds, and `tokens` more are there now

    PTQ_BOTH int rows() const { return groups * tokens; }
    PTQ_BOTH int row_blocks() const { return (rows() + rows_at_once - 1) / rows_at_once; }
    PTQ_BOTH int chunks() const { return (length + chunk - 1) / chunk; }
    PTQ_BOTH int sum_row() const { return (v.d + 3) / 4 * 4; }
    PTQ_BOTH int64_t work_numbers() const { return int64_t{k.heads} * splits * rows() * (sum_row() + 2); }
    // The largest score of a row in one split, and the sum of its weights.
    PTQ_BOTH float* softmax_of(int head, int row, int split) const {
        const int64_t sums = int64_t{k.heads} * splits * rows() * sum_row();
        return partial + sums + ((static_cast<int64_t>(head) * rows() + row) * splits + split) * 2;
    }
    // Weighted sum of the values [d]; anything where the row sees nothing.
    PTQ_BOTH float* sums_of(int head, int row, int split) const {
        return partial + ((static_cast<int64_t>(head) * splits + split) * rows() + row) * sum_row();
    }
    // Where a row's result begins in `out`.
    PTQ_BOTH int64_t out_of(int head, int row) const {
        const int q_head = head % kv_heads * groups + row / tokens;
        return ((static_cast<int64_t>(head / kv_heads) * tokens + row % tokens) * kv_heads * groups + q_head) * v.d;
    }
    // Pairs of channels of a query in shared memory: whole steps of four words of the wide plane.
    PTQ_BOTH int query_pairs() const {
        const int fields = 32 / wide_plane(k.bits);
        return (k.d + 4 * fields - 1) / (4 * fields) * 2 * fields;
    }
    PTQ_BOTH int query_row() const { return query_pairs() + 4; }  // padded: rows begin in different banks
    PTQ_BOTH int width() const { return v.d < segment_of(v.bits) ? v.d : segment_of(v.bits); }
    PTQ_BOTH int query_bytes() const { return parts * rows_at_once * query_row() * 4; }
    PTQ_BOTH int weight_bytes() const { return parts * rows_at_once * weight_row * 2; }
    // Queries, and later sums of values in their place.
    PTQ_BOTH int first_bytes() const {
        const int sums = attend_warps / 2 * rows_at_once * width() * 4;
        return query_bytes() > sums ? query_bytes() : sums;
    }
    PTQ_BOTH int shared_bytes() const { return first_bytes() + weight_bytes() + rows_at_once * (chunk + 2) * 4; }
};

// What attend_kernel keeps in shared memory.
struct Rooms {
    uint32_t* queries;  // [parts, row, pairs]
    uint16_t* weights;  // [parts, row, token]: weight * scale of the value
    float* scores;      // [row, token], then weights
    float* sums;        // [row]: of the queries; then what the minima of the values add to every channel
    float* values;      // [attend_warps / 2, row, channel], where the queries were

    PTQ_DEVICE explicit Rooms(const Attend& p) {
        uint8_t* at = shared();
        queries = reinterpret_cast<uint32_t*>(at);
        values = reinterpret_cast<float*>(at);
        weights = reinterpret_cast<uint16_t*>(at += p.first_bytes());
        scores = reinterpret_cast<float*>(at += p.weight_bytes());
        sums = scores + rows_at_once * chunk;
    }
};

// By one thread of all, in a kernel that does not ask for the number.
PTQ_DEVICE void count_stored(const Attend& p) {
    if (p.stored && (block_x() | block_y() | block_z() | thread()) == 0) *p.stored += p.tokens;
}

// The rows of this block, from `first` on, `count` of them.
struct BlockRows {
    int first, count, head, index, tokens;  // tokens: of the chunk
    PTQ_DEVICE explicit BlockRows(const Attend& p) {
        first = block_z() * rows_at_once;
        count = p.rows() - first < rows_at_once ? p.rows() - first : rows_at_once;
        head = block_y();
        index = block_x();
        tokens = p.length - index * chunk < chunk ? p.length - index * chunk : chunk;
    }
    PTQ_DEVICE int64_t query(const Attend& p, int row) const {
        return (static_cast<int64_t>(head) * p.rows() + first + row) * p.k.d;
    }
};

// e^(x - largest), and 0 for what is not seen.
PTQ_DEVICE float softmax_weight(float x, float largest) {
    return exponential(x - (largest == none ? 0 : largest));
}

// The softmax of a warp as it goes along. Of rows 2 t and 2 t + 1: the largest score, and this lane's share of the sum
// of the weights.
struct Softmax {
    float largest[2] = {none, none}, weights[2] = {};

    // Scores to weights: score[i] is of token 2 g + i / 2 and row 2 t + i % 2. Earlier sums are to be multiplied by
    // `factor`, as the largest score is another one.
    PTQ_DEVICE void soften(float (&score)[4], float (&factor)[2]) {
        PTQ_UNROLL
        for (int j = 0; j < 2; j++) {
            float high = maximum(score[j], score[j + 2]);
            PTQ_UNROLL
            for (int mask = 4; mask < 32; mask *= 2) high = maximum(high, shuffle_xor(high, mask));
            high = maximum(largest[j], high);
            factor[j] = softmax_weight(largest[j], high);
            largest[j] = high;
            score[j] = softmax_weight(score[j], high);
            score[j + 2] = softmax_weight(score[j + 2], high);
            weights[j] = weights[j] * factor[j] + (score[j] + score[j + 2]);
        }
    }
    // To `to` [row, 3]: largest, weights, and the sum of what lanes have of `offset`, which belongs to every channel.
    PTQ_DEVICE void give(float* to, const float (&offset)[2]) const {
        PTQ_UNROLL
        for (int j = 0; j < 2; j++) {
            float weight = weights[j], more = offset[j];
            PTQ_UNROLL
            for (int mask = 4; mask < 32; mask *= 2) {
                weight += shuffle_xor(weight, mask);
                more += shuffle_xor(more, mask);
            }
            float* at = to + (2 * (lane() % 4) + j) * 3;
            if (lane() / 4 == 0) at[0] = largest[j], at[1] = weight, at[2] = more;
        }
    }
};

PTQ_DEVICE float sum_of_warp(float x) {
    PTQ_UNROLL
    for (int mask = 16; mask; mask /= 2) x += shuffle_xor(x, mask);
    return x;
}

// The sinks among the tokens of this chunk: sinks [first, last) are tokens at, at + 1, ...
struct Sinks {
    int first = 0, last = 0, at = 0;
    PTQ_DEVICE Sinks(const Attend& p, const BlockRows& rows) {
        if (!p.starts) return;
        const int64_t start = p.starts[rows.head / p.kv_heads] - static_cast<int64_t>(rows.index) * chunk;
        first = start >= 0 ? 0 : -start < p.sinks ? static_cast<int>(-start) : p.sinks;
        const int64_t end = rows.tokens - start;
        last = end < first ? first : end < p.sinks ? static_cast<int>(end) : p.sinks;
        at = last > first ? static_cast<int>(start) + first : 0;
    }
};

}  // namespace ptq::kv_cache_cuda
