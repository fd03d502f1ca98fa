// What tokens.h describes. Included once per level, into an anonymous namespace.
#pragma once

#include <cstring>
#include <vector>

#include "gemm/block.h"
#include "gemm/tokens.h"
#include "gemm/transpose.h"

namespace ptq::gemm {
namespace {

typedef int32_t EightInts __attribute__((vector_size(32)));

// sum + the four bytes of each number.
inline EightInts add_bytes(EightInts sum, EightInts x) {
#if defined(__AVX2__)
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_set1_epi8(1), (__m256i)x);
    return sum + (EightInts)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
    return sum + (x << 24 >> 24) + (x << 16 >> 24) + (x << 8 >> 24) + (x >> 24);
#endif
}

inline void transpose_four(const int8_t* const* q, int64_t column, int32_t* to, EightInts& sum) {
    EightInts row[4];
    for (int j = 0; j < 4; j++) std::memcpy(&row[j], q[j] + column, sizeof row[j]);
    const EightInts low = __builtin_shufflevector(row[0], row[1], 0, 8, 1, 9, 4, 12, 5, 13);
    const EightInts high = __builtin_shufflevector(row[0], row[1], 2, 10, 3, 11, 6, 14, 7, 15);
    const EightInts low2 = __builtin_shufflevector(row[2], row[3], 0, 8, 1, 9, 4, 12, 5, 13);
    const EightInts high2 = __builtin_shufflevector(row[2], row[3], 2, 10, 3, 11, 6, 14, 7, 15);
    const EightInts quad[4] = {__builtin_shufflevector(low, low2, 0, 1, 8, 9, 4, 5, 12, 13),       // 0 and 4
                               __builtin_shufflevector(low, low2, 2, 3, 10, 11, 6, 7, 14, 15),     // 1 and 5
                               __builtin_shufflevector(high, high2, 0, 1, 8, 9, 4, 5, 12, 13),     // 2 and 6
                               __builtin_shufflevector(high, high2, 2, 3, 10, 11, 6, 7, 14, 15)};  // 3 and 7
    for (int i = 0; i < 4; i++) sum = add_bytes(sum, quad[i]);
    for (int i = 0; i < 2; i++) {
        const EightInts first = __builtin_shufflevector(quad[2 * i], quad[2 * i + 1], 0, 1, 2, 3, 8, 9, 10, 11);
        const EightInts second = __builtin_shufflevector(quad[2 * i], quad[2 * i + 1], 4, 5, 6, 7, 12, 13, 14, 15);
        std::memcpy(to + 8 * i, &first, sizeof first);
        std::memcpy(to + 8 * i + 16, &second, sizeof second);
    }
}
inline void transpose_many(const int8_t* const* q, int64_t column, int32_t* to, EightInts& sum) {
    Eight x[8] = {};
    for (int64_t j = 0; j < quad_tokens; j++) std::memcpy(&x[j], q[j] + column, sizeof x[j]);
    transpose(x);
    for (int64_t i = 0; i < 8; i++) {
        sum = add_bytes(sum, (EightInts)x[i]);
        std::memcpy(to + i * quad_tokens, &x[i], quad_tokens * sizeof *to);
    }
}

// 32 columns of a block of tokens: eight numbers of four columns each, token after token. Adds their bytes to `sum`.
inline void transpose_quads(const int8_t* const q[quad_tokens], int64_t column, int32_t* to, EightInts& sum) {
    if constexpr (quad_tokens == 4)
        transpose_four(q, column, to, sum);
    else
        transpose_many(q, column, to, sum);
}
// Of which token i has lane i; with four tokens also i + 4.
inline int32_t of_token(EightInts sum, int64_t i) {
    return quad_tokens == 4 ? sum[i] + sum[i + 4] : sum[i];
}

// Blocks of tokens [first, last).
void pack_quads(const Quads& p, int64_t first, int64_t last) {
    constexpr int64_t step = tiles::block_columns;
    const int64_t blocks = (p.from.t + quad_tokens - 1) / quad_tokens;
    std::vector<int8_t> spare(quad_tokens * p.columns);
    for (int64_t b = first; b < last; b++) {
        const int8_t* q[quad_tokens];
        for (int64_t j = 0; j < quad_tokens; j++)
            q[j] = row_of(p.from, b * quad_tokens + j, p.columns, spare.data() + j * p.columns);
        int32_t* offset = p.offset + b * p.groups * quad_tokens;
        EightInts sum{};
        for (int64_t column = 0; column < p.columns;) {
            const int64_t end = Columns::panel(column, p.columns, p.group_columns, p.panel_columns).end;
            int32_t* to = p.x + (column * blocks + b * (end - column)) / 4 * quad_tokens;
            for (; column < end; to += step / 4 * quad_tokens) {
                transpose_quads(q, column, to, sum);
                column += step;
                if (column % p.group_columns && column != p.columns) continue;
                for (int64_t j = 0; j < quad_tokens; j++) *offset++ = of_token(sum, j) * p.factor;
                sum = EightInts{};
            }
        }
    }
}

}  // namespace
}  // namespace ptq::gemm
