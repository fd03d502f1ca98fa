// Tokens of 4 bits times fragments of 4 bits, for the tensor cores of compute capability 8.x, which multiply such
// numbers directly (mma.m16n8k64, signed; twice the rate of bytes). Symmetric weights, whole blocks of 64 columns in a
// group: otherwise, and on Hopper, which has no such unit, quantized.cuh does it. The numbers are the same but for the
// order in which groups are added. No torch here.
//
// Tokens are packed first: q[tokens, k] to [tokens, blocks of 64 columns, 32 bytes]. The 8 bytes of t are the words of
// h = 0 and h = 1, each with the columns that lane t multiplies (weights.cuh), as nibbles come together from two words
// of codes: nibble 2 i + u is column 32 h + 8 t + 4 u + (0, 2, 1, 3)[i].
// So a block is walked as 32 columns of one byte.
#pragma once

#include "fragments_cuda/quantized.cuh"

namespace ptq::fragments {

constexpr int packed_columns = block_columns / 2;  // bytes of a block
inline int64_t packed_bytes(int tokens, int k) {
    return int64_t{tokens} * ((k + block_columns - 1) / block_columns) * packed_columns;
}

// Two words of codes or bytes: the even nibbles of both, or the odd ones.
PTQ_DEVICE uint32_t even_nibbles(uint32_t first, uint32_t second) {
    return (first & 0x0f0f0f0fu) | (second << 4 & 0xf0f0f0f0u);
}
PTQ_DEVICE uint32_t odd_nibbles(uint32_t first, uint32_t second) {
    return (first >> 4 & 0x0f0f0f0fu) | (second & 0xf0f0f0f0u);
}

struct PackTokens {
    const int8_t* q;  // [tokens, k], -8 to 7
    uint32_t* to;
    int tokens, k;
};
constexpr int pack_threads = 256;

// A thread makes one word.
PTQ_KERNEL(pack_threads, 4)
static void pack_tokens_kernel(const PackTokens p) {
    follow_previous();
    const int blocks = (p.k + block_columns - 1) / block_columns;
    const int64_t i = static_cast<int64_t>(block_x()) * pack_threads + thread();
    if (i >= static_cast<int64_t>(p.tokens) * blocks * 8) return;
    const int64_t token = i / (8 * blocks);
    const int word = static_cast<int>(i % (8 * blocks)), h = word % 2, t = word / 2 % 4;
    const int first = word / 8 * block_columns + half_columns * h + 8 * t;
    const int8_t* q = p.q + token * p.k;
    uint32_t both[2];
    PTQ_UNROLL
    for (int u = 0; u < 2; u++) {
        uint32_t bytes = 0;
        PTQ_UNROLL
        for (int e = 0; e < 4; e++) {
            const int column = first + 4 * u + e;
            bytes |= static_cast<uint32_t>(static_cast<uint8_t>(column < p.k ? q[column] : 0)) << (8 * e);
        }
        both[u] = byte_permute(bytes, 0, 0x3120);  // columns 0, 2, 1, 3
    }
    p.to[i] = even_nibbles(both[0], both[1]);
}

// 8 tokens at a time, 32 rows of a warp: `tiles` tiles of 16.
template <class Code_>
struct NarrowShape : StreamShape<Code_::bits, packed_columns, 8, 2, 4, 1> {
    using Code = Code_;
};

template <class S>
struct NarrowSums {
    Scales<S> scales;
    int32_t sum[S::tiles][S::token_tiles][4] = {};
    float total[S::tiles][S::token_tiles][4] = {};
    float scale[S::tiles][2] = {};

    PTQ_DEVICE void flush() {
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
        for (int second = 0; second < 2; second++) scale[r][second] = scales.number(r, second);
        scales.advance();
    }
    PTQ_DEVICE void prepare(int) {}
    // `tokens` is the lane's part: row g, bytes 8 t.
    PTQ_DEVICE void step(int block, const uint32_t (&stored)[S::tiles][S::words], const uint8_t* tokens) {
        if (scales.enters(2 * block)) enter();
        constexpr uint32_t middle = 0x88888888u;  // code - 8 as four signed bits
        uint32_t a[S::tiles][4];
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int h = 0; h < 2; h++) {
            a[r][2 * h] = even_nibbles(stored[r][2 * h], stored[r][2 * h + 1]) ^ middle;
            a[r][2 * h + 1] = odd_nibbles(stored[r][2 * h], stored[r][2 * h + 1]) ^ middle;
        }
        PTQ_UNROLL
        for (int m = 0; m < S::token_tiles; m++) {
            const Words2 b = load<Words2>(tokens + 8 * m * Buffers<S, 1>::row_bytes);
            PTQ_UNROLL
            for (int r = 0; r < S::tiles; r++) mma_s4(sum[r][m], a[r], b.word[0], b.word[1]);
        }
    }
};

// p.q are packed tokens, p.w.k columns of weights.
template <class S>
PTQ_KERNEL(S::threads, 1)
void narrow_kernel(const Quantized p) {
    follow_previous();
    const BlockWork work = work_of<S>(p.tokens);
    const int k = (p.w.k + block_columns - 1) / block_columns * packed_columns,
              tile = (work.rows * S::across + warp()) * S::tiles;
    NarrowSums<S> sums{Scales<S>(p.w, 0, tile)};
    const TokenRows<int8_t> tokens{p.q + static_cast<int64_t>(work.first_token) * k, work.count, S::tokens, true, 2};
    Feed<S, int8_t> feed(p.w.fragments, p.w.n, k, tokens, tile, 0, shared());
    feed.begin();
    feed.run(sums, -1);
    sums.flush();
    PTQ_UNROLL
    for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
    for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
    for (int i = 0; i < 4; i++)
        write_quantized(p, sums.total[r][m][i], 1, tile_rows * (tile + r) + lane() / 4 + 8 * (i / 2),
                        work.first_token + 8 * m + 2 * (lane() % 4) + i % 2);
}

// Whether a weight can be multiplied so.
inline bool is_narrow(const Weights& w) {
    return w.k > 0 && !w.zero && (w.groups == 1 || w.halves % 2 == 0);
}
template <class Code>
const char* launch_narrow(const Quantized& p, uint32_t* packed, Stream stream) {
    using S = NarrowShape<Code>;
    const int64_t words = packed_bytes(p.tokens, p.w.k) / 4;
    const PackTokens pack{p.q, packed, p.tokens, p.w.k};
    const char* error = launch<pack_tokens_kernel>({static_cast<unsigned>((words + pack_threads - 1) / pack_threads)},
                                                   pack_threads, 0, stream, pack);
    if (error) return error;
    Quantized q = p;
    q.q = reinterpret_cast<const int8_t*>(packed);
    return launch<narrow_kernel<S>>(grid_of<S>(p.w, p.tokens, 1), S::threads, Buffers<S, 1>::bytes(), stream, q);
}

}  // namespace ptq::fragments
