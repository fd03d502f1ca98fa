// How weights and tokens reach a warp: both products (linear.cuh, quantized.cuh) share it. No torch here.
//
// A block of threads has `across` x `along` warps: each computes `tiles` tiles of 16 rows, and each of the `along`
// warps a stretch of the columns, in blocks of 64, four blocks ("steps") for each chunk of the tokens.
//   weights  every warp has its own ring of `stages` blocks, filled by cp.async; a lane reads only what it copied
//            itself, so no barrier is needed
//   scales   of the next group are loaded into registers while this one is multiplied
//   tokens   two buffers of a chunk, shared by the block; the next chunk is copied while this one is used: the block's
//            only barrier, every fourth step. It needs steps >= stages - 1
#pragma once

#include "integer_cuda/fragments.cuh"

namespace ptq::integer_cuda {

template <int bits_, int token_tiles_, int tiles_, int across_, int along_>
struct Shape {
    static constexpr int bits = bits_, token_tiles = token_tiles_, tiles = tiles_, across = across_, along = along_;
    static constexpr int stages = 4, steps = 4;  // equal: a step's place in the ring is known to the compiler
    static constexpr int tokens = 8 * token_tiles, threads = 32 * across * along;
    static constexpr int step_columns = steps * block_columns, chunk_columns = along * step_columns;
    static constexpr int rows = tile_rows * tiles * across;
    static constexpr int stage_bytes = tiles * block_bytes(bits);
};

// Tokens x[t, k] of `element` bytes; a row in shared memory is padded so that 8 rows reach different banks.
template <class S, int element>
struct Buffers {
    static constexpr int row_bytes = S::chunk_columns * element + (element == 1 ? 32 : 64);
    static constexpr int token_bytes = S::tokens * row_bytes;
    static constexpr int ring_bytes = S::across * S::along * S::stages * S::stage_bytes;
    static constexpr int bytes = 2 * token_bytes + ring_bytes;
};

// The columns of part `part` of `parts` of a row, in blocks of 64.
struct Range {
    int first, last;
};
PTQ_DEVICE Range range_of(int k, int part, int parts) {
    const int blocks = (k + block_columns - 1) / block_columns;
    return {static_cast<int>(static_cast<int64_t>(blocks) * part / parts),
            static_cast<int>(static_cast<int64_t>(blocks) * (part + 1) / parts)};
}
PTQ_DEVICE int longest_range(int k, int parts) {
    return ((k + block_columns - 1) / block_columns + parts - 1) / parts;
}

// Zeros for the tokens that are not there, in both buffers.
template <class S, int element>
PTQ_DEVICE void clear_tokens(int count, uint8_t* buffers) {
    using B = Buffers<S, element>;
    constexpr int units = B::row_bytes / 16;
    for (int u = thread(); u < (S::tokens - count) * units; u += S::threads) {
        store<Words4>(buffers + (count + u / units) * B::row_bytes + u % units * 16, {});
        store<Words4>(buffers + B::token_bytes + (count + u / units) * B::row_bytes + u % units * 16, {});
    }
}
// Copies chunk c of `count` tokens into its buffer: for each warp along the columns its next four blocks; zeros beyond
// column k.
template <class S, class X>
PTQ_DEVICE void copy_tokens(const X* x, int k, int count, bool aligned, int split, int splits, int chunk,
                            uint8_t* buffers) {
    using B = Buffers<S, sizeof(X)>;
    constexpr int each = 16 / sizeof(X), units = S::step_columns / each;
    uint8_t* to = buffers + (chunk % 2) * B::token_bytes;
    PTQ_UNROLL
    for (int along = 0; along < S::along; along++) {
        const Range range = range_of(k, split * S::along + along, splits * S::along);
        const int first = range.first * block_columns + chunk * S::step_columns;
        for (int u = thread(); u < count * units; u += S::threads) {
            const int row = u / units, column = first + u % units * each;
            X* at = reinterpret_cast<X*>(to + row * B::row_bytes) + along * S::step_columns + u % units * each;
            const X* from = x + static_cast<int64_t>(row) * k + column;
            if (aligned && column + each <= k) {
                copy_async<16>(at, from);
            } else {
                PTQ_UNROLL
                for (int i = 0; i < each; i++) at[i] = column + i < k ? from[i] : X{};
            }
        }
    }
}

// One warp's way through its blocks of 64 columns. Row tiles beyond the last one are read as the last one; nothing of
// them is written.
template <class S>
struct Walk {
    const uint8_t* from[S::tiles];  // of the next block to copy, this lane's part
    uint8_t* ring;
    int block, last;  // the next to multiply, the end

