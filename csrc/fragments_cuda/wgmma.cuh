// Many tokens times fragments on the tensor cores of compute capability 9.0: the weights are decoded into registers,
// which are operand A of wgmma, while earlier products still run; tokens (wgmma_tokens.cuh) are operand B, in shared
// memory. No torch here.
//
// A block of threads has eight warps that multiply, in two warpgroups, and a warpgroup that feeds them, and leaves them
// its registers: one of its warps asks for the tokens and weights of a stage by bulk copies, four stages ahead. A stage
// has two barriers: `full`, on which the bytes arrive, and `empty`, on which the warps arrive that have used them. Each
// warp multiplies `tiles` tiles of 16 rows, one in each wgmma, with 128 tokens.
#pragma once

#include "cuda/numbers.cuh"
#include "fragments_cuda/wgmma_tokens.cuh"

namespace ptq::fragments {

// `grouped`: there may be more than one group of scales.
template <class Code_, class X_, int tiles_, bool grouped_>
struct WgmmaShape {
    using Code = Code_;
    using X = X_;
    static constexpr int tiles = tiles_, across = 8, threads = 32 * (across + 4), stages = 4;
    static constexpr bool grouped = grouped_;
    static constexpr int tokens = wgmma_tokens, rows = tile_rows * tiles * across;
    static constexpr int columns = stage_columns<X>, blocks = columns / block_columns;  // of a stage
    static constexpr int block_bytes = fragments::block_bytes(Code::bits);
    static constexpr int stage_bytes = wgmma_tile_bytes + tiles * across * blocks * block_bytes;
    static constexpr int shared_bytes = swizzle_bytes + stages * stage_bytes + 2 * stages * 8;
    static_assert(stage_bytes % swizzle_bytes == 0);
};
// Groups must be whole batches (see WgmmaWalk).
template <class X>
bool suits_wgmma(const Weights& w) {
    return w.k > 0 && (w.groups == 1 || sizeof(X) == 2 || w.halves % 2 == 0);
}

// Shared memory of a block.
template <class S>
struct Stages {
    uint8_t* memory;

    PTQ_DEVICE Stages() {
        uint32_t ahead = (swizzle_bytes - shared_offset(shared()) % swizzle_bytes) % swizzle_bytes;
        keep(ahead);  // who makes another one later has it computed again
        memory = shared() + ahead;
    }
    PTQ_DEVICE uint8_t* tokens(int i) const { return memory + i % S::stages * S::stage_bytes; }
    PTQ_DEVICE uint8_t* weights(int i) const { return tokens(i) + wgmma_tile_bytes; }
    PTQ_DEVICE Barrier* full(int i) const {
        return reinterpret_cast<Barrier*>(memory + S::stages * S::stage_bytes) + i % S::stages;
    }
    PTQ_DEVICE Barrier* empty(int i) const { return full(i) + S::stages; }
    PTQ_DEVICE void prepare() const {
        if (thread() == 0) {
            PTQ_UNROLL
            for (int i = 0; i < S::stages; i++) {
                barrier_init(full(i), 1);
                barrier_init(empty(i), S::across);
            }
            barriers_ready();
        }
        block_barrier();
    }
};

// By one warp: stages `range` of the token tile, and their blocks of the row tiles from `first_tile` on: a lane for
// each row tile and one for the tokens, since one alone would take longer to ask than the products take. Row tiles
// beyond the last one are read as the last one; nothing of them is written.
template <class S>
PTQ_DEVICE void feed(const Stages<S>& stages, const Weights& w, const uint8_t* tokens, Range range, int first_tile) {
    constexpr int row_tiles = S::across * S::tiles;
    static_assert(row_tiles < 32);
    const int blocks = (w.k + block_columns - 1) / block_columns, last = (w.n + tile_rows - 1) / tile_rows - 1;
    const int r = lane(), tile = first_tile + r < last ? first_tile + r : last;
    const bool has_tokens = r == row_tiles;
    const uint8_t* from =
        has_tokens ? tokens + static_cast<int64_t>(range.first) * wgmma_tile_bytes
                   : w.fragments + (static_cast<int64_t>(tile) * blocks + range.first * S::blocks) * S::block_bytes;
    for (int i = 0; i < range.last - range.first; i++) {
        const int left = blocks - (range.first + i) * S::blocks;
        const int bytes = (left < S::blocks ? left : S::blocks) * S::block_bytes;
        if (i >= S::stages) barrier_wait(stages.empty(i), i / S::stages - 1 & 1);
        if (r == 0) barrier_expect(stages.full(i), wgmma_tile_bytes + row_tiles * bytes);
        warp_barrier();
        if (r <= row_tiles)
            copy_bulk(has_tokens ? stages.tokens(i) : stages.weights(i) + r * S::blocks * S::block_bytes, from,
                      has_tokens ? wgmma_tile_bytes : bytes, stages.full(i));
        from += has_tokens ? wgmma_tile_bytes : S::blocks * S::block_bytes;
    }
}

// What a warp does with its stages: two batches of each, of two wgmma for every row tile: 64 columns of one byte are a
// block, 32 of two bytes half a block. While a batch is multiplied, the next one is decoded. A Product brings
//   enters(batch)              whether a group of scales begins there; next_group() takes scales and zeros of it
//   decode<second>(words, r)   row tile r into the operands of the first or second batch
//   issue<second>(tokens)      the products of the batch, with the tokens of its stage
//   begin_group(), end_group() of sums; for the latter all products are done
template <class S, class Product>
struct WgmmaWalk {
    const Stages<S>& stages;
    Product& product;
    int first, count;  // batches

