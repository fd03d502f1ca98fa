// The first half of decode attention (attend.cuh): queries times keys, and the weights of a chunk. No torch here.
#pragma once

#include "kv_cache_cuda/rooms.cuh"

namespace ptq::kv_cache_cuda {

// Warp `row`: its query in parts, channels f and f + fields / 2 of a word beside each other; zeros beyond.
PTQ_DEVICE void load_query(const Attend& p, const BlockRows& rows, const Rooms& rooms) {
    const int row = warp(), half = 16 / wide_plane(p.k.bits);
    float total = 0;
    for (int i = lane(); i < p.query_pairs(); i += 32) {
        float x[2];
        PTQ_UNROLL
        for (int j = 0; j < 2; j++) {
            const int c = i / half * 2 * half + i % half + j * half;
            x[j] = row < rows.count && c < p.k.d ? number_at(p.q, p.q_kind, rows.query(p, row) + c) : 0;
            total += x[j];
        }
        for (int part = 0; part < p.parts; part++) {
            const uint32_t low = take_part(x[0]), high = take_part(x[1]);
            rooms.queries[(part * rows_at_once + row) * p.query_row() + i] = low | high << 16;
        }
    }
    total = sum_of_warp(total);
    if (lane() == 0) rooms.sums[row] = total;
}

// Scores of this warp's blocks of tokens.
PTQ_DEVICE void score(const Attend& p, const BlockRows& rows, const Rooms& rooms) {
    const Side& k = p.k;
    const int width = wide_plane(k.bits), above = k.bits - width, words = plane_words(k.d, width);
    const int half = 16 / width, g = lane() / 4, t = lane() % 4, steps = p.query_pairs() / (4 * half);
    const uint32_t* codes = k.codes_of(rows.index, rows.head);
    for (int b = 0; b < warp_blocks; b++) {
        const int block = warp() * warp_blocks + b;
        if (block * block_tokens >= rows.tokens) break;
        float sum[4] = {};
        constexpr int ahead = 4;  // words that are asked for at once
        for (int first = 0; first < steps; first += ahead) {
            uint32_t wide[ahead][2], narrow[ahead][2];
            PTQ_UNROLL
            for (int s = 0; s < ahead; s++) PTQ_UNROLL
            for (int r = 0; r < 2; r++) {
                const int word = 4 * (first + s) + t, token = block * block_tokens + g + 8 * r;
                wide[s][r] = word < words ? codes[k.at(word, token)] : 0;
                narrow[s][r] = 0;
                if (above && word < words) {
                    const int shift = word % 2 * 16;  // bytes apart, as the pairs are
                    const uint32_t bits = codes[k.at(words + word / 2, token)] >> shift;
                    narrow[s][r] = byte_permute(bits, 0, 0x4140);
                }
            }
            PTQ_UNROLL
            for (int s = 0; s < ahead; s++) {
                if (first + s >= steps) break;
                const uint32_t* query = rooms.queries + g * p.query_row() + (4 * (first + s) + t) * half;
                for (int e = 0; e < half; e += 2) {
                    uint32_t a[4];
                    PTQ_UNROLL
                    for (int i = 0; i < 4; i++)
                        a[i] = code_numbers(wide[s][i % 2] >> (width * (e + i / 2)),
                                            narrow[s][i % 2] >> (above * (e + i / 2)), k.bits);
                    for (int part = 0; part < p.parts; part++) {
                        const Words2 q = load<Words2>(query + part * rows_at_once * p.query_row() + e);
                        mma<Bfloat16>(sum, a, q.word[0], q.word[1]);
                    }
                }
            }
        }
        const uint16_t* scales = k.scales_of(rows.index, rows.head);
        PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            const int token = block * block_tokens + g + 8 * (i / 2), row = 2 * t + i % 2;
            const float scale = widen(Bfloat16{scales[token]}), minimum = widen(Bfloat16{scales[chunk + token]});
            rooms.scores[row * chunk + token] = p.scaling * (scale * sum[i] + minimum * rooms.sums[row]);
        }
    }
}