    PTQ_DEVICE Walk(const Weights& w, Range range, int tile, uint8_t* ring_) {
        ring = ring_;
        block = range.first;
        last = range.last;
        const int64_t blocks = (w.k + block_columns - 1) / block_columns;
        const int row_tiles = (w.n + tile_rows - 1) / tile_rows;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) {
            const int64_t t = tile + r < row_tiles ? tile + r : row_tiles - 1;
            from[r] = w.fragments + (t * blocks + block) * block_bytes(S::bits) + 4 * plane_width(S::bits, 0) * lane();
        }
    }
    // The block that is `ahead` blocks after the next one, into place `stage` of the ring.
    PTQ_DEVICE void copy(int stage, int ahead) {
        if (block + ahead < last) {
            PTQ_UNROLL
            for (int r = 0; r < S::tiles; r++) {
                copy_block<S::bits>(ring + stage * S::stage_bytes + r * block_bytes(S::bits), from[r]);
                from[r] += block_bytes(S::bits);
            }
        }
        copy_commit();
    }
    PTQ_DEVICE void load_words(int stage, uint32_t (&words)[S::tiles][S::bits]) const {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++)
            load_block<S::bits>(ring + stage * S::stage_bytes + r * block_bytes(S::bits), words[r]);
    }
};

// Scales and zeros of rows g and g + 8, a group ahead.
template <class S>
struct Scales {
    const uint16_t* scale_from;
    const uint8_t* zero_from;  // or null
    int at[S::tiles];          // of row g of the group that was loaded
    int left;                  // groups from that one on
    int begins;                // its first half of 32 columns
    int halves;
    uint32_t scale[S::tiles][2];  // bits of float32
    int zero[S::tiles][2];

    PTQ_DEVICE Scales(const Weights& w, int first_half, int tile) {
        scale_from = w.scale;
        zero_from = w.zero;
        halves = w.halves;
        int group = first_half / halves;
        group = group < w.groups ? group : w.groups - 1;
        left = w.groups - group;
        begins = group * halves;
        const int row_tiles = (w.n + tile_rows - 1) / tile_rows;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) {
            const int t = tile + r < row_tiles ? tile + r : row_tiles - 1;
            at[r] = (t * w.groups + group) * tile_rows + lane() / 4;
            zero[r][0] = zero[r][1] = 1 << (S::bits - 1);
        }
        fetch();
    }
    PTQ_DEVICE void fetch() {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int second = 0; second < 2; second++)
            scale[r][second] = static_cast<uint32_t>(scale_from[at[r] + 8 * second]) << 16;
        if (!zero_from) return;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int second = 0; second < 2; second++) zero[r][second] = zero_from[at[r] + 8 * second];
    }
    // Whether half `half` begins the group that was loaded. Beyond the last group there are only zero columns.
    PTQ_DEVICE bool enters(int half) const { return half >= begins; }
    // After its scales and zeros were taken: the next one.
    PTQ_DEVICE void advance() {
        constexpr int never = 0x7fffffff;
        begins = --left ? begins + halves : never;
        if (left == 0) return;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) at[r] += tile_rows;
        fetch();
    }
};

// The whole walk: product.step(stage, block, tokens) for every block of this warp's columns. `tokens` is the lane's
// part of the first 8 tokens: row g, columns 8 t.
template <class S, class X, class Product>
PTQ_DEVICE void stream(const Weights& w, const X* x, int count, bool aligned, int split, int splits, int tile,
                       int along, uint8_t* memory, Product& product) {
    using B = Buffers<S, sizeof(X)>;
    const Range range = range_of(w.k, split * S::along + along, splits * S::along);
    Walk<S> walk(w, range, tile, memory + 2 * B::token_bytes + warp() * S::stages * S::stage_bytes);
    const int chunks = (longest_range(w.k, splits * S::along) + S::steps - 1) / S::steps;
    copy_tokens<S>(x, w.k, count, aligned, split, splits, 0, memory);
    PTQ_UNROLL
    for (int i = 0; i < S::stages - 1; i++) walk.copy(i, i);
    clear_tokens<S, sizeof(X)>(count, memory);
    int part = lane() / 4 * B::row_bytes + static_cast<int>(sizeof(X)) * (along * S::step_columns + 8 * (lane() % 4));
    keep(part);
    for (int chunk = 0; chunk < chunks; chunk++) {
        const uint8_t* tokens = memory + part + chunk % 2 * B::token_bytes;
        PTQ_UNROLL
        for (int s = 0; s < S::steps; s++) {
            copy_wait<S::stages - 2>();
            if (s == 0) {
                block_barrier();  // this chunk is there for all; the one before it is not used any more
                if (chunk + 1 < chunks) copy_tokens<S>(x, w.k, count, aligned, split, splits, chunk + 1, memory);
            }
            walk.copy((s + S::stages - 1) % S::stages, S::stages - 1);
            if (walk.block < walk.last) product.step(walk, s, tokens + s * block_columns * static_cast<int>(sizeof(X)));
            walk.block++;
        }
    }
    copy_wait<0>();
}

}  // namespace ptq::integer_cuda
