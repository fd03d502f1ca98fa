// How packed weights and tokens reach a warp: the products of all formats share it. No torch here.
//
// A weight is cut into blocks of 16 rows and `columns` columns, of which each lane of a warp owns `words` words of 32
// bits: planes of 4, 2 and 1 words, the widest first, lane after lane. In memory: [row tiles, blocks, 128 words].
//
// A block of threads has `across` x `along` warps: each computes `tiles` tiles of 16 rows, and each of the `along`
// warps a stretch of the columns, in blocks, four of them ("steps") for each chunk of the tokens. When it is done with
// its rows, it may go on with others, and the weights of those are already on their way.
//   weights  no two warps read the same, so a lane loads its words straight into registers, four blocks ahead
//   tokens   all of them in shared memory, where there is room; else two buffers of a chunk: the next chunk is copied
//            while this one is used
#pragma once

#include "cuda/device.h"

namespace ptq::cuda {

constexpr int tile_rows = 16;

// Width of the plane that begins at word (bit) `low` of `all`.
PTQ_BOTH constexpr int plane_width(int all, int low) {
    return all - low >= 4 ? 4 : all - low >= 2 ? 2 : 1;
}

// A lane's words of one block, out of shared memory, or `once` out of global memory, where they are wanted. `from` is
// its part of the first plane.
template <bool once, class V>
PTQ_DEVICE void load_plane(V& v, const void* from, bool wanted) {
    if constexpr (once)
        load_once(v, from, wanted);
    else
        v = load<V>(from);
}
template <int all, bool once = false, int low = 0>
PTQ_DEVICE void load_block(const uint8_t* from, uint32_t (&words)[all], bool wanted = true) {
    constexpr int width = plane_width(all, low), first = plane_width(all, 0);
    const uint8_t* at = from + 128 * low + 4 * (width - first) * lane();
    if constexpr (width == 4) {
        Words4 v{{words[low], words[low + 1], words[low + 2], words[low + 3]}};
        load_plane<once>(v, at, wanted);
        PTQ_UNROLL
        for (int i = 0; i < 4; i++) words[low + i] = v.word[i];
    } else if constexpr (width == 2) {
        Words2 v{{words[low], words[low + 1]}};
        load_plane<once>(v, at, wanted);
        words[low] = v.word[0];
        words[low + 1] = v.word[1];
    } else {
        load_plane<once>(words[low], at, wanted);
    }
    if constexpr (low + width < all) load_block<all, once, low + width>(from, words, wanted);
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
    static constexpr bool roams = token_tiles <= 2;  // whether products of fragments go on with other rows
    // Blocks of threads on a processor, for which registers must do: sums and totals, words that are ahead, the rest.
    static constexpr int registers = 8 * tiles * token_tiles + 5 * tiles * words + 64;
    static constexpr int resident = 65536 / registers < 2 * threads ? 1 : 65536 / registers / threads;
    static constexpr int step_columns = steps * columns, chunk_columns = along * step_columns;
    static constexpr int rows = tile_rows * tiles * across;
    static constexpr int block_bytes = 128 * words;
    static constexpr int sums = across * tiles * token_tiles * 128;  // of a warp along the columns
};

// Tokens x[t, k] of `element` bytes; a row in shared memory is padded so that 8 rows reach different banks. With one
// tile of 8 tokens only as many rows are kept as there are: lanes of the other tokens multiply the first one, and
// nothing of theirs is written. Behind the buffers sums change hands, in two rooms by turns where a block of threads
// may have many rows.
template <class S, int element>
struct Buffers {
    static constexpr int row_bytes = S::chunk_columns * element + (element == 1 ? 32 : 64);
    static constexpr int sums_bytes = S::along > 1 ? 4 * S::along * S::sums : 0;
    static constexpr int rooms = S::roams ? 2 : 1;
    PTQ_BOTH static constexpr int token_bytes(int rows) { return rows * row_bytes; }
    PTQ_BOTH static constexpr int bytes(int rows = S::tokens, int buffers = 2) {
        return buffers * token_bytes(rows) + rooms * sums_bytes;
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
// Chunks of the tokens that every warp goes through.
template <class S>
PTQ_BOTH int chunks_of(int k, int splits) {
    const int blocks = (k + S::columns - 1) / S::columns, parts = splits * S::along;
    return ((blocks + parts - 1) / parts + S::steps - 1) / S::steps;
}

// `count` tokens of k numbers, of which `rows` are kept (S::tokens, or for one tile of 8 as many as there are in any
// block). `aligned`: x and its rows are multiples of 16 bytes. The columns are split over `splits` blocks of threads.
template <class X>
struct TokenRows {
    const X* x;
    int count, rows;
    bool aligned;
    int buffers;  // 2, or as many as there are chunks: then all of them stay
    int split = 0, splits = 1;
};

// Copies a chunk into a buffer: for each warp along the columns its next four blocks; zeros beyond column k.
template <class S, class X>
PTQ_DEVICE void copy_tokens(const TokenRows<X>& t, int k, int chunk, uint8_t* to) {
    using B = Buffers<S, sizeof(X)>;
    constexpr int each = 16 / sizeof(X), units = S::step_columns / each, row_units = S::along * units;
    static_assert(S::threads % row_units == 0);  // a thread copies the same columns of several tokens
    const int along = thread() / units % S::along, unit = thread() % units;
    const Range range = range_of<S>(k, t.split * S::along + along, t.splits * S::along);
    const int column = range.first * S::columns + chunk * S::step_columns + unit * each;
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

// What one warp asks for: the blocks of a chunk. Row tiles beyond the last one are read as the last one; nothing of
// them is written.
template <class S>
struct Walk {
    const uint8_t* from[S::tiles];  // of the first block, this lane's part
    int left = 0;                   // blocks from it on
    uint32_t words[S::steps][S::tiles][S::words] = {};

    PTQ_DEVICE void begin(const uint8_t* weights, int n, int k, Range range, int tile) {
        left = range.last - range.first;
        const int64_t blocks = (k + S::columns - 1) / S::columns;
        const int row_tiles = (n + tile_rows - 1) / tile_rows;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) {
            const int64_t t = tile + r < row_tiles ? tile + r : row_tiles - 1;
            from[r] = weights + (t * blocks + range.first) * S::block_bytes + lane_part<S::words>();
        }
    }
    PTQ_DEVICE void fetch(int step) {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++)
            load_block<S::words, true>(from[r] + step * S::block_bytes, words[step][r], step < left);
    }
    PTQ_DEVICE void advance() {
        left -= S::steps;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) from[r] += S::steps * S::block_bytes;
    }
};

// The whole way. Made, it has asked for the first weights, `begin` for tokens. run(product, next): product.step(block,
// words, tokens) for every block of this warp's columns, where `tokens` is the lane's part of the first 8 tokens: row
// g, columns 8 t; meanwhile it asks for the weights of row tile `next`, and calls product.prepare(next), unless that is
// negative.
template <class S, class X>
struct Feed {
    using B = Buffers<S, sizeof(X)>;
    Walk<S> walk;
    const TokenRows<X>& tokens;
    const uint8_t* const weights;
    const int n, k, chunks;
    const Range range;
    uint8_t* const memory;
    int part, turn = 0;  // this lane's part of the tokens; buffers that were used

