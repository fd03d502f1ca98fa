// Decode attention over keys and values as they are, in float16 or bfloat16: otherwise as decode.cuh, and merged by the
// same kernel. A warp loads keys and values of its next 16 tokens straight into registers, while it works on these. No
// torch here.
//
// Lanes are 4 g + t. On the tensor cores,
//   keys    operand A: tokens 2 g (row g) and 2 g + 1 (row g + 8); 16 channels are two pairs of words of every lane,
//           who has channels 32 s + 8 t .. + 7; B: queries, by the same channels
//   values  operand A: the two channels of a word (rows g and g + 8), tokens 4 t and 4 t + 2, then 4 t + 1 and 4 t + 3;
//           a lane has channels 64 s + 8 g .. + 7; B: the weights, which is what the scores' sums are, transposed
#pragma once

#include "kv_cache_cuda/decode.cuh"

namespace ptq::kv_cache_cuda {

struct Plain {
    Attend attend;              // k and v: their heads and d alone
    const void *keys, *values;  // [batch, kv heads, tokens, d], the channels side by side, tokens d apart
    int64_t batch_stride, head_stride;
};

template <class T, int most_d>
struct PlainFound : Softmax {
    static constexpr int key_steps = most_d / 32, value_steps = most_d / 64, row_numbers = most_d + 2;
    static constexpr int at_once = value_steps < 2 ? value_steps : 2;  // of values: as registers do for
    static constexpr int room_numbers = rows_at_once * (row_numbers + 3);
    Words4 key[key_steps][2], value[at_once][4];
    float sum[value_steps][4][4] = {};  // [..][word][i]: row 2 t + i % 2, lower (i < 2) or upper channel of the word

    PTQ_DEVICE static Words4 load_there(const T* row, bool is_there, int c, int d) {
        return is_there && c < d ? load<Words4>(row + c) : Words4{};
    }
    // A lane keeps its part of them in shared memory, to where it alone writes and reads.
    PTQ_DEVICE static uint8_t* query(uint8_t* room, int s) { return room + (s * 32 + lane()) * 16; }
    PTQ_DEVICE static void keep_queries(const Attend& p, const BlockRows& rows, uint8_t* room) {
        const int row = lane() / 4;
        const T* from = static_cast<const T*>(p.q) + (row < rows.count ? rows.query(p, row) : 0);
        PTQ_UNROLL
        for (int s = 0; s < key_steps; s++)
            store(query(room, s), load_there(from, row < rows.count, 32 * s + 8 * (lane() % 4), p.k.d));
    }
    // `head`: where keys, or values, of this head begin.
    PTQ_DEVICE void load_keys(const Attend& p, const T* head, int block) {
        PTQ_UNROLL
        for (int j = 0; j < 2; j++) {
            const int token = block * block_tokens + 2 * (lane() / 4) + j;
            PTQ_UNROLL
            for (int s = 0; s < key_steps; s++)
                key[s][j] = load_there(head + static_cast<int64_t>(token) * p.k.d, token < p.length,
                                       32 * s + 8 * (lane() % 4), p.k.d);
        }
    }
    PTQ_DEVICE void load_values(const Attend& p, const T* head, int block, int first = 0) {
        PTQ_UNROLL
        for (int j = 0; j < 4; j++) {
            const int token = block * block_tokens + 4 * (lane() % 4) + j;
            PTQ_UNROLL
            for (int s = 0; s < at_once; s++)
                value[s][j] = load_there(head + static_cast<int64_t>(token) * p.v.d, token < p.length,
                                         64 * (first + s) + 8 * (lane() / 4), p.v.d);
        }
    }

