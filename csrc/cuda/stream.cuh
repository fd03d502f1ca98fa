// How packed weights and tokens reach a warp: the products of all formats share it. No torch here.
//
// A weight is cut into blocks of 16 rows and `columns` columns, of which each lane of a warp owns `words` words of 32
// bits: planes of 4, 2 and 1 words, the widest first, lane after lane. In memory: [row tiles, blocks, 128 words].
//
// A block of threads has `across` x `along` warps: each computes `tiles` tiles of 16 rows, and each of the `along`
// warps a stretch of the columns, in blocks, four of them ("steps") for each chunk of the tokens.
//   weights  every warp has its own ring of `stages` blocks, filled by cp.async; a lane reads only what it copied
//            itself, so no barrier is needed
//   tokens   two buffers of a chunk, shared by the block; the next chunk is copied while this one is used: the block's
//            only barrier, every fourth step. It needs steps >= stages - 1
#pragma once

#include "cuda/device.h"

namespace ptq::cuda {

constexpr int tile_rows = 16;

// Width of the plane that begins at word (bit) `low` of `all`.
PTQ_BOTH constexpr int plane_width(int all, int low) {
    return all - low >= 4 ? 4 : all - low >= 2 ? 2 : 1;
}

// One block: its planes into shared memory, and a lane's words out of it. `from` is this lane's part of the first
// plane.
template <int all, int low = 0>
PTQ_DEVICE void copy_block(uint8_t* to, const uint8_t* from) {
    constexpr int width = plane_width(all, low), first = plane_width(all, 0);
    copy_async<4 * width>(to + 128 * low + 4 * width * lane(), from + 128 * low + 4 * (width - first) * lane());
    if constexpr (low + width < all) copy_block<all, low + width>(to, from);
}
template <int all, int low = 0>
PTQ_DEVICE void load_block(const uint8_t* from, uint32_t (&words)[all]) {
    constexpr int width = plane_width(all, low);
    const uint8_t* at = from + 128 * low + 4 * width * lane();
    if constexpr (width == 4) {
        const Words4 v = load<Words4>(at);
        PTQ_UNROLL
        for (int i = 0; i < 4; i++) words[low + i] = v.word[i];
    } else if constexpr (width == 2) {
        const Words2 v = load<Words2>(at);
        words[low] = v.word[0];
        words[low + 1] = v.word[1];
    } else {
        words[low] = load<uint32_t>(at);
    }
    if constexpr (low + width < all) load_block<all, low + width>(from, words);
}

template <int words_, int columns_, int token_tiles_, int tiles_, int across_, int along_>
struct StreamShape {
    static constexpr int words = words_, columns = columns_, token_tiles = token_tiles_;
    static constexpr int tiles = tiles_, across = across_, along = along_;
    static constexpr int stages = 4, steps = 4;  // equal: a step's place in the ring is known to the compiler
    static constexpr int tokens = 8 * token_tiles, threads = 32 * across * along;
    static constexpr int step_columns = steps * columns, chunk_columns = along * step_columns;
    static constexpr int rows = tile_rows * tiles * across;
    static constexpr int block_bytes = 128 * words, stage_bytes = tiles * block_bytes;
    static constexpr int ring_bytes = across * along * stages * stage_bytes;
};

// Tokens x[t, k] of `element` bytes; a row in shared memory is padded so that 8 rows reach different banks. With one
// tile of 8 tokens only as many rows are kept as there are: lanes of the other tokens multiply the first one, and
// nothing of theirs is written.
template <class S, int element>
struct Buffers {
    static constexpr int row_bytes = S::chunk_columns * element + (element == 1 ? 32 : 64);
    PTQ_BOTH static constexpr int token_bytes(int rows) { return rows * row_bytes; }
    PTQ_BOTH static constexpr int bytes(int rows = S::tokens) { return 2 * token_bytes(rows) + S::ring_bytes; }
};

// The columns of part `part` of `parts` of a row, in blocks.
struct Range {
    int first, last;
};
template <class S>
PTQ_DEVICE Range range_of(int k, int part, int parts) {
    const int blocks = (k + S::columns - 1) / S::columns;
    return {static_cast<int>(static_cast<int64_t>(blocks) * part / parts),
            static_cast<int>(static_cast<int64_t>(blocks) * (part + 1) / parts)};
}
template <class S>
PTQ_DEVICE int longest_range(int k, int parts) {
    return ((k + S::columns - 1) / S::columns + parts - 1) / parts;
}

// `count` tokens of k numbers, of which `rows` are kept (S::tokens, or for one tile of 8 as many as there are in any
// block). `aligned`: x and its rows are multiples of 16 bytes. The columns are split over `splits` blocks of threads.
template <class X>
struct TokenRows {
    const X* x;
    int count, rows;
    bool aligned;
    int split = 0, splits = 1;
};

// Copies chunk c into its buffer: for each warp along the columns its next four blocks; zeros beyond column k.
template <class S, class X>
PTQ_DEVICE void copy_tokens(const TokenRows<X>& t, int k, int chunk, uint8_t* buffers) {
    using B = Buffers<S, sizeof(X)>;
    constexpr int each = 16 / sizeof(X), units = S::step_columns / each, row_units = S::along * units;
    static_assert(S::threads % row_units == 0);  // a thread copies the same columns of several tokens
    const int along = thread() / units % S::along, unit = thread() % units;
    const Range range = range_of<S>(k, t.split * S::along + along, t.splits * S::along);
    const int column = range.first * S::columns + chunk * S::step_columns + unit * each;
    uint8_t* to = buffers + (chunk % 2) * B::token_bytes(t.rows);
    for (int row = thread() / row_units; row < t.count; row += S::threads / row_units) {
        X* at = reinterpret_cast<X*>(to + row * B::row_bytes) + along * S::step_columns + unit * each;
        const X* from = t.x + static_cast<int64_t>(row) * k + column;
        if (t.aligned && column + each <= k) {
            copy_async<16>(at, from);
        } else {
            PTQ_UNROLL
            for (int i = 0; i < each; i++) at[i] = column + i < k ? from[i] : X{};
        }
    }
}

// One warp's way through its blocks. Row tiles beyond the last one are read as the last one; nothing of them is
// written.
template <class S>
struct Walk {
    const uint8_t* from[S::tiles];  // of the next block to copy, this lane's part
    uint8_t* ring;
    int block, last;  // the next to multiply, the end

