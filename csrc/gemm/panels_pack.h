// x in the steps in which many tokens are multiplied, included by panels.h.
#pragma once

#include <algorithm>
#include <cstring>

#include "gemm/panels_kernels.h"

namespace ptq::gemm {
namespace {

typedef uint32_t Eight __attribute__((vector_size(32)));

// Where the panel that begins at a column ends: panels are whole groups, or a part of one.
inline int64_t panel_end(const Product& p, int64_t column) {
    const int64_t most = panel_steps * columns_of(p.mode), group = p.w.group_columns;
    if (group <= most) return std::min(p.w.columns, column + most / group * group);
    return std::min({p.w.columns, column + most, (column / group + 1) * group});
}

inline int64_t token_blocks(const Product& p) {
    return (p.t + block_tokens - 1) / block_tokens;
}
// Where block b of tokens begins in a panel.
inline int64_t place(const Product& p, int64_t column, int64_t end, int64_t b) {
    return (column * token_blocks(p) + b * (end - column)) / columns_of(p.mode) * block_tokens;
}

// Eight steps of a token, as its numbers lie in memory, to what is multiplied.
template <Mode mode>
inline Eight arranged(Eight x) {
    if constexpr (mode != Mode::pairs) return x;
    typedef uint16_t Words __attribute__((vector_size(32)));
    const Words words = (Words)x;
    return (Eight)__builtin_shufflevector(words, words, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
}

// Eight steps of a token, from a column on; zeros where there is none.
template <Mode mode>
inline Eight eight_steps(const Product& p, int64_t token, int64_t column) {
    constexpr int64_t columns = 8 * columns_of(mode), bytes = 4 / columns_of(mode);
    const int64_t left = std::clamp(p.k - column, int64_t{0}, columns), at = token * p.k + column;
    Eight x{};
    if (token >= p.t || left == 0) return x;
    if (mode == Mode::floats && p.x_type == Number::bfloat16) {
        for (int64_t i = 0; i < left; i++)
            x[i] = static_cast<uint32_t>(static_cast<const uint16_t*>(p.x)[at + i]) << 16;
        return x;
    }
    const auto* from = static_cast<const uint8_t*>(p.x) + at * bytes;
    if (left == columns)
        std::memcpy(&x, from, sizeof x);
    else
        std::memcpy(&x, from, left * bytes);
    return arranged<mode>(x);
}

inline void transpose(Eight x[8]) {
    Eight y[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        y[i] = __builtin_shufflevector(x[i], x[i + 1], 0, 8, 2, 10, 4, 12, 6, 14);
        y[i + 1] = __builtin_shufflevector(x[i], x[i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            x[i + j] = __builtin_shufflevector(y[i + j], y[i + j + 2], 0, 1, 8, 9, 4, 5, 12, 13);
            x[i + j + 2] = __builtin_shufflevector(y[i + j], y[i + j + 2], 2, 3, 10, 11, 6, 7, 14, 15);
        }
    for (int i = 0; i < 4; i++) {
        y[i] = __builtin_shufflevector(x[i], x[i + 4], 0, 1, 2, 3, 8, 9, 10, 11);
        y[i + 4] = __builtin_shufflevector(x[i], x[i + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    }
    for (int i = 0; i < 8; i++) x[i] = y[i];
}

void offsets(const Product& p, int64_t b) {
    for (int64_t g = 0; g < p.w.groups; g++)
        for (int64_t j = 0; j < block_tokens; j++) {
            const int64_t token = b * block_tokens + j;
            const int8_t* q = static_cast<const int8_t*>(p.x) + token * p.k;
            int32_t sum = 0;
            if (token < p.t)
                for (int64_t i = g * p.w.group_columns; i < std::min(p.k, (g + 1) * p.w.group_columns); i++)
                    sum += q[i];
            p.offset[(b * p.w.groups + g) * block_tokens + j] = -byte_offset * sum;
        }
}

template <Mode mode>
void pack_of(const Product& p, int64_t first, int64_t last) {
    constexpr int64_t columns = 8 * columns_of(mode);
    for (int64_t b = first; b < last; b++) {
        if (mode == Mode::quads) offsets(p, b);
        for (int64_t column = 0; column < p.w.columns;) {
            const int64_t end = panel_end(p, column);
            uint32_t* to = p.packed + place(p, column, end, b);
            for (; column < end; column += columns, to += 8 * block_tokens) {
                Eight x[block_tokens];
#pragma GCC unroll 8
                for (int64_t j = 0; j < block_tokens; j++) x[j] = eight_steps<mode>(p, b * block_tokens + j, column);
                transpose(x);
                std::memcpy(to, x, sizeof x);
            }
        }
    }
}

void pack(const Product& p, int64_t first, int64_t last) {
    if (p.mode == Mode::quads) return pack_of<Mode::quads>(p, first, last);
    if (p.mode == Mode::pairs) return pack_of<Mode::pairs>(p, first, last);
    pack_of<Mode::floats>(p, first, last);
}

}  // namespace
}  // namespace ptq::gemm