    // Weights of the tokens whose keys are loaded, as operand B; `factor` as in Softmax.
    PTQ_DEVICE void score(uint8_t* room, uint32_t seen, float scaling, uint32_t (&weight)[2], float (&factor)[2]) {
        float two[2][4] = {};  // as one they would wait for each other
        PTQ_UNROLL
        for (int s = 0; s < key_steps; s++) {
            const Words4 q = load<Words4>(query(room, s));
            PTQ_UNROLL
            for (int u = 0; u < 2; u++) {
                const uint32_t a[4] = {key[s][0].word[2 * u], key[s][1].word[2 * u], key[s][0].word[2 * u + 1],
                                       key[s][1].word[2 * u + 1]};
                mma<T>(two[u], a, q.word[2 * u], q.word[2 * u + 1]);
            }
        }
        float x[4];
        PTQ_UNROLL
        for (int i = 0; i < 4; i++) x[i] = seen >> i & 1 ? scaling * (two[0][i] + two[1][i]) : none;
        soften(x, factor);
        PTQ_UNROLL
        for (int j = 0; j < 2; j++) weight[j] = transpose(pack<T>(x[2 * j], x[2 * j + 1]));
    }
    // The tensor cores cut sums off, so that long ones of theirs would drift: those of a block are added here.
    template <int first>
    PTQ_DEVICE void multiply_values(const uint32_t (&weight)[2], const float (&factor)[2]) {
        PTQ_UNROLL
        for (int s = 0; s < at_once; s++) PTQ_UNROLL
        for (int w = 0; w < 4; w++) {
            uint32_t a[4];
            PTQ_UNROLL
            for (int i = 0; i < 4; i++)
                a[i] = byte_permute(value[s][i / 2].word[w], value[s][i / 2 + 2].word[w], i % 2 ? 0x7632 : 0x5410);
            float product[4] = {};
            mma<T>(product, a, weight[0], weight[1]);
            PTQ_UNROLL
            for (int i = 0; i < 4; i++) sum[first + s][w][i] = sum[first + s][w][i] * factor[i % 2] + product[i];
        }
    }
    // To `room` [row, channel], and behind it what Softmax gives.
    PTQ_DEVICE void give(float* room) const {
        PTQ_UNROLL
        for (int s = 0; s < value_steps; s++) PTQ_UNROLL
        for (int w = 0; w < 4; w++) PTQ_UNROLL
        for (int j = 0; j < 2; j++)
            store(room + (2 * (lane() % 4) + j) * row_numbers + 64 * s + 8 * (lane() / 4) + 2 * w,
                  Words2{bits_of(sum[s][w][j]), bits_of(sum[s][w][j + 2])});
        Softmax::give(room + rows_at_once * row_numbers, {0.0f, 0.0f});
    }
};

template <class T, int most_d>
PTQ_BOTH constexpr int plain_shared() {
    return decode_warps * PlainFound<T, most_d>::room_numbers * 4;
}

// block_x counts splits of the context, block_y heads, block_z eight rows each.
template <class T, int most_d>
PTQ_KERNEL(32 * decode_warps, most_d == 256 ? 2 : 3)
void plain_kernel(const Plain all) {
    follow_previous();
    using F = PlainFound<T, most_d>;
    const Attend& p = all.attend;
    count_stored(p);
    const BlockRows rows(p);
    const int64_t head = rows.head / p.kv_heads * all.batch_stride + rows.head % p.kv_heads * all.head_stride;
    const T *keys = static_cast<const T*>(all.keys) + head, *values = static_cast<const T*>(all.values) + head;
    Blocks blocks;
    F found;
    Blocks::Next now = blocks.next(p, rows);
    if (now.block >= 0) {
        found.load_keys(p, keys, now.block);
        found.load_values(p, values, now.block);
    }
    float* room = reinterpret_cast<float*>(shared()) + warp() * F::room_numbers;
    uint8_t* queries = reinterpret_cast<uint8_t*>(room);  // until sums take their place
    static_assert(F::key_steps * 32 * 16 <= F::room_numbers * 4 && F::room_numbers % 4 == 0);
    F::keep_queries(p, rows, queries);
    while (now.block >= 0) {
        uint32_t weight[2];
        float factor[2];
        found.score(queries, now.seen, p.scaling, weight, factor);
        const Blocks::Next next = blocks.next(p, rows);
        if (next.block >= 0) found.load_keys(p, keys, next.block);
        found.template multiply_values<0>(weight, factor);
        if constexpr (F::value_steps > F::at_once) {
            found.load_values(p, values, now.block, F::at_once);
            found.template multiply_values<F::at_once>(weight, factor);
        }
        if (next.block >= 0) found.load_values(p, values, next.block);
        now = next;
    }
    warp_barrier();
    found.give(room);
    block_barrier();
    finish<T>(p, rows, reinterpret_cast<const float*>(shared()), F::room_numbers, F::row_numbers);
}

}  // namespace ptq::kv_cache_cuda