    PTQ_DEVICE Feed(const uint8_t* weights_, int n_, int k_, const TokenRows<X>& tokens_, int tile, int along,
                    uint8_t* memory_)
        : tokens(tokens_),
          weights(weights_),
          n(n_),
          k(k_),
          chunks(chunks_of<S>(k_, tokens_.splits)),
          range(range_of<S>(k_, tokens_.split * S::along + along, tokens_.splits * S::along)),
          memory(memory_) {
        walk.begin(weights, n, k, range, tile);
        PTQ_UNROLL
        for (int s = 0; s < S::steps; s++) walk.fetch(s);
        const int row = S::token_tiles > 1 || lane() / 4 < tokens.rows ? lane() / 4 : 0;
        part = row * B::row_bytes + static_cast<int>(sizeof(X)) * (along * S::step_columns + 8 * (lane() % 4));
        keep(part);
    }
    PTQ_DEVICE void begin() {
        for (int i = 0; i < (stays() ? chunks : 1); i++) copy_tokens<S>(tokens, k, i, buffer(i));
        copy_commit();
    }
    PTQ_DEVICE bool stays() const { return tokens.buffers >= chunks; }
    PTQ_DEVICE uint8_t* buffer(int i) const { return memory + i * B::token_bytes(tokens.rows); }
    // Where the tokens of a chunk are, once they are there for all; the chunk after it is on its way.
    PTQ_DEVICE const uint8_t* arrived(int chunk, bool more) {
        if (stays() && turn >= 1) return buffer(chunk);
        copy_wait<0>();
        block_barrier();
        turn++;
        if (stays()) return buffer(chunk);
        if (more) copy_tokens<S>(tokens, k, chunk + 1 < chunks ? chunk + 1 : 0, buffer(turn % 2));
        copy_commit();
        return buffer((turn - 1) % 2);
    }
    template <class Product>
    PTQ_DEVICE void run(Product& product, int next) {
        int block = range.first;
        for (int chunk = 0; chunk < chunks; chunk++) {
            const bool last = chunk + 1 == chunks;
            const uint8_t* at = arrived(chunk, !last || next >= 0) + part;
            if (!last) {
                walk.advance();
            } else if (next >= 0) {
                walk.begin(weights, n, k, range, next);
                product.prepare(next);
            } else {
                walk.left = 0;
            }
            PTQ_UNROLL
            for (int s = 0; s < S::steps; s++) {
                if (block < range.last)
                    product.step(block, walk.words[s], at + s * S::columns * static_cast<int>(sizeof(X)));
                walk.fetch(s);  // behind it: into the same registers
                block++;
            }
        }
    }
};

// Adds up what the warps along the columns have, in their order, and gives every sum to write(across, r, row, token,
// sum): of row `row` of tile r. `rooms` are those behind the tokens, `turn` says which.
template <class S, int element, class N, class Write>
PTQ_DEVICE void hand_over(const N (&numbers)[S::tiles][S::token_tiles][4], uint8_t* rooms, int turn, Write write) {
    const auto row_of = [](int i, int lane) { return lane / 4 + 8 * (i / 2); };
    const auto token_of = [](int m, int i, int lane) { return 8 * m + 2 * (lane % 4) + i % 2; };
    if constexpr (S::along == 1) {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
        for (int i = 0; i < 4; i++)
            write(warp() % S::across, r, row_of(i, lane()), token_of(m, i, lane()), numbers[r][m][i]);
        return;
    }
    N* room = reinterpret_cast<N*>(rooms + turn % Buffers<S, element>::rooms * Buffers<S, element>::sums_bytes);
    N* mine = room + warp() / S::across * S::sums + warp() % S::across * (S::sums / S::across) + lane();
    PTQ_UNROLL
    for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
    for (int m = 0; m < S::token_tiles; m++) PTQ_UNROLL
    for (int i = 0; i < 4; i++) mine[32 * ((r * S::token_tiles + m) * 4 + i)] = numbers[r][m][i];
    block_barrier();
    for (int u = thread(); u < S::sums; u += S::threads) {
        N sum = room[u];
        PTQ_UNROLL
        for (int other = 1; other < S::along; other++) sum += room[other * S::sums + u];
        const int i = u / 32 % 4, m = u / 128 % S::token_tiles, r = u / 128 / S::token_tiles % S::tiles;
        write(u / 128 / S::token_tiles / S::tiles, r, row_of(i, u % 32), token_of(m, i, u % 32), sum);
    }
}

}  // namespace ptq::cuda
