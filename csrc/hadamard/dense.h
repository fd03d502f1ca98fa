// A dense +-1 factor of order K, by the method of four Russians: the 16 signed sums of each 4 inputs are made once, and
// each output adds K / 4 of them, found by its code, instead of K products. Included once per level.
#pragma once

#include <algorithm>
#include <type_traits>

#include "hadamard/simd.h"

namespace ptq::hadamard {
namespace {

constexpr int64_t table_entries = 24 * 16;  // of one vector: half of the L1 cache

#if defined(__AVX512F__)
constexpr int most_rows = 12, most_vectors = 2;  // 24 of 32 registers: a code that is looked up serves two vectors
#else
constexpr int most_rows = 8, most_vectors = 1;
#endif

// table[code, vectors] of one of the vectors
template <class T>
inline void make_sums(const T* x, int64_t stride, T* table, int vectors) {
    constexpr int lanes = Simd<T>::lanes;
    const Vector<T> a = load(x), b = load(x + stride), c = load(x + 2 * stride), d = load(x + 3 * stride);
    const Vector<T> ab[4] = {a + b, b - a, a - b, -a - b}, cd[4] = {c + d, d - c, c - d, -c - d};
#pragma GCC unroll 16
    for (int code = 0; code < 16; code++) store(table + code * vectors * lanes, ab[code & 3] + cd[code >> 2]);
}

// out[row, vectors] (+)= the sum over `groups` of the table's entries that the row's codes name; `rows` at a time so
// that additions do not wait for each other. A code is 8 times the number of its entry, so it is almost an address.
template <class T, int rows, int vectors>
inline void add_rows(T* out, const uint8_t* codes, int64_t k, int64_t groups, const T* table, bool fresh) {
    constexpr int lanes = Simd<T>::lanes;
    Vector<T> sum[rows][vectors];
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) sum[r][v] = fresh ? Vector<T>{} : load(out + (r * vectors + v) * lanes);
    const char* entries = reinterpret_cast<const char*>(table);
    for (int64_t g = 0; g < groups; g++, entries += 16 * vectors * PTQ_VECTOR_BYTES, codes += k)
#pragma GCC unroll 16
        for (int r = 0; r < rows; r++) {
            const T* entry = reinterpret_cast<const T*>(entries + int64_t{codes[r]} * (vectors * PTQ_VECTOR_BYTES / 8));
#pragma GCC unroll 2
            for (int v = 0; v < vectors; v++) sum[r][v] += load(entry + v * lanes);
        }
#pragma GCC unroll 16
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) store(out + (r * vectors + v) * lanes, sum[r][v]);
}

// One column of vectors: x[K, stride] <- factor x. scratch: the table, then out[K, vectors].
template <class T, int vectors>
void dense_column(T* x, int64_t k, int64_t stride, const uint8_t* codes, T* scratch) {
    constexpr int lanes = Simd<T>::lanes;
    constexpr int64_t table_groups = table_entries / 16 / vectors;
    T *table = scratch, *out = scratch + table_entries * lanes;
    for (int64_t g = 0; g < k / 4; g += table_groups) {
        const int64_t groups = std::min(table_groups, k / 4 - g);
        for (int64_t i = 0; i < groups; i++)
            for (int v = 0; v < vectors; v++)
                make_sums(x + 4 * (g + i) * stride + v * lanes, stride, table + (i * 16 * vectors + v) * lanes,
                          vectors);
        int64_t row = 0;
        const auto add = [&]<int rows>(std::integral_constant<int, rows>) {
            for (; row + rows <= k; row += rows)
                add_rows<T, rows, vectors>(out + row * vectors * lanes, codes + g * k + row, k, groups, table, g == 0);
        };
        add(std::integral_constant<int, most_rows>());
        add(std::integral_constant<int, 4>());
    }
    for (int64_t row = 0; row < k; row++)
        for (int v = 0; v < vectors; v++) store(x + row * stride + v * lanes, load(out + (row * vectors + v) * lanes));
}

// x[outer, K, stride] <- factor x[.]
template <class T>
void dense(T* x, int64_t outer, int64_t k, int64_t stride, const uint8_t* codes, T* scratch) {
    constexpr int lanes = Simd<T>::lanes;
    for (int64_t o = 0; o < outer; o++, x += k * stride) {
        int64_t j = 0;
        for (; j + most_vectors * lanes <= stride; j += most_vectors * lanes)
            dense_column<T, most_vectors>(x + j, k, stride, codes, scratch);
        for (; j < stride; j += lanes) dense_column<T, 1>(x + j, k, stride, codes, scratch);
    }
}

// Elements of scratch that `dense` needs for factors up to order K.
template <class T>
int64_t dense_scratch(int64_t k) {
    return (table_entries + k * most_vectors) * Simd<T>::lanes;
}

}  // namespace
}  // namespace ptq::hadamard
