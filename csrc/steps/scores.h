// Products of a few query rows with keys, for attention. Included once per level.
#pragma once

#include <cstring>

#include "common/fetch.h"
#include "common/softmax.h"
#include "steps/numbers.h"

namespace ptq::steps {
namespace {

constexpr int64_t chunk = 128;  // tokens whose scores are made at a time
#if defined(__AVX512F__)
constexpr int together = 16;  // sums of sixteen numbers that are kept in registers
#else
constexpr int together = 4;
#endif

// Keys of some tokens, of d numbers each, from the element `at` on.
struct Keys {
    const void* data;
    int64_t at, d;
};

// How numbers of a type are multiplied, `numbers` at a time: as floats.
template <Number type>
struct Products {
    using Vector = Lanes;
    static constexpr int64_t numbers = lanes;
    // What d numbers of a query take, in floats.
    static int64_t width(int64_t d) { return padded(d); }
    // Numbers of a query, in whole vectors; `to` holds zeros.
    static void take(const void* from, int64_t at, int64_t d, float* to) {
        for (int64_t c = 0; c < d; c += lanes) {
            const int64_t count = std::min(lanes, d - c);
            store(to + c, read<type>(from, at + c, count), count);
        }
    }
    static Vector query(const float* q, int64_t at) { return load(q + at); }
    static Vector key(const void* keys, int64_t at, int64_t count) { return read<type>(keys, at, count); }
    static Lanes added(const Vector& q, const Vector& key, const Lanes& sum) { return fma(q, key, sum); }
};

#if defined(__AVX512BF16__)
// In pairs, of which an instruction adds up two products each.
template <>
struct Products<Number::bfloat16> {
    using Vector = __m512bh;
    static constexpr int64_t numbers = 2 * lanes;
    static int64_t width(int64_t d) { return (d + numbers - 1) / numbers * numbers / 2; }
    static void take(const void* from, int64_t at, int64_t d, float* to) {
        std::memcpy(to, static_cast<const uint16_t*>(from) + at, d * sizeof(uint16_t));
    }
    static Vector query(const float* q, int64_t at) { return (Vector)_mm512_loadu_si512(q + at / 2); }
    static Vector key(const void* keys, int64_t at, int64_t count) {
        const auto* from = static_cast<const uint16_t*>(keys) + at;
        const __mmask32 there = count < numbers ? (__mmask32{1} << count) - 1 : ~__mmask32{0};
        return (Vector)_mm512_maskz_loadu_epi16(there, from);
    }
    static Lanes added(const Vector& q, const Vector& key, const Lanes& sum) { return _mm512_dpbf16_ps(sum, q, key); }
};
#endif

// Of a row of queries in floats: its numbers for keys, and those for what keys have behind.
template <Number type>
inline int64_t query_width(const Attend& p) {
    return Products<type>::width(p.d) + Products<type>::width(p.more);
}

template <Number type>
inline void take_queries(const Attend& p, int64_t row, int rows, float* to) {
    using Of = Products<type>;
    for (int r = 0; r < rows; r++, row++, to += query_width<type>(p)) {
        const int64_t at = row * (p.d + p.more);
        Of::take(p.q, at, p.d, to);
        if (p.more) Of::take(p.q, at + p.d, p.more, to + Of::width(p.d));
    }
}

// acc[r, t] += q[r] . key[first + t]; q has `width` floats between rows. Of tokens from `count` on, whatever.
template <Number type, int rows, int step, bool whole>
[[gnu::always_inline]] inline void add_products(const Keys& keys, int first, int64_t count, const float* q,
                                                int64_t width, Lanes acc[rows][step]) {
    using Of = Products<type>;
    int64_t from[step];
    for (int t = 0; t < step; t++) from[t] = keys.at + std::min<int64_t>(first + t, count - 1) * keys.d;
    for (int64_t c = 0; c < keys.d; c += Of::numbers) {
        typename Of::Vector key[step];
#pragma GCC unroll 16
        for (int t = 0; t < step; t++)
            key[t] = Of::key(keys.data, from[t] + c, whole ? Of::numbers : std::min(Of::numbers, keys.d - c));
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            const auto x = Of::query(q + r * width, c);
#pragma GCC unroll 16
            for (int t = 0; t < step; t++) acc[r][t] = Of::added(x, key[t], acc[r][t]);
        }
    }
}

// score[r, s] = q[r] . key[s] * scaling for as many tokens as make sixteen scores. Of tokens from `count` on, whatever.
template <Number type, int rows, bool whole, bool two>
inline void score_tile(const Attend& p, const Keys& keys, const Keys& more, int64_t count, const float* q,
                       float* score) {
    constexpr int tile = lanes / rows, step = std::max(1, together / rows);  // tokens; tokens at once
    const int64_t width = query_width<type>(p), behind = Products<type>::width(p.d);
    Lanes total[lanes];
#pragma GCC unroll 16
    for (int first = 0; first < tile; first += step) {
        Lanes acc[rows][step] = {};
        add_products<type, rows, step, whole>(keys, first, count, q, width, acc);
        if constexpr (two) add_products<type, rows, step, whole>(more, first, count, q + behind, width, acc);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++)
#pragma GCC unroll 16
            for (int t = 0; t < step; t++) total[r * tile + first + t] = acc[r][t];
    }
    float sum[lanes];
    vectors::sums(total, sum);
    store(sum, load(sum) * p.scaling);
    for (int r = 0; r < rows; r++) std::memcpy(score + r * chunk, sum + r * tile, tile * sizeof(float));
}

template <Number type, int rows>
inline auto tile_of(const Attend& p) {
    const auto is_whole = [](int64_t d) { return d % Products<type>::numbers == 0; };
    if (!p.more) return is_whole(p.d) ? score_tile<type, rows, true, false> : score_tile<type, rows, false, false>;
    const bool whole = is_whole(p.d) && is_whole(p.more);
    return whole ? score_tile<type, rows, true, true> : score_tile<type, rows, false, true>;
}

// The same for `count` tokens of a unit from `token` on. Meanwhile as many bytes from `ahead` on are fetched; null:
// none.
template <Number type, int rows>
inline void scores(const Attend& p, int64_t unit, int64_t token, int64_t count, const float* q, float* score,
                   const char* ahead) {
    constexpr int tile = lanes / rows;
    const auto kernel = tile_of<type, rows>(p);
    for (int64_t s = 0; s < count; s += tile) {
        if (ahead) fetch_all(ahead + s * p.d * bytes<type>, std::min<int64_t>(tile, count - s) * p.d * bytes<type>);
        const Keys keys{p.keys, (unit * p.room + token + s) * p.d, p.d};
        const Keys more{p.more_keys, (unit * p.more_room + token + s) * p.more, p.more};
        kernel(p, keys, more, count - s, q, score + s);
    }
}

}  // namespace
}  // namespace ptq::steps
