// Products of query rows with the keys of a chunk. Included once per level.
#pragma once

#include "kv_cache/pairs.h"

namespace ptq::kv_cache {
namespace {

#if defined(__AVX512F__)
constexpr int most_rows = 8;
#elif defined(__AVX2__)
constexpr int most_rows = 4;
#else
constexpr int most_rows = 2;
#endif

// How many of the rows that are left are taken together.
constexpr int together(int64_t left) {
    return left >= most_rows ? most_rows : static_cast<int>(left > 4 ? 4 : left);
}

// The query rows of one head, as floats and as integers, both scaled.
class Queries {
  public:
    Queries(const Attend& p, int64_t head)
        : d(p.k.d), bits(p.k.bits), scaled(p.rows() * d), rows(p.rows()), pairs(p.rows() * pairs_per_row()) {
        const float* q = p.q + head * p.rows() * d;
        for (int64_t i = 0; i < p.rows() * d; i++) scaled[i] = q[i] * p.scaling;
        for (int64_t first = 0, count = 0; first < p.rows(); first += count) {
            count = together(p.rows() - first);
            for (int64_t r = 0; r < count; r++)
                rows[first + r] = round(floats(first + r), &pairs[first * pairs_per_row() + r], count);
        }
    }
    struct Row {
        float factor;  // of the integers
        float sum;     // of the numbers that they stand for
    };
    const Row& row(int64_t i) const { return rows[i]; }
    const float* floats(int64_t row) const { return &scaled[row * d]; }
    // Of the rows that are taken together from this one on: pair after pair, as `Pairs::of_channels` gives them, of all
    // rows each.
    const uint32_t* integers(int64_t row) const { return &pairs[row * pairs_per_row()]; }

  private:
    int64_t d;
    int bits;
    std::vector<float> scaled;
    std::vector<Row> rows;
    std::vector<uint32_t> pairs;

    int64_t pairs_per_row() const {
        const int count = 32 / widest_plane(bits);
        return (d + count - 1) / count * count / 2;
    }
    Row round(const float* x, uint32_t* to, int64_t stride) const {
        Lanes high{}, poison{};  // numbers that are not finite have no integers: they show in the sum
        for (int64_t c = 0; c < d; c += lanes) {
            const Lanes here = load(x + c, std::min(lanes, d - c));
            high = max(max(here, -here), high);
        }
        const Integers integers(largest_of(high), bits, d);
        uint32_t all[max_head_dim];
        for (int64_t c = 0; c < d; c += lanes) {
            const Lanes here = load(x + c, std::min(lanes, d - c));
            store_vector(all + c, integers.of(chosen(here * 0.0f == 0.0f, here, Lanes{})));
            poison += here * 0.0f;
        }
        int64_t total = 0;
        for (int64_t c = 0; c < d; c++) total += static_cast<int32_t>(all[c] - Integers::zero);
        const int64_t half = 16 / widest_plane(bits);
        for (int64_t first = 0; first < d; first += 2 * half)
            for (int64_t c = first; c < first + half; c++, to += stride) *to = (all[c] & 0xffffu) | all[c + half] << 16;
        return {integers.factor, integers.factor * static_cast<float>(total) + sum(poison)};
    }
};

// score[r, t] = q[r] . key[t] for the tokens of COUNT blocks.
template <int BITS, int ROWS, int COUNT>
PTQ_INLINE void score_blocks(const Side& k, int64_t index, int64_t head, int64_t block, const Queries& q, int64_t row,
                             float* score) {
    constexpr int half = Pairs<BITS>::half;
    SignedInts acc[COUNT][ROWS] = {};
    const uint32_t* x = q.integers(row);
    const Words at = words_of<BITS>(k, index, head, block);
    const int64_t share = k.block_words();
    for (int64_t word = 0; word < (k.d * widest_plane(BITS) + 31) / 32; word++) {
        Pairs<BITS> keys[COUNT];
        for (int b = 0; b < COUNT; b++)
            keys[b] = Pairs<BITS>::of_channels({at.low + b * share, at.high + b * share, at.stride}, word);
#pragma GCC unroll 8
        for (int i = 0; i < half; i++, x += ROWS) {
            Dwords key[COUNT];
            for (int b = 0; b < COUNT; b++) key[b] = keys[b].get(i);
            for (int r = 0; r < ROWS; r++)
                for (int b = 0; b < COUNT; b++) acc[b][r] = dot(acc[b][r], Dwords{} + x[r], key[b]);
        }
    }
    for (int b = 0; b < COUNT; b++) {
        const uint16_t* scales = k.scales_of(index, head) + (block + b) * block_tokens;
        const Lanes scale = load(scales), minimum = load(scales + chunk);
        for (int r = 0; r < ROWS; r++) {
            const auto& [factor, sum] = q.row(row + r);
            store(score + r * chunk + (block + b) * block_tokens,
                  fma(scale * factor, converted<Lanes>(acc[b][r]), minimum * sum));
        }
    }
}

// Of `count` blocks, and of others behind them, so that there are always as many at once. Meanwhile as many bytes of
// values are fetched: they are read channel by channel, which no hardware foresees.
template <int BITS, int ROWS>
void scores(const Side& k, const Side& v, int64_t index, int64_t head, int64_t count, const Queries& q, int64_t row,
            float* score) {
#if defined(__AVX512F__)
    constexpr int at_once = ROWS == 8 ? 2 : ROWS == 1 ? 8 : 4;  // whose sums fit into registers, but are not too few
#else
    constexpr int at_once = 1;
#endif
    static_assert(blocks % at_once == 0);
    fetch_all(v.scales_of(index, head), scale_bytes);
    const auto* values = reinterpret_cast<const char*>(v.codes_of(index, head));
    const int64_t share = at_once * v.block_bytes();
    for (int64_t block = 0; block < count; block += at_once) {
        fetch_all(values + block / at_once * share, share);
        score_blocks<BITS, ROWS, at_once>(k, index, head, block, q, row, score);
    }
}

}  // namespace
}  // namespace ptq::kv_cache