    PTQ_DEVICE Walk(const uint8_t* weights, int n, int k, Range range, int tile, uint8_t* ring_) {
        ring = ring_;
        block = range.first;
        last = range.last;
        const int64_t blocks = (k + S::columns - 1) / S::columns;
        const int row_tiles = (n + tile_rows - 1) / tile_rows;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) {
            const int64_t t = tile + r < row_tiles ? tile + r : row_tiles - 1;
            from[r] = weights + (t * blocks + block) * S::block_bytes + 4 * plane_width(S::words, 0) * lane();
        }
    }
    // The block that is `ahead` blocks after the next one, into place `stage` of the ring.
    PTQ_DEVICE void copy(int stage, int ahead) {
        if (block + ahead < last) {
            PTQ_UNROLL
            for (int r = 0; r < S::tiles; r++) {
                copy_block<S::words>(ring + stage * S::stage_bytes + r * S::block_bytes, from[r]);
                from[r] += S::block_bytes;
            }
        }
        copy_commit();
    }
    PTQ_DEVICE void load_words(int stage, uint32_t (&words)[S::tiles][S::words]) const {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++)
            load_block<S::words>(ring + stage * S::stage_bytes + r * S::block_bytes, words[r]);
    }
};

// The whole walk. Made, it has asked for the first weights and tokens; then product.step(walk, stage, tokens) runs for
// every block of this warp's columns. `tokens` is the lane's part of the first 8 tokens: row g, columns 8 t.
template <class S, class X>
struct Feed {
    using B = Buffers<S, sizeof(X)>;
    Walk<S> walk;
    const TokenRows<X>& tokens;
    const int k, along;
    uint8_t* memory;

    PTQ_DEVICE Feed(const uint8_t* weights, int n, int k_, const TokenRows<X>& tokens_, int tile, int along_,
                    uint8_t* memory_)
        : walk(weights, n, k_, range_of<S>(k_, tokens_.split * S::along + along_, tokens_.splits * S::along), tile,
               memory_ + 2 * B::token_bytes(tokens_.rows) + warp() * S::stages * S::stage_bytes),
          tokens(tokens_),
          k(k_),
          along(along_),
          memory(memory_) {
        copy_tokens<S>(tokens, k, 0, memory);
        PTQ_UNROLL
        for (int i = 0; i < S::stages - 1; i++) walk.copy(i, i);
    }
    template <class Product>
    PTQ_DEVICE void run(Product& product) {
        const int chunks = (longest_range<S>(k, tokens.splits * S::along) + S::steps - 1) / S::steps;
        const int row = S::token_tiles > 1 || lane() / 4 < tokens.rows ? lane() / 4 : 0;
        int part = row * B::row_bytes + static_cast<int>(sizeof(X)) * (along * S::step_columns + 8 * (lane() % 4));
        keep(part);
        for (int chunk = 0; chunk < chunks; chunk++) {
            const uint8_t* at = memory + part + chunk % 2 * B::token_bytes(tokens.rows);
            PTQ_UNROLL
            for (int s = 0; s < S::steps; s++) {
                copy_wait<S::stages - 2>();
                if (s == 0) {
                    block_barrier();  // this chunk is there for all; the one before it is not used any more
                    if (chunk + 1 < chunks) copy_tokens<S>(tokens, k, chunk + 1, memory);
                }
                walk.copy((s + S::stages - 1) % S::stages, S::stages - 1);
                if (walk.block < walk.last) product.step(walk, s, at + s * S::columns * static_cast<int>(sizeof(X)));
                walk.block++;
            }
        }
        copy_wait<0>();
    }
};

}  // namespace ptq::cuda
