// Decode attention over the packed KV cache where decode.cuh cannot do it: a block of threads has one chunk of 256
// tokens of one key-value head, and eight query rows (query heads of the group, and query tokens). Codes are multiplied
// on the tensor cores as bfloat16 numbers, exact; scales and minima come in as float32 afterwards. Chunks are merged in
// their order: no atomics, the same bits every time. (Flash attention, arXiv 2205.14135, split over the context.) No
// torch here.
//
//   keys    operand A: 16 tokens x 16 channels. A lane's words of tokens g and g + 8 have the channels that it needs;
//           queries lie in shared memory in the same order. Two blocks of 16 tokens for each of the 8 warps
//   values  operand A: 16 words x 16 tokens, for every channel of a word in turn, with weight * scale as operand B
#pragma once

#include "kv_cache_cuda/scores.cuh"

namespace ptq::kv_cache_cuda {

// Values of this warp's blocks of tokens, times the weights: sum[set, field] has channels fields * word + field of
// words 16 (first + set) + g and + 8.
template <int bits>
struct Values {
    static constexpr int width = wide_plane(bits), above = bits - width, fields = 32 / width;
    static constexpr int segment = segment_of(bits), sets = segment / fields / 16;
    float sum[sets][fields][4] = {};

    PTQ_DEVICE void add(const Attend& p, const BlockRows& rows, const Rooms& rooms, int first_word) {
        const Side& v = p.v;
        const int words = plane_words(v.d, width), g = lane() / 4, t = lane() % 4;
        const uint32_t* codes = v.codes_of(rows.index, rows.head);
        for (int b = 0; b < warp_blocks; b++) {
            const int token = (warp() * warp_blocks + b) * block_tokens;
            if (token >= rows.tokens) break;
            PTQ_UNROLL
            for (int set = 0; set < sets; set++) {
                if (first_word + 16 * set >= words) break;
                Words4 wide[2] = {}, narrow[2] = {};
                PTQ_UNROLL
                for (int r = 0; r < 2; r++) {
                    const int word = first_word + 16 * set + g + 8 * r;
                    if (word >= words) continue;
                    wide[r] = load<Words4>(codes + v.at(word, token + 4 * t));
                    if (above) narrow[r] = load<Words4>(codes + v.at(words + word / 2, token + 4 * t));
                }
                uint32_t pair[2][2][2], high[2][2];  // [half of the word][tokens 0 and 1, 2 and 3][word]
                PTQ_UNROLL
                for (int r = 0; r < 2; r++) PTQ_UNROLL
                for (int j = 0; j < 2; j++) {
                    const uint32_t x = wide[r].word[2 * j], y = wide[r].word[2 * j + 1];
                    pair[0][j][r] = byte_permute(x, y, 0x5410);
                    pair[1][j][r] = byte_permute(x, y, 0x7632);
                    // first_word + 16 set + 8 r is even
                    high[j][r] =
                        byte_permute(narrow[r].word[2 * j], narrow[r].word[2 * j + 1], g % 2 ? 0x7632 : 0x5410);
                }
                for (int part = 0; part < p.parts; part++) {
                    const Words2 weight =
                        load<Words2>(rooms.weights + (part * rows_at_once + g) * weight_row + token + 4 * t);
                    PTQ_UNROLL
                    for (int f = 0; f < fields; f++) {
                        uint32_t a[4];
                        PTQ_UNROLL
                        for (int i = 0; i < 4; i++)
                            a[i] = code_numbers(pair[2 * f / fields][i / 2][i % 2] >> (width * (f % (fields / 2))),
                                                high[i / 2][i % 2] >> (above * f), bits);
                        mma<Bfloat16>(sum[set][f], a, weight.word[0], weight.word[1]);
                    }
                }
            }
        }
    }
    // To `to` [row, channel of the segment], or added to what is there.
    PTQ_DEVICE void give(float* to, int width_of_room, bool added) const {
        PTQ_UNROLL
        for (int set = 0; set < sets; set++) PTQ_UNROLL
        for (int f = 0; f < fields; f++) PTQ_UNROLL
        for (int i = 0; i < 4; i++) {
            const int channel = (16 * set + lane() / 4 + 8 * (i / 2)) * fields + f, row = 2 * (lane() % 4) + i % 2;
            if (channel >= width_of_room) continue;
            float* at = to + row * width_of_room + channel;
            *at = added ? *at + sum[set][f][i] : sum[set][f][i];
        }
    }
};

template <int v_bits>
PTQ_KERNEL(32 * attend_warps, v_bits == 3 ? 1 : 2)
void attend_kernel(const Attend p) {
    follow_previous();
    count_stored(p);
    const BlockRows rows(p);
    const Rooms rooms(p);
    const Sinks sinks(p, rows);
    if (!is_seen(p, rows, rooms)) {
        if (thread() < rows.count) summarise(p, rows, thread(), none, 0);
        return;
    }
    load_query(p, rows, rooms);
    block_barrier();
    score(p, rows, rooms);
    block_barrier();
    score_sinks(p, rows, rooms, sinks);
    block_barrier();
    soften(p, rows, rooms, sinks);
    block_barrier();
    const int d = p.v.d, width = p.width();
    float* out = p.sums_of(rows.head, rows.first, rows.index);
    for (int first = 0; first < d; first += segment_of(v_bits)) {
        Values<v_bits> values;
        values.add(p, rows, rooms, first / Values<v_bits>::fields);
        float* room = rooms.values + warp() % (attend_warps / 2) * rows_at_once * width;
        if (warp() >= attend_warps / 2) values.give(room, width, false);
        block_barrier();
        if (warp() < attend_warps / 2) values.give(room, width, true);
        block_barrier();
        const int channels = d - first < width ? d - first : width;
        for (int i = thread(); i < rows.count * channels; i += 32 * attend_warps) {
            const int row = i / channels, c = i % channels;
            float total = rooms.sums[row];
            PTQ_UNROLL
            for (int w = 0; w < attend_warps / 2; w++) total += rooms.values[(w * rows_at_once + row) * width + c];
            for (int s = sinks.first; s < sinks.last; s++) {
                const float weight = rooms.scores[row * chunk + sinks.at + s - sinks.first];
                if (weight != 0)
                    total += weight * p.sink_values[(static_cast<int64_t>(rows.head) * p.sinks + s) * d + first + c];
            }
            out[row * p.sum_row() + first + c] = total;
        }
        block_barrier();
    }
}

}  // namespace ptq::kv_cache_cuda