    PTQ_DEVICE void release(int j) const {  // batch j has been used, and with it maybe its stage
        if (j % 2 && lane() == 0) barrier_arrive(stages.empty(j / 2));
    }
    template <int second>
    PTQ_DEVICE void decode(int j) {
        const int i = j / 2;
        if (second == 0) barrier_wait(stages.full(i), i / S::stages & 1);
        const uint8_t* at = stages.weights(i) +
                            (warp() * S::tiles * S::blocks + (S::blocks > 1 ? second : 0)) * S::block_bytes +
                            lane_part<S::Code::bits>();
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) {
            uint32_t stored[S::Code::bits] = {}, words[S::Code::words];
            load_block<S::Code::bits>(at + r * S::blocks * S::block_bytes, stored);
            PTQ_UNROLL
            for (int v = 0; v < S::Code::bits; v++) words[v] = stored[v];
            S::Code::complete(words);
            product.template decode<second>(words, r);
        }
    }
    template <int second>
    PTQ_DEVICE void step(int j) {  // while the products of batch j - 1 run
        if (S::grouped && product.enters(first + j)) {
            product.next_group();
            decode<second>(j);
            wgmma_wait<0>();
            release(j - 1);
            product.end_group();
            product.begin_group();
            product.template issue<second>(stages.tokens(j / 2));
        } else {
            decode<second>(j);
            product.template issue<second>(stages.tokens(j / 2));
            wgmma_wait<1>();
            release(j - 1);
        }
    }
    PTQ_DEVICE void run() {
        product.next_group();
        product.begin_group();
        decode<0>(0);
        product.template issue<0>(stages.tokens(0));
        int j = 1;
        for (; j + 1 < count; j += 2) {
            step<1>(j);
            step<0>(j + 1);
        }
        if (j < count) step<1>(j);
        wgmma_wait<0>();
        product.end_group();
    }
};

// Numbers of one token and the 16 rows of a tile, where there are so many.
PTQ_DEVICE void store_rows(void* out, Number kind, const Weights& w, int token, int row, const float (&y)[tile_rows]) {
    const int64_t at = static_cast<int64_t>(token) * w.n + row;
    const bool aligned = reinterpret_cast<uintptr_t>(out) % 16 == 0 && w.n % 8 == 0;
    if (kind == Number::float32) store_numbers(static_cast<float*>(out) + at, w.n - row, aligned, y);
    if (kind == Number::float16) store_numbers(static_cast<Half*>(out) + at, w.n - row, aligned, y);
    if (kind == Number::bfloat16) store_numbers(static_cast<Bfloat16*>(out) + at, w.n - row, aligned, y);
}
// When all warps are done with the stages: results change hands through that memory, so that a lane has all rows of a
// token. write(r, token, y): 16 rows of row tile r.
template <class S, class Product, class Write>
PTQ_DEVICE void hand_out(const Product& product, Write write) {
    const Stages<S> stages;
    constexpr int pitch = tile_rows + 4, some = wgmma_tokens / 2;  // floats: 8 rows of 4 tokens in different banks
    static_assert(4 * pitch * some * S::across <= S::stages * S::stage_bytes);
    float* memory = reinterpret_cast<float*>(stages.memory) + warp() * pitch * some;
    block_barrier();
    PTQ_UNROLL
    for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
    for (int part = 0; part < 2; part++) {
        PTQ_UNROLL
        for (int m = 0; m < 8; m++) PTQ_UNROLL
        for (int i = 0; i < 4; i++)
            memory[(8 * m + 2 * (lane() % 4) + i % 2) * pitch + lane() / 4 + 8 * (i / 2)] =
                product.result(r, 8 * part + m, i);
        warp_barrier();
        for (int token = lane(); token < some; token += 32) {
            float y[tile_rows];
            PTQ_UNROLL
            for (int i = 0; i < tile_rows; i += 4) {
                const Floats4 v = load<Floats4>(memory + token * pitch + i);
                PTQ_UNROLL
                for (int j = 0; j < 4; j++) y[i + j] = v.number[j];
            }
            write(r, some * part + token, y);
        }
        warp_barrier();
    }
}

