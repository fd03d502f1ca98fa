// How packed weights and tokens reach a warp: the products of all formats share it. No torch here.
//
// A weight is cut into blocks of 16 rows and `columns` columns, of which each lane of a warp owns `words` words of 32
// bits: planes of 4, 2 and 1 words, the widest first, lane after lane. In memory: [row tiles, blocks, 128 words].
//
// A block of threads has `across` x `along` warps: each computes `tiles` tiles of 16 rows, and each of the `along`
// warps a stretch of the columns, in blocks, four of them ("steps") for each chunk of the tokens.
//   weights  no two warps read the same, so a lane loads its words straight into registers, four blocks ahead
//   tokens   two buffers of a chunk, shared by the block; the next chunk is copied while this one is used: the block's
//            only barrier, every fourth step
#pragma once

#include "cuda/device.h"

namespace ptq::cuda {

constexpr int tile_rows = 16;

// Width of the plane that begins at word (bit) `low` of `all`.
PTQ_BOTH constexpr int plane_width(int all, int low) {
    return all - low >= 4 ? 4 : all - low >= 2 ? 2 : 1;
}

// A lane's words of one block, out of shared memory, or `once` out of global memory. `from` is its part of the first
// plane.
template <class V, bool once>
PTQ_DEVICE V load_plane(const void* from) {
    if constexpr (once)
        return load_once<V>(from);
    else
        return load<V>(from);
}
template <int all, bool once = false, int low = 0>
PTQ_DEVICE void load_block(const uint8_t* from, uint32_t (&words)[all]) {
    constexpr int width = plane_width(all, low), first = plane_width(all, 0);
    const uint8_t* at = from + 128 * low + 4 * (width - first) * lane();
    if constexpr (width == 4) {
        const Words4 v = load_plane<Words4, once>(at);
        PTQ_UNROLL
        for (int i = 0; i < 4; i++) words[low + i] = v.word[i];
    } else if constexpr (width == 2) {
        const Words2 v = load_plane<Words2, once>(at);
        words[low] = v.word[0];
        words[low + 1] = v.word[1];
    } else {
        words[low] = load_plane<uint32_t, once>(at);
    }
    if constexpr (low + width < all) load_block<all, once, low + width>(from, words);
}
template <int all>
PTQ_DEVICE int lane_part() {
    return 4 * plane_width(all, 0) * lane();
}

template <int words_, int columns_, int token_tiles_, int tiles_, int across_, int along_>
struct StreamShape {
    static constexpr int words = words_, columns = columns_, token_tiles = token_tiles_;
    static constexpr int tiles = tiles_, across = across_, along = along_;
    static constexpr int steps = 4;               // also how many blocks a lane has in registers
    static constexpr int prefetched = 2 * steps;  // blocks
    static constexpr int tokens = 8 * token_tiles, threads = 32 * across * along;
    static constexpr int step_columns = steps * columns, chunk_columns = along * step_columns;
    static constexpr int rows = tile_rows * tiles * across;
    static constexpr int block_bytes = 128 * words;
};

// Tokens x[t, k] of `element` bytes; a row in shared memory is padded so that 8 rows reach different banks. With one
// tile of 8 tokens only as many rows are kept as there are: lanes of the other tokens multiply the first one, and
// nothing of theirs is written.
template <class S, int element>
struct Buffers {
    static constexpr int row_bytes = S::chunk_columns * element + (element == 1 ? 32 : 64);
    PTQ_BOTH static constexpr int token_bytes(int rows) { return rows * row_bytes; }
    // At the end sums change hands there (`add_along`).
    PTQ_BOTH static constexpr int bytes(int rows = S::tokens) {
        constexpr int sums = (S::along - 1) * S::across * S::tiles * S::token_tiles * 4 * 32 * 4;
        return 2 * token_bytes(rows) > sums ? 2 * token_bytes(rows) : sums;
    }
};

// The columns of part `part` of `parts` of a row, in blocks.
struct Range {
    int first, last;
};
template <class S>
PTQ_DEVICE Range range_of(int k, int part, int parts) {
    const int blocks = (k + S::columns - 1) / S::columns;
    return {blocks * part / parts, blocks * (part + 1) / parts};  // at most 2^14 blocks and 2^8 parts
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
    const uint8_t* from[S::tiles];  // of the next block, this lane's part
    int block, last;                // the next to multiply, the end
    uint32_t words[S::steps][S::tiles][S::words];

    PTQ_DEVICE Walk(const uint8_t* weights, int n, int k, Range range, int tile) {
        block = range.first;
        last = range.last;
        const int64_t blocks = (k + S::columns - 1) / S::columns;
        const int row_tiles = (n + tile_rows - 1) / tile_rows;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) {
            const int64_t t = tile + r < row_tiles ? tile + r : row_tiles - 1;
            from[r] = weights + (t * blocks + block) * S::block_bytes + lane_part<S::words>();
        }
        PTQ_UNROLL
        for (int i = 0; i < S::steps; i++) fetch(i, i);
    }
    // The block that is `ahead` blocks after the next one, as words of step `step`.
    PTQ_DEVICE void fetch(int step, int ahead) {
        if (block + ahead >= last) return;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) load_block<S::words, true>(from[r] + ahead * S::block_bytes, words[step][r]);
    }
    PTQ_DEVICE void advance() {
        block++;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) from[r] += S::block_bytes;
    }
};

// The whole walk. Made, it has asked for the first weights and tokens; then product.step(block, words, tokens) runs for
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
        : walk(weights, n, k_, range_of<S>(k_, tokens_.split * S::along + along_, tokens_.splits * S::along), tile),
          tokens(tokens_),
          k(k_),
          along(along_),
          memory(memory_) {
        copy_tokens<S>(tokens, k, 0, memory);
        copy_commit();
    }
    template <class Product>
    PTQ_DEVICE void run(Product& product) {
        const int chunks = (longest_range<S>(k, tokens.splits * S::along) + S::steps - 1) / S::steps;
        const int row = S::token_tiles > 1 || lane() / 4 < tokens.rows ? lane() / 4 : 0;
        int part = row * B::row_bytes + static_cast<int>(sizeof(X)) * (along * S::step_columns + 8 * (lane() % 4));
        keep(part);
        for (int chunk = 0; chunk < chunks; chunk++) {
            const uint8_t* at = memory + part + chunk % 2 * B::token_bytes(tokens.rows);
            copy_wait<0>();
            block_barrier();  // this chunk is there for all; the one before it is not used any more
            if (chunk + 1 < chunks) copy_tokens<S>(tokens, k, chunk + 1, memory);
            copy_commit();
            PTQ_UNROLL
            for (int s = 0; s < S::steps; s++) {
                if (walk.block < walk.last) {
                    product.step(walk.block, walk.words[s], at + s * S::columns * static_cast<int>(sizeof(X)));
                    walk.fetch(s, S::steps);  // behind it: into the same registers
                }
                walk.advance();
            }
        }
    }
};

}  // namespace ptq::cuda
