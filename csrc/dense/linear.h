// The kernels of one level: included after PTQ_LEVEL, the name of its table, is defined.
//
// A thread reads its rows as one stream, with prefetch. Four vectors of sixteen columns are multiplied at a time, each
// with a sum of its own. Two neighbouring bfloat16 numbers lie in a dword: so x is arranged to its even columns, then
// its odd ones, 32 at a time. A weight of floats is read in the same order, so that its numbers alone matter. With
// AVX-512 BF16 one instruction multiplies both with x as it is: the fewer instructions stand between two loads, the
// more of them wait for memory at once.
#include "common/fetch.h"
#include "common/lanes.h"
#include "dense/kernels.h"

namespace ptq::dense {
namespace {

constexpr int chains = 4;
constexpr int64_t ahead = 4096;       // bytes that are fetched before they are needed, past the second-level cache
constexpr int64_t most_light = 4096;  // floats of a token: more of them leave a row no room in the first-level cache
constexpr int64_t block_rows = 16;    // that are read from memory once, for all tokens
#if defined(__AVX512F__)
constexpr int64_t most_tokens = 4;  // of one pass over a row: their sums stay in registers
#else
constexpr int64_t most_tokens = 1;
#endif

template <int tokens>
constexpr Load load_of = tokens == 1 ? Load::light : Load::heavy;

inline float widened(const void* from, int64_t at, Number type) {
    if (type == Number::float32) return static_cast<const float*>(from)[at];
    return from_bfloat16(static_cast<const uint16_t*>(from)[at]);
}

// Whether x is multiplied as it is.
inline bool in_pairs(const Linear& p) {
#if defined(__AVX512BF16__)
    return p.type == Number::bfloat16 && p.weight_type == Number::bfloat16;
#else
    return static_cast<void>(p), false;
#endif
}

void arrange(const Linear& p) {
    if (in_pairs(p)) return;
    const int64_t size = arranged_size(p.k);
    for (int64_t t = 0; t < p.t; t++) {
        float* to = p.arranged + t * size;
        std::fill(to, to + size, 0.0f);
        for (int64_t i = 0; i < p.k; i++) {
            to[i / 32 * 32 + i % 2 * 16 + i % 32 / 2] = widened(p.x, t * p.k + i, p.type);
        }
    }
}

// Of 32 floats in memory those in even places, and the others.
inline void alternate(const uint8_t* from, Lanes& even, Lanes& odd) {
#if defined(__AVX512F__)
    const auto first = load_vector<Lanes>(from), last = load_vector<Lanes>(from + sizeof(Lanes));
    even = __builtin_shufflevector(first, last, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    odd = __builtin_shufflevector(first, last, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif defined(__AVX2__)
    const auto first = load_vector<Lanes>(from), last = load_vector<Lanes>(from + sizeof(Lanes));
    even = {__builtin_shufflevector(first.low, first.high, 0, 2, 4, 6, 8, 10, 12, 14),
            __builtin_shufflevector(last.low, last.high, 0, 2, 4, 6, 8, 10, 12, 14)};
    odd = {__builtin_shufflevector(first.low, first.high, 1, 3, 5, 7, 9, 11, 13, 15),
           __builtin_shufflevector(last.low, last.high, 1, 3, 5, 7, 9, 11, 13, 15)};
#else
    float x[2 * lanes], apart[2][lanes];
    std::memcpy(x, from, sizeof(x));
    for (int i = 0; i < 2 * lanes; i++) apart[i % 2][i / 2] = x[i];
    even = load(apart[0]), odd = load(apart[1]);
#endif
}

// 64 columns of a row as floats.
template <Number type>
inline void load_step(const uint8_t* from, Lanes w[chains]) {
    if constexpr (type == Number::float32) {
#pragma GCC unroll 2
        for (int c = 0; c < chains; c += 2) alternate(from + c * sizeof(Lanes), w[c], w[c + 1]);
    } else {
#pragma GCC unroll 2
        for (int c = 0; c < chains; c += 2) {
            const auto pairs = load_vector<Dwords>(from + c / 2 * sizeof(Dwords));
            w[c] = (Lanes)(pairs << 16);
            w[c + 1] = (Lanes)(pairs & 0xffff0000u);
        }
    }
}

template <int tokens>
inline void multiply_step(const Lanes w[chains], const float* x, int64_t stride, Lanes acc[tokens][chains]) {
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
        for (int c = 0; c < chains; c++) acc[t][c] = fma(w[c], load(x + t * stride + c * lanes), acc[t][c]);
}

inline void store_result(const Linear& p, int64_t t, int64_t n, float y) {
    if (p.bias) y += widened(p.bias, n, p.type);
    const int64_t at = t * p.n + n;
    if (p.type == Number::float32)
        static_cast<float*>(p.out)[at] = y;
    else
        static_cast<uint16_t*>(p.out)[at] = to_bfloat16(y);
}

template <Number type, int tokens, Load load>  // `type` of the weight
inline void row(const Linear& p, int64_t n, int64_t from) {
    constexpr int64_t bytes = type == Number::float32 ? 4 : 2;
    const uint8_t* weight = static_cast<const uint8_t*>(p.weight) + n * p.k * bytes;
    const int64_t stride = arranged_size(p.k), whole = p.k / step * step;
    const float* x = p.arranged + from * stride;
    Lanes acc[tokens][chains] = {}, w[chains];
    for (int64_t i = 0; i < whole; i += step) {
        fetch_ahead<load>(weight + i * bytes, step * bytes, ahead);
        load_step<type>(weight + i * bytes, w);
        multiply_step<tokens>(w, x + i, stride, acc);
    }
    if (whole < p.k) {
        uint8_t rest[step * bytes] = {};
        std::memcpy(rest, weight + whole * bytes, (p.k - whole) * bytes);
        load_step<type>(rest, w);
        multiply_step<tokens>(w, x + whole, stride, acc);
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++)
        store_result(p, from + t, n, vectors::sum((acc[t][0] + acc[t][1]) + (acc[t][2] + acc[t][3])));
}

#if defined(__AVX512BF16__)
// One token's lines come at 0.9 of the speed on Zen 4 where four sums ask for them.
template <int tokens>
constexpr int pair_chains = tokens == 1 ? 2 : 4;
constexpr int64_t pair_columns = 32;   // of a vector of bfloat16
constexpr int64_t pairs_ahead = 2048;  // bytes

// acc += the products of 32 columns of the weight, or of the first of them, with those of each token.
template <int tokens>
inline void multiply_pairs(const uint16_t* weight, const uint16_t* x, int64_t k, __mmask32 columns, int chain,
                           __m512 acc[tokens][pair_chains<tokens>]) {
    const auto w = (__m512bh)_mm512_maskz_loadu_epi16(columns, weight);
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++)
        acc[t][chain] = _mm512_dpbf16_ps(acc[t][chain], w, (__m512bh)_mm512_maskz_loadu_epi16(columns, x + t * k));
}

// A row of bfloat16 with tokens of bfloat16.
template <int tokens, Load load>
inline void row_of_pairs(const Linear& p, int64_t n, int64_t from) {
    constexpr int sums = pair_chains<tokens>;
    constexpr int64_t far = tokens == 1 ? 4096 : 8192;  // where lines go to the second-level cache
    constexpr __mmask32 all = 0xffffffffu;
    const auto* weight = static_cast<const uint16_t*>(p.weight) + n * p.k;
    const auto* x = static_cast<const uint16_t*>(p.x) + from * p.k;
    __m512 acc[tokens][sums] = {};
    int64_t i = 0;
    for (; i + sums * pair_columns <= p.k; i += sums * pair_columns) {
#pragma GCC unroll 4
        for (int c = 0; c < sums; c++) {
            fetch_ahead<load, far>(weight + i + c * pair_columns, 64, pairs_ahead);
            multiply_pairs<tokens>(weight + i + c * pair_columns, x + i + c * pair_columns, p.k, all, c, acc);
        }
    }
#pragma GCC unroll 4
    for (int c = 0; c < sums; c++, i += pair_columns) {
        if (i >= p.k) break;
        const __mmask32 columns = p.k - i < pair_columns ? (1u << (p.k - i)) - 1 : all;
        multiply_pairs<tokens>(weight + i, x + i, p.k, columns, c, acc);
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++) {
        __m512 y = acc[t][0] + acc[t][1];
        if constexpr (sums == 4) y += acc[t][2] + acc[t][3];
        store_result(p, from + t, n, vectors::sum((Lanes)y));
    }
}
#endif

template <Number type, int tokens>
inline void row_of(const Linear& p, int64_t n, int64_t from) {
#if defined(__AVX512BF16__)
    if (in_pairs(p)) {
        if constexpr (tokens == 1)
            if (p.k > 2 * most_light) return row_of_pairs<tokens, Load::heavy>(p, n, from);
        return row_of_pairs<tokens, load_of<tokens>>(p, n, from);
    }
#endif
    if constexpr (tokens == 1)
        if (p.k > most_light) return row<type, tokens, Load::heavy>(p, n, from);
    row<type, tokens, load_of<tokens>>(p, n, from);
}

template <Number type>
void rows_of(const Linear& p, int64_t first, int64_t last) {
    for (int64_t from = first; from < last; from += block_rows) {
        const int64_t to = std::min(last, from + block_rows);
        int64_t t = 0;
        for (; t + most_tokens <= p.t; t += most_tokens)
            for (int64_t n = from; n < to; n++) row_of<type, most_tokens>(p, n, t);
        for (; most_tokens > 2 && t + 2 <= p.t; t += 2)
            for (int64_t n = from; n < to; n++) row_of<type, 2>(p, n, t);
        for (; t < p.t; t++)
            for (int64_t n = from; n < to; n++) row_of<type, 1>(p, n, t);
    }
}

void rows(const Linear& p, int64_t first, int64_t last) {
    (p.weight_type == Number::float32 ? rows_of<Number::float32> : rows_of<Number::bfloat16>)(p, first, last);
}

}  // namespace

const Kernels PTQ_LEVEL{arrange, rows};

}  // namespace ptq::dense
