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

// How numbers of a type are multiplied, `numbers` at a time: as floats.
template <Number type>
struct Products {
    using Vector = Lanes;
    static constexpr int64_t numbers = lanes;
    // Rows of queries, each in whole vectors. `to` holds zeros.
    static void take(const Attend& p, int64_t row, int rows, float* to) {
        for (int r = 0; r < rows; r++)
            for (int64_t c = 0; c < p.d; c += lanes) {
                const int64_t count = std::min(lanes, p.d - c);
                store(to + r * padded(p.d) + c, read<type>(p.q, (row + r) * p.d + c, count), count);
            }
    }
    static Vector query(const float* q, int64_t at) { return load(q + at); }
    static Vector key(const Attend& p, int64_t at, int64_t count) { return read<type>(p.keys, at, count); }
    static Lanes added(const Vector& q, const Vector& key, const Lanes& sum) { return fma(q, key, sum); }
};

#if defined(__AVX512BF16__)
// In pairs, of which an instruction adds up two products each.
template <>
struct Products<Number::bfloat16> {
    using Vector = __m512bh;
    static constexpr int64_t numbers = 2 * lanes;
    static void take(const Attend& p, int64_t row, int rows, float* to) {
        const int64_t width = (p.d + numbers - 1) / numbers * numbers / 2;  // in floats
        for (int r = 0; r < rows; r++)
            std::memcpy(to + r * width, static_cast<const uint16_t*>(p.q) + (row + r) * p.d, p.d * sizeof(uint16_t));
    }
    static Vector query(const float* q, int64_t at) { return (Vector)_mm512_loadu_si512(q + at / 2); }
    static Vector key(const Attend& p, int64_t at, int64_t count) {
        const auto* from = static_cast<const uint16_t*>(p.keys) + at;
        const __mmask32 there = count < numbers ? (__mmask32{1} << count) - 1 : ~__mmask32{0};
        return (Vector)_mm512_maskz_loadu_epi16(there, from);
    }
    static Lanes added(const Vector& q, const Vector& key, const Lanes& sum) { return _mm512_dpbf16_ps(sum, q, key); }
};
#endif

// score[r, s] = q[r] . key[s] * scaling for as many tokens as make sixteen scores. Of tokens from `count` on, whatever.
template <Number type, int rows, bool whole>
inline void score_tile(const Attend& p, int64_t at, int64_t count, const float* q, float* score) {
    using Of = Products<type>;
    constexpr int tile = lanes / rows, step = std::max(1, together / rows);  // tokens; tokens at once
    const int64_t width = (p.d + Of::numbers - 1) / Of::numbers * Of::numbers, d = p.d;
    Lanes total[lanes];
#pragma GCC unroll 16
    for (int first = 0; first < tile; first += step) {
        int64_t from[step];
        for (int t = 0; t < step; t++) from[t] = at + std::min<int64_t>(first + t, count - 1) * d;
        Lanes acc[rows][step] = {};
        for (int64_t c = 0; c < width; c += Of::numbers) {
            typename Of::Vector key[step];
#pragma GCC unroll 16
            for (int t = 0; t < step; t++)
                key[t] = Of::key(p, from[t] + c, whole ? Of::numbers : std::min(Of::numbers, d - c));
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) {
                const auto x = Of::query(q, r * width + c);
#pragma GCC unroll 16
                for (int t = 0; t < step; t++) acc[r][t] = Of::added(x, key[t], acc[r][t]);
            }
        }
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

// The same for `count` tokens. Meanwhile as many bytes from `ahead` on are fetched; null: none.
template <Number type, int rows>
inline void scores(const Attend& p, int64_t at, int64_t count, const float* q, float* score, const char* ahead) {
    constexpr int tile = lanes / rows;
    const auto kernel = p.d % Products<type>::numbers ? score_tile<type, rows, false> : score_tile<type, rows, true>;
    for (int64_t s = 0; s < count; s += tile) {
        if (ahead) fetch_all(ahead + s * p.d * bytes<type>, std::min<int64_t>(tile, count - s) * p.d * bytes<type>);
        kernel(p, at + s * p.d, count - s, q, score + s);
    }
}

}  // namespace
}  // namespace ptq::steps
