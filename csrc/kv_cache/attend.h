// Decode attention over the packed cache. A unit is one chunk of one key-value head: its codes are taken apart once for
// up to `most_rows` query rows. Scores, softmax and sums of a chunk are merged over the chunks afterwards (flash
// attention, arXiv 2205.14135, split over the context), in the order of the chunks: no thread count changes a bit.
#pragma once

#include "common/bits.h"
#include "kv_cache/scores.h"
#include "kv_cache/values.h"

namespace ptq::kv_cache {
namespace {

constexpr float none = -std::numeric_limits<float>::infinity();

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

// Takes the scores from what the mask hides and from what lies behind `count` tokens.
void hide(const Attend& p, int64_t head, int64_t row, int64_t index, int64_t count, float* score) {
    for (int64_t t = count; t < (count + lanes - 1) / lanes * lanes; t++) score[t] = none;
    if (!p.mask) return;
    const int64_t b = head / p.kv_heads, token = row % p.tokens;
    const uint8_t* mask = p.mask + b * p.mask_batch + token * p.length + index * chunk;
    for (int64_t t = 0; t < count; t++) score[t] = mask[t] ? score[t] : none;
}

// The scores of a row, number r of those that are taken together, to its weights; the largest score and the sum of the
// weights go to `summary`.
template <int ROWS>
void soften(const Attend& p, int64_t head, int64_t index, int64_t row, int r, int64_t count, float* score,
            const Sinks& sinks, float* sink_weight, float* summary, TokenWeights<ROWS>& to) {
    hide(p, head, row, index, count, score);
    Lanes top = fill(none);
    for (int64_t t = 0; t < count; t += lanes) top = max(load(score + t), top);
    const float largest = largest_of(top);
    const float base = largest == none ? 0.0f : largest;  // a NaN, which is no maximum, shows in the sum of the weights
    const uint16_t* scales = p.v.scales_of(index, head);
    float sunk = 0;
    for (int64_t i = sinks.first; i < sinks.last; i++) {
        float& at = score[sinks.at + i - sinks.first];
        sunk += sink_weight[i - sinks.first] = power_of_two(fill(at - base))[0];
        at = none;
    }
    Lanes total{}, all{}, minima{}, high{};
    for (int64_t t = 0; t < count; t += lanes) {
        const Lanes weight = power_of_two(load(score + t) - base);
        const auto off = weight == 0.0f;  // whatever is stored there, a NaN too
        const Lanes scaled = chosen(off, Lanes{}, weight * load(scales + t));
        minima += chosen(off, Lanes{}, weight * load(scales + chunk + t));
        total += weight, all += scaled, high = max(scaled, high);
        store(score + t, scaled);
    }
    summary[0] = largest, summary[1] = sum(total) + sunk;
    to.take(r, count, score, largest_of(high), all, sum(minima), p.v.bits);
}

// The first rows fetch the next keys for all.
template <int ROWS>
void attend_rows(const Attend& p, const Queries& q, int64_t head, int64_t index, int64_t first_row, const Ahead& next) {
    alignas(64) float score[ROWS * chunk], sink_weight[ROWS * chunk];
    TokenWeights<ROWS> weights;
    const int64_t d = p.k.d, stride = partial_stride(d), count = std::min(chunk, p.length - index * chunk);
    const int64_t used = p.used_blocks(index);
    float* out = p.partial + ((head * p.chunks() + index) * p.rows() + first_row) * stride;
    with_bits<2, 3, 4, 6, 8>(p.k.bits,
                             [&]<int bits>() { scores<bits, ROWS>(p.k, p.v, index, head, used, q, first_row, score); });
    const Sinks sinks(p, head, index * chunk, count);
    for (int r = 0; r < ROWS; r++) {
        for (int64_t i = sinks.first; i < sinks.last; i++) {
            Lanes total{};
            const float *query = q.floats(first_row + r), *key = p.sink_keys + (head * p.sinks + i) * d;
            for (int64_t c = 0; c < d; c += lanes) {
                const int64_t width = std::min(lanes, d - c);
                total = fma(load(query + c, width), load(key + c, width), total);
            }
            score[r * chunk + sinks.at + i - sinks.first] = sum(total);
        }
        soften(p, head, index, first_row + r, r, count, score + r * chunk, sinks, sink_weight + r * chunk,
               out + r * stride + partial_width(d), weights);
    }
    const Ahead ahead = first_row ? Ahead{} : next;
    with_bits<2, 3, 4, 6, 8>(p.v.bits,
                             [&]<int bits>() { values<bits, ROWS>(p.v, index, head, used, weights, out, ahead); });
    for (int r = 0; r < ROWS; r++)
        for (int64_t i = sinks.first; i < sinks.last; i++) {
            const float weight = sink_weight[r * chunk + i - sinks.first];
            const float* value = p.sink_values + (head * p.sinks + i) * d;
            for (int64_t c = 0; c < d && weight != 0; c++) out[r * stride + c] += weight * value[c];
        }
}

void attend(const Attend& p, int64_t first, int64_t last) {
    const auto keys_of = [&](int64_t unit) -> Ahead {
        const int64_t head = unit / p.chunks(), index = unit % p.chunks();
        fetch_all(p.k.scales_of(index, head), scale_bytes);
        return {reinterpret_cast<const char*>(p.k.codes_of(index, head)), p.used_blocks(index) * p.k.block_bytes()};
    };
    for (int64_t unit = first; unit < last;) {
        const int64_t head = unit / p.chunks(), end = std::min(last, (head + 1) * p.chunks());
        const Queries q(p, head);
        for (; unit < end; unit++) {
            const int64_t index = unit % p.chunks();
            const Ahead next = unit + 1 < last ? keys_of(unit + 1) : Ahead{};
            for (int64_t row = 0, count = 0; row < p.rows(); row += count) {
                count = together(p.rows() - row);
                if constexpr (most_rows >= 8)
                    if (count == 8) attend_rows<8>(p, q, head, index, row, next);
                if constexpr (most_rows >= 4) {
                    if (count == 4) attend_rows<4>(p, q, head, index, row, next);
                    if (count == 3) attend_rows<3>(p, q, head, index, row, next);
                }
                if (count == 2) attend_rows<2>(p, q, head, index, row, next);
                if (count == 1) attend_rows<1>(p, q, head, index, row, next);
            }
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
        for (int64_t i = 0; i < p.chunks(); i++) largest = std::max(largest, part(i)[width]);
        std::fill(total.begin(), total.end(), 0.0f);
        const float base = largest == none ? 0.0f : largest;
        for (int64_t i = 0; i < p.chunks(); i++) {
            const float* from = part(i);
            const float factor = power_of_two(fill(from[width] - base))[0];
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
