// The kernels of the packed KV cache as plain C++: no torch here. The layout is described in ptq/ops/kv_ops.py.
// Every level gives the same bits: sums of integers are exact, others have 16 lanes (tokens of a block) whatever the
// register width, and a fixed order.
#pragma once

#include <algorithm>
#include <cstdint>

namespace ptq::kv_cache {

constexpr int64_t chunk = 256, block_tokens = 16, blocks = chunk / block_tokens;
constexpr int64_t max_head_dim = 1024;  // a query is on the stack for a while

// Bits of the widest plane of codes: it has the lowest bits, a second plane the others, if there are any.
constexpr int widest_plane(int bits) {
    return bits == 3 ? 2 : bits == 6 ? 4 : bits;
}
// 32-bit words of one token and head.
inline int64_t words(int64_t d, int bits) {
    const int wide = widest_plane(bits);
    return (d * wide + 31) / 32 + (d * (bits - wide) + 31) / 32;
}

constexpr int64_t scale_bytes = 2 * chunk * sizeof(uint16_t);  // of a chunk of one head

// One side, keys or values, of the packed cache. `heads` counts over the batch: batch * heads of the model.
struct Side {
    uint32_t* codes;   // [chunks, heads, block, word, lane], or [chunks, heads, word, block, lane]
    uint16_t* scales;  // [chunks, heads, 2, chunk]: bits of bfloat16
    int64_t heads, d;
    int bits;
    bool channel_major;

    uint32_t* codes_of(int64_t index, int64_t head) const {
        return codes + (index * heads + head) * chunk * words(d, bits);
    }
    uint16_t* scales_of(int64_t index, int64_t head) const { return scales + (index * heads + head) * 2 * chunk; }
    // Of the codes of one head.
    int64_t block_words() const { return block_tokens * words(d, bits); }
    int64_t block_bytes() const { return block_words() * static_cast<int64_t>(sizeof *codes); }
};

struct Append {
    Side to;
    const float* x;        // [heads, count, d]
    int64_t start, count;  // tokens
    float clip;
    int64_t first_block() const { return start / block_tokens; }
    int64_t block_count() const { return (start + count + block_tokens - 1) / block_tokens - first_block(); }
};

struct Dequantize {
    Side from;
    float* out;  // [heads, length, d]
    int64_t length;
    int64_t block_count() const { return (length + block_tokens - 1) / block_tokens; }
};

struct Attend {
    const float* q;  // [heads, rows, d]: a row is a query head of the group and a query token, the token innermost
    Side k, v;
    const uint8_t* mask;                   // [batch or 1, tokens, length], 0: hidden; or null
    int64_t mask_batch;                    // elements between rows of the batch: 0 where all share one mask
    const int64_t* starts;                 // [batch], or null: no sinks
    const float *sink_keys, *sink_values;  // [heads, sinks, d]
    float* partial;                        // [heads, chunks, rows, partial_stride(d)]
    float* out;                            // [batch, tokens, q_heads, d]
    int64_t kv_heads, groups, tokens, sinks, length;
    float scaling;  // times log2(e): weights are powers of two
    int64_t rows() const { return groups * tokens; }
    int64_t chunks() const { return (length + chunk - 1) / chunk; }
    int64_t used_blocks(int64_t index) const {
        return (std::min(chunk, length - index * chunk) + block_tokens - 1) / block_tokens;
    }
};

// Sums of a chunk for one row: d channels in steps of 16, then the largest score and the sum of weights.
inline int64_t partial_width(int64_t d) {
    return (d + 15) / 16 * 16;
}
inline int64_t partial_stride(int64_t d) {
    return partial_width(d) + 16;
}

// Each works on units [first, last): a block of a head; a chunk of a head (`attend`); a row of a head (`merge`).
struct Kernels {
    void (*append)(const Append&, int64_t first, int64_t last);
    void (*dequantize)(const Dequantize&, int64_t first, int64_t last);
    void (*attend)(const Attend&, int64_t first, int64_t last);
    void (*merge)(const Attend&, int64_t first, int64_t last);
};

extern const Kernels portable, avx2, avx512, avx512vnni;

}  // namespace ptq::kv_cache