// The scores of sinks in the place of those of their codes.
PTQ_DEVICE void score_sinks(const Attend& p, const BlockRows& rows, const Rooms& rooms, const Sinks& sinks) {
    const int count = sinks.last - sinks.first;
    for (int unit = warp(); unit < count * rows.count; unit += attend_warps) {
        const int row = unit / count, i = unit % count;
        const float* key = p.sink_keys + (static_cast<int64_t>(rows.head) * p.sinks + sinks.first + i) * p.k.d;
        float total = 0;
        for (int c = lane(); c < p.k.d; c += 32) total += number_at(p.q, p.q_kind, rows.query(p, row) + c) * key[c];
        total = sum_of_warp(total);
        if (lane() == 0) rooms.scores[row * chunk + sinks.at + i] = p.scaling * total;
    }
}

PTQ_DEVICE const uint8_t* mask_of(const Attend& p, const BlockRows& rows, int row) {
    return p.mask + rows.head / p.kv_heads * p.mask_batch + (rows.first + row) % p.tokens * int64_t{p.length} +
           rows.index * chunk;
}
PTQ_DEVICE void summarise(const Attend& p, const BlockRows& rows, int row, float largest, float total) {
    float* at = p.softmax_of(rows.head, rows.first + row, rows.index);
    at[0] = largest;
    at[1] = total;
}

// Whether any of the rows sees any token of this chunk: a cache with room for more tokens is mostly empty.
PTQ_DEVICE bool is_seen(const Attend& p, const BlockRows& rows, const Rooms& rooms) {
    if (!p.mask) return true;
    int seen = 0;
    if (warp() < rows.count)
        for (int token = lane(); token < rows.tokens; token += 32) seen |= mask_of(p, rows, warp())[token];
    PTQ_UNROLL
    for (int shift = 16; shift; shift /= 2) seen |= shuffle_xor(seen, shift);
    float* flags = rooms.sums + rows_at_once;
    if (lane() == 0) flags[warp()] = static_cast<float>(seen);
    block_barrier();
    bool any = false;
    PTQ_UNROLL
    for (int row = 0; row < rows_at_once; row++) any |= flags[row] != 0;
    return any;
}

// Warp `row`: scores to weights; and in parts, weight * scale of the value.
PTQ_DEVICE void soften(const Attend& p, const BlockRows& rows, const Rooms& rooms, const Sinks& sinks) {
    const int row = warp();
    constexpr int each = chunk / 32;
    float weight[each], largest = none, total = 0, offset = 0;
    const uint8_t* mask = p.mask ? mask_of(p, rows, row) : nullptr;
    PTQ_UNROLL
    for (int i = 0; i < each; i++) {
        const int token = lane() + 32 * i;
        const bool seen = row < rows.count && token < rows.tokens && (!mask || mask[token]);
        weight[i] = seen ? rooms.scores[row * chunk + token] : none;
        largest = maximum(largest, weight[i]);
    }
    PTQ_UNROLL
    for (int shift = 16; shift; shift /= 2) {
        largest = maximum(largest, shuffle_xor(largest, shift));
    }
    const uint16_t* scales = p.v.scales_of(rows.index, rows.head);
    PTQ_UNROLL
    for (int i = 0; i < each; i++) {
        const int token = lane() + 32 * i;
        const float w = softmax_weight(weight[i], largest);
        total += w;
        rooms.scores[row * chunk + token] = w;
        const bool stored = w != 0 && (token < sinks.at || token >= sinks.at + sinks.last - sinks.first);
        float scaled = 0;
        if (stored) {
            offset += w * widen(Bfloat16{scales[chunk + token]});
            scaled = w * widen(Bfloat16{scales[token]});
        }
        for (int part = 0; part < p.parts; part++)
            rooms.weights[(part * rows_at_once + row) * weight_row + token] = take_part(scaled);
    }
    total = sum_of_warp(total);
    offset = sum_of_warp(offset);
    if (lane() != 0) return;
    rooms.sums[row] = offset;
    if (row < rows.count) summarise(p, rows, row, largest, total);
}

}  // namespace ptq::kv_cache_cuda
