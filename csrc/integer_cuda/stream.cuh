// How weights and tokens reach a warp: both products (linear.cuh, quantized.cuh) share it. No torch here.
//
// A block of threads has `across` x `along` warps: each computes `tiles` tiles of 16 rows; `along` warps share the
// columns. Columns go in chunks of along * steps blocks of 64, of which each warp has `steps` in a row.
//   weights  every warp has its own ring of `stages` blocks, filled by cp.async; each lane reads what it copied itself,
//            so that only the scales need the warp's barrier
//   tokens   two buffers of a chunk, shared by the block; the next chunk is copied while this one is used: the block's
//            only barrier. It needs steps >= stages - 1
#pragma once

#include "integer_cuda/fragments.cuh"

namespace ptq::integer_cuda {

template <int bits_, int token_tiles_, int tiles_, int across_, int along_, int stages_>
struct Shape {
    static constexpr int bits = bits_, token_tiles = token_tiles_, tiles = tiles_, across = across_, along = along_;
    static constexpr int stages = stages_, steps = 4;
    static_assert(steps >= stages - 1);
    static constexpr int tokens = 8 * token_tiles, threads = 32 * across * along;
    static constexpr int chunk_blocks = along * steps, chunk_columns = chunk_blocks * block_columns;
    static constexpr int rows = tile_rows * tiles * across;
    static constexpr int scale_bytes = 96;  // of a block: the scales of two halves, 2 x 16 x 2; zeros 2 x 16
    static constexpr int stage_bytes = tiles * (block_bytes(bits) + scale_bytes);
};

// Tokens x[t, k] of `element` bytes; a row in shared memory is padded so that 8 rows reach different banks.
template <class S, int element>
struct Buffers {
    static constexpr int row_bytes = S::chunk_columns * element + (element == 1 ? 32 : 64);
    static constexpr int token_bytes = S::tokens * row_bytes;
    static constexpr int ring_bytes = S::across * S::along * S::stages * S::stage_bytes;
    static constexpr int bytes = 2 * token_bytes + ring_bytes;
};

struct Range {
    int first, last;  // blocks of 64 columns
};
PTQ_DEVICE Range range_of(int k, int split, int splits) {
    const int blocks = (k + block_columns - 1) / block_columns;
    return {static_cast<int>(static_cast<int64_t>(blocks) * split / splits),
            static_cast<int>(static_cast<int64_t>(blocks) * (split + 1) / splits)};
}

// Copies chunk c of `count` tokens into its buffer; zeros beyond column k.
template <class S, class X>
PTQ_DEVICE void copy_tokens(const X* x, int k, int count, bool aligned, int first_block, int chunk, uint8_t* buffers) {
    using B = Buffers<S, sizeof(X)>;
    constexpr int each = 16 / sizeof(X), units = S::chunk_columns / each;
    uint8_t* to = buffers + (chunk % 2) * B::token_bytes;
    const int first = (first_block + chunk * S::chunk_blocks) * block_columns;
    for (int u = thread(); u < count * units; u += S::threads) {
        const int row = u / units, column = first + u % units * each;
        X* at = reinterpret_cast<X*>(to + row * B::row_bytes) + u % units * each;
        const X* from = x + static_cast<int64_t>(row) * k + column;
        if (aligned && column + each <= k) {
            copy_async<16>(at, from);
        } else {
            PTQ_UNROLL
            for (int i = 0; i < each; i++) at[i] = column + i < k ? from[i] : X{};
        }
    }
}

// One warp's walk through its blocks. Numbering: iteration i is the i-th block of this warp.
template <class S>
struct Walk {
    const Weights& w;
    Range range;
    int tile, along, row_tiles;  // the warp's first row tile; which of the warps that share columns
    uint8_t* ring;

    PTQ_DEVICE int block(int i) const {
        return range.first + i / S::steps * S::chunk_blocks + along * S::steps + i % S::steps;
    }
    PTQ_DEVICE int chunks() const { return (range.last - range.first + S::chunk_blocks - 1) / S::chunk_blocks; }
    PTQ_DEVICE const uint8_t* stage(int i, int r) const {
        return ring + (i % S::stages) * S::stage_bytes + r * (block_bytes(S::bits) + S::scale_bytes);
    }
    PTQ_DEVICE bool there(int i, int r) const { return block(i) < range.last && tile + r < row_tiles; }

    PTQ_DEVICE void copy(int i) const {
        const int b = block(i), blocks = (w.k + block_columns - 1) / block_columns;
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) {
            if (!there(i, r)) continue;
            uint8_t* to = const_cast<uint8_t*>(stage(i, r));
            copy_block<S::bits>(to, w.fragments + (static_cast<int64_t>(tile + r) * blocks + b) * block_bytes(S::bits));
            to += block_bytes(S::bits);
            const int half = lane() < 4 ? lane() / 2 : lane() % 2;
            const int64_t group = static_cast<int64_t>(tile + r) * w.groups + group_of(w, 2 * b + half);
            if (lane() < 4) copy_async<16>(to + 16 * lane(), w.scale + 16 * group + 8 * (lane() % 2));
            if (w.zero && (lane() == 4 || lane() == 5)) copy_async<16>(to + 64 + 16 * half, w.zero + 16 * group);
        }
    }
    // Of the group of half h: row g (second = 0) or g + 8.
    PTQ_DEVICE float scale(int i, int r, int h, int second) const {
        const uint8_t* at = stage(i, r) + block_bytes(S::bits) + 32 * h;
        return widen(load<Bfloat16>(at + 2 * (lane() / 4 + 8 * second)));
    }
    PTQ_DEVICE int zero(int i, int r, int h, int second) const {
        if (!w.zero) return 1 << (S::bits - 1);
        return stage(i, r)[block_bytes(S::bits) + 64 + 16 * h + lane() / 4 + 8 * second];
    }
};

}  // namespace ptq::integer_cuda