// By a warp that multiplies: its row tiles times the token tile, over the stages `range`.
template <class S, class Product>
PTQ_DEVICE void multiply(const Stages<S>& stages, const Weights& w, Range range, Product& product) {
    constexpr int each = S::columns / 2;
    const int batches = (w.k + each - 1) / each, last = 2 * range.last < batches ? 2 * range.last : batches;
    WgmmaWalk<S, Product>{stages, product, 2 * range.first, last - 2 * range.first}.run();
}

// What the two products have in common: the scales of a warp's rows g and g + 8, the sum of the group it is in and, of
// more than one group, their total. Derived is the product; it has combine(total, scale, sum)
// and product(sum, a, tokens, adds), which is one wgmma.
template <class S, class Sum, class Derived>
struct WgmmaSums {
    Scales<S> scales;
    Sum sum[S::tiles][16][4];  // begun by the first product of a group
    float total[S::grouped ? S::tiles : 1][16][4] = {};
    float scale[S::tiles][2] = {}, next_scale[S::tiles][2] = {};
    bool adds = false;  // to a sum that has begun
    uint32_t a[2][S::tiles][2][4];

    PTQ_DEVICE explicit WgmmaSums(const Scales<S>& first) : scales(first) {}
    PTQ_DEVICE bool enters(int batch) const { return scales.enters(S::blocks * batch); }
    // Takes the scales that were loaded; take_zero(r, second) the zeros beside them.
    template <class Take>
    PTQ_DEVICE void take_scales(Take take_zero) {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int second = 0; second < 2; second++) {
            next_scale[r][second] = scales.number(r, second);
            take_zero(r, second);
        }
        scales.advance();
    }
    // Reads of the sums stay behind the wait for them.
    PTQ_DEVICE void keep_sums() {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int m = 0; m < 16; m++) PTQ_UNROLL
        for (int i = 0; i < 4; i++) keep(sum[r][m][i]);
    }
    PTQ_DEVICE void begin_group() {
        PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int second = 0; second < 2; second++) scale[r][second] = next_scale[r][second];
        adds = false;
    }
    template <int second>
    PTQ_DEVICE void issue(const uint8_t* tokens) {
        wgmma_fence();
        PTQ_UNROLL
        for (int i = 0; i < 2; i++) {
            PTQ_UNROLL
            for (int r = 0; r < S::tiles; r++)
                Derived::product(sum[r], a[second][r][i], tile_descriptor(tokens, 2 * second + i), adds);
            adds = true;
        }
        wgmma_commit();
    }
    PTQ_DEVICE void end_group() {
        keep_sums();
        if constexpr (S::grouped) PTQ_UNROLL
        for (int r = 0; r < S::tiles; r++) PTQ_UNROLL
        for (int m = 0; m < 16; m++) PTQ_UNROLL
        for (int i = 0; i < 4; i++) total[r][m][i] = Derived::combine(total[r][m][i], scale[r][i / 2], sum[r][m][i]);
    }
    // After all columns: the total of row tile r, token tile m.
    PTQ_DEVICE float result(int r, int m, int i) const {
        if constexpr (S::grouped) return total[r][m][i];
        return Derived::combine(0, scale[r][i / 2], sum[r][m][i]);
    }
};

}  // namespace ptq::fragments
