// Rows times panels. The sums of six rows and some vectors stay in registers (24 of 32 with AVX-512, 12 of 16 with
// AVX2): a step loads the vectors of the panel and a number of each row for all products. Included once per level, into
// an anonymous namespace.
#pragma once

#include <immintrin.h>

#include "prefill/kernels.h"

namespace ptq::prefill {
namespace {

constexpr int row_tile = 6;
static_assert(block % row_tile == 0);

#if defined(__AVX512F__)
typedef __m512 Column;
constexpr int strip = 64;  // columns whose sums fit
#else
typedef __m256 Column;
constexpr int strip = 16;
#endif
constexpr int column_lanes = sizeof(Column) / sizeof(float);

inline Column load_column(const void* from) {
    Column x;
    std::memcpy(&x, from, sizeof x);
    return x;
}
inline void store_column(float* to, Column x) {
    std::memcpy(to, &x, sizeof x);
}

template <Mode mode>
inline Column product(Column sum, Column column, uint32_t x) {
#if defined(__AVX512F__)
    const __m512i same = _mm512_set1_epi32(static_cast<int>(x));
#if defined(__AVX512BF16__)
    if constexpr (mode == Mode::pairs) return _mm512_dpbf16_ps(sum, (__m512bh)column, (__m512bh)same);
#endif
    return _mm512_fmadd_ps(column, (__m512)same, sum);
#else
    return _mm256_fmadd_ps(column, (__m256)_mm256_set1_epi32(static_cast<int>(x)), sum);
#endif
}

// sum[r][c] += x[r] . columns c of a panel. `step`: dwords of a step of the panel; `row`: of a row of x.
template <Mode mode, int vectors>
[[gnu::always_inline]] inline void multiply(const uint32_t* from, int64_t step, const uint32_t* x, int64_t row,
                                            int64_t steps, Column sum[row_tile][vectors]) {
    for (int64_t i = 0; i < steps; i++) {
        Column column[vectors];
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) column[c] = load_column(from + i * step + c * column_lanes);
#pragma GCC unroll 6
        for (int r = 0; r < row_tile; r++)
#pragma GCC unroll 4
            for (int c = 0; c < vectors; c++) sum[r][c] = product<mode>(sum[r][c], column[c], x[r * row + i]);
    }
}

template <int vectors>
[[gnu::always_inline]] inline void store_sums(const Column sum[row_tile][vectors], float* to, int64_t row) {
#pragma GCC unroll 6
    for (int r = 0; r < row_tile; r++)
#pragma GCC unroll 4
        for (int c = 0; c < vectors; c++) store_column(to + r * row + c * column_lanes, sum[r][c]);
}

// score[r, c] = q[r] . key c, for so many keys of a panel
template <Mode mode, int keys>
void score_tile(const uint32_t* panels, const uint32_t* q, int64_t steps, float* score) {
    constexpr int width = std::min(keys, strip), vectors = width / column_lanes;
    for (int first = 0; first < keys; first += width) {
        Column sum[row_tile][vectors] = {};
        multiply<mode, vectors>(panels + first, panel, q, steps, steps, sum);
        store_sums<vectors>(sum, score + first, chunk);
    }
}

// out[r, c] = factor[r] * out[r, c] + weight[r] . column c of the values, over the first `steps` of a chunk, for so
// many columns: all of a panel
template <Mode mode, int columns>
void value_tile(const uint32_t* values, const uint32_t* weight, int64_t steps, const float* factor, float* out,
                int64_t row) {
    constexpr int width = std::min(columns, strip), vectors = width / column_lanes;
    for (int first = 0; first < columns; first += width) {
        Column sum[row_tile][vectors];
#pragma GCC unroll 6
        for (int r = 0; r < row_tile; r++)
#pragma GCC unroll 4
            for (int c = 0; c < vectors; c++)
                sum[r][c] = load_column(out + r * row + first + c * column_lanes) * factor[r];
        multiply<mode, vectors>(values + first, columns, weight, chunk / numbers_of(mode), steps, sum);
        store_sums<vectors>(sum, out + first, row);
    }
}

// What a product holds while rows are multiplied.
template <Mode mode>
struct Registers {};

// score[r, c] = q[r] . key c, for the first `keys` of a chunk
template <Mode mode>
void score_rows(const uint32_t* panels, const uint32_t* q, int64_t steps, int64_t rows, int64_t keys, float* score) {
    for (int64_t k = 0; k < keys; k += panel)
        for (int64_t r = 0; r < rows; r += row_tile)
            (keys - k > panel / 2 ? score_tile<mode, panel> : score_tile<mode, panel / 2>)(panels + k * steps,
                                                                                           q + r * steps, steps,
                                                                                           score + r * chunk + k);
}

// out[r, c] = factor[r] * out[r, c] + weight[r] . column c of the values, over the first `keys` of a chunk
template <Mode mode>
void add_values(const uint32_t* values, const uint32_t* weight, int64_t keys, int64_t rows, const float* factor,
                float* out, int64_t width) {
    constexpr int64_t value_steps = chunk / numbers_of(mode);
    const int64_t steps = (keys + numbers_of(mode) - 1) / numbers_of(mode);
    for (int64_t c = 0; c < width; c += panel)
        for (int64_t r = 0; r < rows; r += row_tile)
            (width - c >= panel ? value_tile<mode, panel>
                                : value_tile<mode, panel / 2>)(values + c * value_steps, weight + r * value_steps,
                                                               steps, factor + r, out + r * width + c, width);
}

}  // namespace
}  // namespace ptq::prefill

#if defined(__AMX_TILE__)
#include "prefill/products_amx.h"
#endif
