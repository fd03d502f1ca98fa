// Decode attention where it must be fast: keys and values with the same bits, no sinks, float16 or bfloat16. A warp has
// eight query rows and 16 tokens at a time, for scores as for values, with a softmax of its own as it goes along; its
// codes are on their way some stages ahead (decode_stage.cuh). The warps of a block come together once, at the end, and
// the blocks of one head in merge_kernel: no atomics, the same bits every time. (Flash attention, arXiv 2205.14135.)
// No torch here.
//
// Lanes are 4 g + t. Products on the tensor cores are of codes, as bfloat16, exact and raised_by(bits), and
//   keys    operand A: tokens 2 g (row g) and 2 g + 1 (row g + 8), 16 channels; B: queries, by the same channels
//   values  operand A: channels of word g, of its lower half (row g) and its upper half (row g + 8), tokens 4 t and
//           4 t + 2, then 4 t + 1 and 4 t + 3; B: weight * scale, which is what the scores' sums are, transposed
#pragma once

#include "kv_cache_cuda/decode_stage.cuh"

namespace ptq::kv_cache_cuda {

// What a warp has found so far; of rows 2 t and 2 t + 1 also this lane's share of what the minima of the values add to
// every channel. sum[set][f][i]: row 2 t + i % 2, field f of the lower (i < 2) or upper half of word 8 set + g.
template <int bits, int most_d, int parts>
struct Found : Softmax {
    using S = Stage<bits, most_d>;
    using Q = Queries<bits, most_d, parts>;
    static constexpr int fields = 16 / S::width;    // of half a word
    static constexpr int row_numbers = most_d + 2;  // in shared memory: rows begin in different banks
    float offset[2] = {}, sum[S::sets][fields][4] = {};
    float query_sum[4] = {};  // of row 2 t + i % 2

    PTQ_DEVICE void add_up(const uint32_t* queries) {
        constexpr uint32_t ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
        PTQ_UNROLL
        for (int part = 0; part < parts; part++) PTQ_UNROLL
        for (int step = 0; step < S::steps; step++) PTQ_UNROLL
        for (int e = 0; e < Q::half; e += 2) {
            const Words2 q = Q::operand(queries, part, step, e);
            mma<Bfloat16>(query_sum, ones, q.word[0], q.word[1]);
        }
    }

    // Codes times queries: products[i] is of token 2 g + i / 2 and row 2 t + i % 2.
    PTQ_DEVICE static void multiply_keys(uint8_t* stage, const uint32_t* queries, float (&products)[4]) {
        float two[2][4] = {};  // as one they would wait for each other
        PTQ_UNROLL
        for (int step = 0; step < S::steps; step++) {
            const Words2 wide = load<Words2>(S::key(stage, step, false));
            Words2 narrow = {};
            if (S::has_narrow) {
                narrow = load<Words2>(S::key(stage, step, true));
                PTQ_UNROLL
                for (int j = 0; j < 2; j++)  // bytes apart, as the pairs are
                    narrow.word[j] = byte_permute(narrow.word[j], 0, lane() % 2 ? 0x4342 : 0x4140);
            }
            PTQ_UNROLL
            for (int e = 0; e < Q::half; e += 2) {
                uint32_t a[4];
                PTQ_UNROLL
                for (int i = 0; i < 4; i++)
                    a[i] = raised_numbers(wide.word[i % 2], S::width * (e + i / 2), narrow.word[i % 2],
                                          (bits - S::width) * (e + i / 2), bits);
                PTQ_UNROLL
                for (int part = 0; part < parts; part++) {
                    const Words2 q = Q::operand(queries, part, step, e);
                    mma<Bfloat16>(two[(step * Q::half + e) / 2 % 2], a, q.word[0], q.word[1]);
                }
            }
        }
        PTQ_UNROLL
        for (int i = 0; i < 4; i++) products[i] = two[0][i] + two[1][i];
    }

