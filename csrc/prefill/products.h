// Rows times panels. The sums of six rows and four vectors stay in 24 registers: a step loads four vectors of the panel
// and a number of each row for 24 products. Included once per level, into an anonymous namespace.
#pragma once

#include <immintrin.h>

#include "prefill/kernels.h"

namespace ptq::prefill {
namespace {

constexpr int row_tile = 6;
static_assert(block % row_tile == 0);

template <Mode mode>
inline __m512 product(__m512 sum, __m512 column, uint32_t x) {
    const __m512i same = _mm512_set1_epi32(static_cast<int>(x));
#if defined(__AVX512BF16__)
    if constexpr (mode == Mode::pairs) return _mm512_dpbf16_ps(sum, (__m512bh)column, (__m512bh)same);
#endif
    return _mm512_fmadd_ps(column, (__m512)same, sum);
}

// sum[r][c] += x[r] . columns c of a panel. `step`: dwords of a step of the panel; `row`: of a row of x.
template <Mode mode, int vectors>
[[gnu::always_inline]] inline void multiply(const uint32_t* from, int64_t step, const uint32_t* x, int64_t row,
                                            int64_t steps, __m512 sum[row_tile][vectors]) {
    for (int64_t i = 0; i < steps; i++) {
        __m512 column[vectors];
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) column[c] = _mm512_loadu_ps(from + i * step + c * lanes);
#pragma GCC unroll 6
        for (int r = 0; r < row_tile; r++)
#pragma GCC unroll 4
            for (int c = 0; c < vectors; c++) sum[r][c] = product<mode>(sum[r][c], column[c], x[r * row + i]);
    }
}

template <int vectors>
[[gnu::always_inline]] inline void store_sums(const __m512 sum[row_tile][vectors], float* to, int64_t row) {
#pragma GCC unroll 6
    for (int r = 0; r < row_tile; r++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) _mm512_storeu_ps(to + r * row + c * lanes, sum[r][c]);
}

// score[r, c] = q[r] . key c
template <Mode mode, int vectors>
void score_tile(const uint32_t* keys, const uint32_t* q, int64_t steps, float* score) {
    __m512 sum[row_tile][vectors] = {};
    multiply<mode, vectors>(keys, panel, q, steps, steps, sum);
    store_sums<vectors>(sum, score, chunk);
}

// out[r, c] = factor[r] * out[r, c] + weight[r] . column c of the values, over the first `steps` of a chunk
template <Mode mode, int vectors>
void value_tile(const uint32_t* values, const uint32_t* weight, int64_t steps, const float* factor, float* out,
                int64_t width) {
    __m512 sum[row_tile][vectors];
#pragma GCC unroll 6
    for (int r = 0; r < row_tile; r++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) sum[r][c] = _mm512_loadu_ps(out + r * width + c * lanes) * factor[r];
    multiply<mode, vectors>(values, vectors * lanes, weight, chunk / numbers_of(mode), steps, sum);
    store_sums<vectors>(sum, out, width);
}

}  // namespace
}  // namespace ptq::prefill
