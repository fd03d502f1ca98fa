// Decode attention over the packed cache. A unit is one chunk of one key-value head: its codes are decoded once for
// up to `max_rows` query rows. Scores, softmax and sums of a chunk are merged over the chunks afterwards (flash
// attention, arXiv 2205.14135, split over the context), in the order of the chunks: no thread count changes a bit.
#pragma once

#include <array>
#include <utility>

#include "kv_cache/fields.h"

namespace ptq::kv_cache {
namespace {

#if defined(__AVX512F__)
constexpr int max_rows = 4, pair = 2;  // rows of a tile; blocks of tokens at once
constexpr int value_sums = 16;         // that fit into registers
#else
constexpr int max_rows = 2, pair = 1, value_sums = 4;
#endif
constexpr float none = -std::numeric_limits<float>::infinity();

template <int BITS, int COUNT, size_t... B>
inline std::array<Fields<BITS>, COUNT> whole_words(const Words* at, int64_t channel, std::index_sequence<B...>) {
    return {Fields<BITS>(at[B], channel, true)...};
}

// score[r, t] = q[r] . key[t] for the tokens of COUNT blocks. Even and odd channels have sums of their own.
template <int BITS, int ROWS, int COUNT>
inline void score_blocks(const Side& k, int64_t index, int64_t head, int64_t block, const float* q, const float* q_sum,
                         float* score) {
    Lanes acc[COUNT][2][ROWS] = {};
    Words at[COUNT];
    for (int b = 0; b < COUNT; b++) at[b] = words_of<BITS>(k, index, head, block + b);
    constexpr int count = Fields<BITS>::count;
    int64_t c = 0;
    for (; c + count <= k.d; c += count) {
        const auto fields = whole_words<BITS, COUNT>(at, c, std::make_index_sequence<COUNT>{});
#pragma GCC unroll 16
        for (int i = 0; i < count; i++) {
            Lanes key[COUNT];
            for (int b = 0; b < COUNT; b++) key[b] = fields[b].get(i);
            for (int r = 0; r < ROWS; r++) {
                const Lanes x = fill(q[r * k.d + c + i]);
                for (int b = 0; b < COUNT; b++) acc[b][i & 1][r] = fma(x, key[b], acc[b][i & 1][r]);
            }
        }
    }
    for (; c < k.d; c++)
        for (int b = 0; b < COUNT; b++) {
            const Lanes key = Fields<BITS>(at[b], c / 4 * 4).get(c % 4);
            for (int r = 0; r < ROWS; r++) {
                Lanes& to = c & 1 ? acc[b][1][r] : acc[b][0][r];
                to = fma(fill(q[r * k.d + c]), key, to);
            }
        }
    for (int b = 0; b < COUNT; b++) {
        const uint16_t* scales = k.scales_of(index, head) + (block + b) * block_tokens;
        const Lanes scale = load(scales), minimum = load(scales + chunk);
        for (int r = 0; r < ROWS; r++)
            store(score + r * chunk + (block + b) * block_tokens,
                  fma(scale, acc[b][0][r] + acc[b][1][r], minimum * q_sum[r]));
    }
}

// Meanwhile as many bytes of values are fetched, in the end all of a full chunk: they are read channel by channel,
// which no hardware foresees. (gcc 12 makes a loop that is 1.5 times as slow where these addresses take one of their
// own.)
template <int BITS, int ROWS>
void scores(const Side& k, const Side& v, int64_t index, int64_t head, int64_t count, const float* q, float* score) {
    float q_sum[ROWS];
    for (int r = 0; r < ROWS; r++) {
        Lanes total{};
        for (int64_t c = 0; c < k.d; c += lanes) total += load(q + r * k.d + c, std::min(lanes, k.d - c));
        q_sum[r] = sum(total);
    }
    fetch_all(v.scales_of(index, head), scale_bytes);
    const auto* values = reinterpret_cast<const char*>(v.codes_of(index, head));
    const int64_t share = v.block_bytes();
    int64_t block = 0;
    for (; block + pair <= count; block += pair) {
        fetch_all(values + block * share, pair * share);
        score_blocks<BITS, ROWS, pair>(k, index, head, block, q, q_sum, score);
    }
    fetch_all(values + block * share, (count - block) * share);
    for (; block < count; block++) score_blocks<BITS, ROWS, 1>(k, index, head, block, q, q_sum, score);
}

// out[r, c] = sum over tokens of weight[r, t] * code[t, c] for CHANNELS channels from `first`.
template <int BITS, int ROWS, int CHANNELS>
inline void value_tile(const Words& at, int64_t count, int64_t first, const float* weight, float* out, int64_t stride) {
    constexpr int step = std::min(Fields<BITS>::count, CHANNELS);
    Lanes acc[value_sums] = {};
    for (int64_t b = 0; b < count; b++) {
        Lanes w[ROWS];
        for (int r = 0; r < ROWS; r++) w[r] = load(weight + r * chunk + b * block_tokens);
        const Words here{at.low + b * block_tokens, at.high + b * block_tokens, at.stride};
#pragma GCC unroll 4
        for (int g = 0; g < CHANNELS; g += step) {
            const Fields<BITS> fields(here, first + g, step == Fields<BITS>::count);
#pragma GCC unroll 16
            for (int i = 0; i < step; i++) {
                const Lanes code = fields.get(i);
                for (int r = 0; r < ROWS; r++) acc[r * CHANNELS + g + i] = fma(w[r], code, acc[r * CHANNELS + g + i]);
            }
        }
    }
    float total[value_sums];
    if constexpr (value_sums == 16)
        sums(acc, total);
    else
        for (int i = 0; i < value_sums; i++) total[i] = sum(acc[i]);
    for (int r = 0; r < ROWS; r++)
        std::memcpy(out + r * stride + first, total + r * CHANNELS, CHANNELS * sizeof(float));
}

// Keys that are fetched while values are added up: so many bytes of codes.
struct Ahead {
    const char* keys = nullptr;
    int64_t bytes = 0;
};

// Meanwhile keys are fetched, as much for each channel.
template <int BITS, int ROWS>
void values(const Side& v, int64_t index, int64_t head, int64_t count, const float* weight, float* out,
            const Ahead& ahead) {
    constexpr int channels = value_sums / (ROWS == 3 ? 4 : ROWS), rest = std::min(4, channels);
    const Words at = words_of<BITS>(v, index, head, 0);
    const int64_t share = ahead.bytes / v.d;
    int64_t c = 0;
    for (; c + channels <= v.d; c += channels) {
        fetch_all(ahead.keys + c * share, channels * share);
        value_tile<BITS, ROWS, channels>(at, count, c, weight, out, partial_stride(v.d));
    }
    for (; c < v.d; c += rest) value_tile<BITS, ROWS, rest>(at, count, c, weight, out, partial_stride(v.d));
}

// The sinks among the tokens of a chunk: sinks [first, last) are tokens [at, at + last - first) of the chunk.
struct Sinks {
    int64_t first = 0, last = 0, at = 0;
    Sinks(const Attend& p, int64_t head, int64_t begin, int64_t count) {
        if (!p.starts) return;
        const int64_t start = p.starts[head / p.kv_heads] - begin;
        first = std::min(std::max(int64_t{0}, -start), p.sinks);
        last = std::max(first, std::min(p.sinks, count - start));
        at = start + first;
    }
};

// Scores to weights of one row. Returns what every channel gets from the minima of the values.
float soften(const Attend& p, const Side& v, int64_t index, int64_t head, int64_t row, int64_t count, float* score,
             const Sinks& sinks, float* sink_weight, float* summary) {
    for (int64_t t = count; t < (count + lanes - 1) / lanes * lanes; t++) score[t] = none;
    if (p.mask) {
        const int64_t b = head / p.kv_heads, token = row % p.tokens;
        const uint8_t* mask = p.mask + b * p.mask_batch + token * p.length + index * chunk;
        for (int64_t t = 0; t < count; t++) score[t] = mask[t] ? score[t] : none;
    }
    Lanes high = fill(none);
    for (int64_t t = 0; t < count; t += lanes) {
        const Lanes s = load(score + t);
        high = chosen(s <= high, high, s);
    }
    float largest = none;
    for (int i = 0; i < lanes; i++) largest = high[i] <= largest ? largest : high[i];
    summary[0] = largest, summary[1] = 0;
    const float base = largest == none ? 0.0f : largest;  // a NaN, which is no maximum, shows in the sum of the weights
    const uint16_t* scales = v.scales_of(index, head);
    Lanes total{}, offset{};
    for (int64_t t = 0; t < count; t += lanes) {
        const Lanes weight = exponential(load(score + t) - base);
        total += weight;
        store(score + t, weight);
    }
    for (int64_t i = sinks.first; i < sinks.last; i++) {
        float& weight = score[sinks.at + i - sinks.first];
        sink_weight[i - sinks.first] = weight;
        weight = 0;
    }
    for (int64_t t = 0; t < count; t += lanes) {
        const Lanes weight = load(score + t);
        const auto off = weight == 0.0f;  // whatever is stored there, a NaN too
        offset += chosen(off, Lanes{}, weight * load(scales + chunk + t));
        store(score + t, chosen(off, Lanes{}, weight * load(scales + t)));
    }
    summary[1] = sum(total);
    return sum(offset);
}

// The first rows fetch the next keys for all.
template <int ROWS>
void attend_rows(const Attend& p, int64_t head, int64_t index, int64_t first_row, const Ahead& next) {
    alignas(64) float score[ROWS * chunk], q[ROWS * 1024], sink_weight[ROWS * chunk];
    const int64_t d = p.k.d, stride = partial_stride(d), count = std::min(chunk, p.length - index * chunk);
    const int64_t used = p.used_blocks(index);
    const Ahead ahead = first_row ? Ahead{} : next;
    float* out = p.partial + ((head * p.chunks() + index) * p.rows() + first_row) * stride;
    for (int64_t i = 0; i < ROWS * d; i++) q[i] = p.q[(head * p.rows() + first_row) * d + i] * p.scaling;
    if (p.k.bits == 8) scores<8, ROWS>(p.k, p.v, index, head, used, q, score);
    if (p.k.bits == 6) scores<6, ROWS>(p.k, p.v, index, head, used, q, score);
    if (p.k.bits == 4) scores<4, ROWS>(p.k, p.v, index, head, used, q, score);
    if (p.k.bits == 3) scores<3, ROWS>(p.k, p.v, index, head, used, q, score);
    if (p.k.bits == 2) scores<2, ROWS>(p.k, p.v, index, head, used, q, score);
    const Sinks sinks(p, head, index * chunk, count);
    float offset[ROWS];
    for (int r = 0; r < ROWS; r++) {
        for (int64_t i = sinks.first; i < sinks.last; i++) {
            Lanes total{};
            const float* key = p.sink_keys + (head * p.sinks + i) * d;
            for (int64_t c = 0; c < d; c += lanes) {
                const int64_t width = std::min(lanes, d - c);
                total = fma(load(q + r * d + c, width), load(key + c, width), total);
            }
            score[r * chunk + sinks.at + i - sinks.first] = sum(total);
        }
        offset[r] = soften(p, p.v, index, head, first_row + r, count, score + r * chunk, sinks, sink_weight + r * chunk,
                           out + r * stride + partial_width(d));
    }
    if (p.v.bits == 8) values<8, ROWS>(p.v, index, head, used, score, out, ahead);
    if (p.v.bits == 6) values<6, ROWS>(p.v, index, head, used, score, out, ahead);
    if (p.v.bits == 4) values<4, ROWS>(p.v, index, head, used, score, out, ahead);
    if (p.v.bits == 3) values<3, ROWS>(p.v, index, head, used, score, out, ahead);
    if (p.v.bits == 2) values<2, ROWS>(p.v, index, head, used, score, out, ahead);
    for (int r = 0; r < ROWS; r++) {
        for (int64_t c = 0; c < d; c++) out[r * stride + c] += offset[r];
        for (int64_t i = sinks.first; i < sinks.last; i++) {
            const float weight = sink_weight[r * chunk + i - sinks.first];
            const float* value = p.sink_values + (head * p.sinks + i) * d;
            for (int64_t c = 0; c < d && weight != 0; c++) out[r * stride + c] += weight * value[c];
        }
    }
}

void attend(const Attend& p, int64_t first, int64_t last) {
    const auto keys_of = [&](int64_t unit) -> Ahead {
        const int64_t head = unit / p.chunks(), index = unit % p.chunks();
        fetch_all(p.k.scales_of(index, head), scale_bytes);
        return {reinterpret_cast<const char*>(p.k.codes_of(index, head)), p.used_blocks(index) * p.k.block_bytes()};
    };
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t head = unit / p.chunks(), index = unit % p.chunks();
        const Ahead next = unit + 1 < last ? keys_of(unit + 1) : Ahead{};
        for (int64_t row = 0; row < p.rows();) {
            const int64_t left = p.rows() - row;
            if constexpr (max_rows >= 4) {
                if (left >= 4) {
                    attend_rows<4>(p, head, index, row, next), row += 4;
                    continue;
                }
                if (left == 3) {
                    attend_rows<3>(p, head, index, row, next), row += 3;
                    continue;
                }
            }
            if (left >= 2) {
                attend_rows<2>(p, head, index, row, next), row += 2;
                continue;
            }
            attend_rows<1>(p, head, index, row, next), row += 1;
        }
    }
}

void merge(const Attend& p, int64_t first, int64_t last) {
    const int64_t d = p.k.d, stride = partial_stride(d), width = partial_width(d);
    std::vector<float> total(d);
    for (int64_t unit = first; unit < last; unit++) {
        const int64_t head = unit / p.rows(), row = unit % p.rows();
        const auto part = [&](int64_t i) { return p.partial + ((head * p.chunks() + i) * p.rows() + row) * stride; };
        float largest = none, weights = 0;
        for (int64_t i = 0; i < p.chunks(); i++) {
            const float high = part(i)[width];
            largest = high <= largest ? largest : high;
        }
        std::fill(total.begin(), total.end(), 0.0f);
        const float base = largest == none ? 0.0f : largest;
        for (int64_t i = 0; i < p.chunks(); i++) {
            const float* from = part(i);
            const float factor = exponential(fill(from[width] - base))[0];
            weights += factor * from[width + 1];
            if (factor == 0) continue;
            for (int64_t c = 0; c < d; c++) total[c] += factor * from[c];
        }
        const float inverse = weights == 0 ? 0.0f : 1 / weights;
        const int64_t b = head / p.kv_heads, q_head = head % p.kv_heads * p.groups + row / p.tokens;
        float* out = p.out + ((b * p.tokens + row % p.tokens) * p.kv_heads * p.groups + q_head) * d;
        for (int64_t c = 0; c < d; c++) out[c] = total[c] * inverse;
    }
}

}  // namespace
}  // namespace ptq::kv_cache