    // The tensor cores cut sums off, so that long ones of theirs would drift: those of a stage are added here.
    PTQ_DEVICE void multiply_values(uint8_t* stage, const uint32_t (&weight)[parts][2], const float (&factor)[2]) {
        constexpr int above = bits - S::width;
        PTQ_UNROLL
        for (int set = 0; set < S::sets; set++) {
            const Words4 wide = load<Words4>(S::value(stage, set, false));
            Words4 narrow = {};
            if (S::has_narrow) narrow = load<Words4>(S::value(stage, set, true));
            uint32_t low[4], high[2];  // [row / 8 + 2 * (second pair of tokens)], [second pair]
            PTQ_UNROLL
            for (int j = 0; j < 2; j++) {
                low[2 * j] = byte_permute(wide.word[j], wide.word[j + 2], 0x5410);
                low[2 * j + 1] = byte_permute(wide.word[j], wide.word[j + 2], 0x7632);
                high[j] = byte_permute(narrow.word[j], narrow.word[j + 2], lane() / 4 % 2 ? 0x7632 : 0x5410);
            }
            PTQ_UNROLL
            for (int f = 0; f < fields; f++) {
                uint32_t a[4];
                float product[4] = {};
                PTQ_UNROLL
                for (int i = 0; i < 4; i++)
                    a[i] = raised_numbers(low[i], S::width * f, high[i / 2], above * (i % 2 * fields + f), bits);
                PTQ_UNROLL
                for (int part = 0; part < parts; part++) mma<Bfloat16>(product, a, weight[part][0], weight[part][1]);
                PTQ_UNROLL
                for (int i = 0; i < 4; i++) sum[set][f][i] = sum[set][f][i] * factor[i % 2] + product[i];
            }
        }
    }

    PTQ_DEVICE void add(uint8_t* stage, const uint32_t* queries, float scaling) {
        const uint32_t seen = *S::seen(stage);
        const Words4 scales = load<Words4>(S::scales(stage));
        const auto scale = [&](int kind, int token) {
            return float_of(token ? scales.word[kind] & 0xffff0000u : scales.word[kind] << 16);
        };
        float weight[4], factor[2];
        multiply_keys(stage, queries, weight);
        PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            const float minimum = scale(1, i / 2) - raised_by(bits) * scale(0, i / 2);  // of raised codes
            const float score = scaling * (scale(0, i / 2) * weight[i] + minimum * query_sum[i]);
            weight[i] = seen >> i & 1 ? score : none;
        }
        soften(weight, factor);
        PTQ_UNROLL
        for (int j = 0; j < 2; j++) offset[j] *= factor[j];
        PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            if (weight[i] == 0) continue;  // what is not seen may be anything
            offset[i % 2] += weight[i] * scale(3, i / 2);
            weight[i] *= scale(2, i / 2);
        }
        uint32_t operand[parts][2];
        PTQ_UNROLL
        for (int part = 0; part < parts; part++) PTQ_UNROLL
        for (int j = 0; j < 2; j++) {
            const uint32_t pair = pack<Bfloat16>(weight[2 * j], weight[2 * j + 1]);
            const float rounded[2] = {float_of(pair << 16), float_of(pair & 0xffff0000u)};
            PTQ_UNROLL
            for (int i = 0; i < 2; i++) {
                weight[2 * j + i] -= rounded[i];
                offset[i] -= raised_by(bits) * rounded[i];
            }
            operand[part][j] = transpose(pair);
        }
        multiply_values(stage, operand, factor);
    }

    // To `room` [row, channel], and behind it [row, 3]: largest, weights, offset.
    PTQ_DEVICE void give(float* room) {
        const int g = lane() / 4, t = lane() % 4;
        PTQ_UNROLL
        for (int set = 0; set < S::sets; set++) PTQ_UNROLL
        for (int f = 0; f < fields; f += 2) PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            const int channel = ((8 * set + g) * 2 + i / 2) * fields + f;
            if (channel < most_d)
                store(room + (2 * t + i % 2) * row_numbers + channel,
                      Words2{bits_of(sum[set][f][i]), bits_of(sum[set][f + 1][i])});
        }
        Softmax::give(room + rows_at_once * row_numbers, offset);
    }
};

// The warps of a block come together: what each found lies `room_numbers` behind that of the one before.
template <class T>
PTQ_DEVICE void finish(const Attend& p, const BlockRows& rows, const float* rooms, int room_numbers, int row_numbers) {
    constexpr int each = 32 * decode_warps / rows_at_once;  // threads for a row
    const int row = thread() / each;
    if (row >= rows.count) return;
    float factor[decode_warps], offset[decode_warps], largest = none, weights = 0;
    const float* found = rooms + rows_at_once * row_numbers + row * 3;
    PTQ_UNROLL
    for (int w = 0; w < decode_warps; w++) largest = maximum(largest, found[w * room_numbers]);
    PTQ_UNROLL
    for (int w = 0; w < decode_warps; w++) {
        factor[w] = softmax_weight(found[w * room_numbers], largest);
        weights += factor[w] * found[w * room_numbers + 1];
        offset[w] = found[w * room_numbers + 2];
    }
    const float inverse = weights == 0 ? 0 : 1 / weights;
    float* sums = p.sums_of(rows.head, rows.first + row, rows.index);
    T* out = p.splits > 1 ? nullptr : static_cast<T*>(p.out) + p.out_of(rows.head, rows.first + row);
    for (int c = 2 * (thread() % each); c < p.v.d; c += 2 * each) {
        float total[2] = {};
        PTQ_UNROLL
        for (int w = 0; w < decode_warps; w++) {
            const Words2 pair = load<Words2>(rooms + w * room_numbers + row * row_numbers + c);
            PTQ_UNROLL
            for (int j = 0; j < 2; j++)
                total[j] += factor[w] != 0 ? factor[w] * (float_of(pair.word[j]) + offset[w]) : 0;
        }
        if (p.splits > 1) {
            store(sums + c, Words2{bits_of(total[0]), bits_of(total[1])});
            continue;
        }
        store(out + c, pack<T>(total[0] * inverse, total[1] * inverse));
    }
    if (p.splits == 1 || thread() % each != 0) return;
    store(p.softmax_of(rows.head, rows.first + row, rows.index), Words2{bits_of(largest), bits_of(weights)});
}

template <int bits, int most_d, int parts>
PTQ_BOTH constexpr int decode_shared() {
    using S = Stage<bits, most_d>;
    return decode_warps * S::stages * S::bytes + Queries<bits, most_d, parts>::bytes;
}

// block_x counts splits of the context, block_y heads, block_z eight rows each.
template <int bits, int most_d, int parts>
PTQ_KERNEL(32 * decode_warps, most_d == 256 ? 3 : 4)
void decode_kernel(const Attend p) {
    follow_previous();
    using S = Stage<bits, most_d>;
    using F = Found<bits, most_d, parts>;
    static_assert((rows_at_once * (F::row_numbers + 3)) * 4 <= S::stages * S::bytes);
    count_stored(p);
    const BlockRows rows(p);
    uint8_t* ring = shared() + warp() * S::stages * S::bytes;
    uint32_t* queries = reinterpret_cast<uint32_t*>(shared() + decode_warps * S::stages * S::bytes);
    Blocks blocks;
    F found;
    int asked = 0, done = 0;
    PTQ_ROLLED
    for (int i = 0;; i++) {
        const Blocks::Next next = blocks.next(p, rows);
        if (next.block >= 0) S::ask(p, rows.head, next, ring + asked++ % S::stages * S::bytes);
        copy_commit();
        if (i < S::stages - 2) continue;
        if (i == S::stages - 2) {  // so many are on their way
            Queries<bits, most_d, parts>(p, rows).give(queries);
            block_barrier();
            found.add_up(queries);
            continue;
        }
        if (done == asked) break;
        copy_wait<S::stages - 1>();
        found.add(ring + done++ % S::stages * S::bytes, queries, p.scaling);
    }
    found.give(reinterpret_cast<float*>(ring));
    block_barrier();
    finish<typename Queries<bits, most_d, parts>::T>(p, rows, reinterpret_cast<const float*>(shared()),
                                                     S::stages * S::bytes / 4, F::row_numbers);
}

}  // namespace ptq::kv_cache_cuda
