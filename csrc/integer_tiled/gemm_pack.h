// Activations in the order in which many tokens are multiplied, included by gemm.h.
#pragma once

#include <algorithm>
#include <vector>

#include "gemm/block.h"
#include "integer_tiled/gemm_kernels.h"

namespace ptq::integer_tiled {
namespace {

inline int64_t token_blocks(const Quantized& p) {
    return (p.t + gemm_tokens - 1) / gemm_tokens;
}
inline int64_t columns(const Quantized& p) {
    return blocks_in(p.w.k) * block_columns;
}

inline gemm::Columns panel_at(const Quantized& p, int64_t column) {
    return gemm::Columns::panel(column, columns(p), p.w.group_blocks * block_columns, gemm_columns);
}

// Where block b of tokens begins in a panel.
inline int64_t place(const Quantized& p, int64_t column, int64_t end, int64_t b) {
    return (column * token_blocks(p) + b * (end - column)) / 4 * gemm_tokens;
}

// Sixteen columns of four tokens: four numbers of four columns each, token after token.
inline void transpose(const int8_t* const q[gemm_tokens], int64_t column, int32_t* to) {
    typedef int32_t Four __attribute__((vector_size(16)));
    Four row[4];
    for (int j = 0; j < 4; j++) std::memcpy(&row[j], q[j] + column, sizeof row[j]);
    for (int half = 0; half < 2; half++) {
        const Four from = Four{0, 4, 1, 5} + 2 * half;
        const Four a = __builtin_shuffle(row[0], row[1], from), b = __builtin_shuffle(row[2], row[3], from);
        const Four out[2] = {__builtin_shuffle(a, b, Four{0, 1, 4, 5}), __builtin_shuffle(a, b, Four{2, 3, 6, 7})};
        std::memcpy(to + half * 8, out, sizeof out);
    }
}

// offset: minus the sum of q, times the zero where all have the same.
void pack(const Gemm& g, int64_t first, int64_t last) {
    const Quantized& p = g.p;
    const int64_t size = p.w.group_blocks * block_columns;
    const std::vector<int8_t> nothing(columns(p));
    for (int64_t b = first; b < last; b++) {
        const int8_t* q[gemm_tokens];
        for (int64_t j = 0; j < gemm_tokens; j++) {
            const int64_t token = b * gemm_tokens + j;
            q[j] = token < p.t ? p.q + token * p.q_stride : nothing.data();
            for (int64_t i = 0; i < p.w.groups; i++) {
                int32_t sum = 0;
                for (int64_t c = i * size; c < (i + 1) * size; c++) sum += q[j][c];
                g.offset[(b * p.w.groups + i) * gemm_tokens + j] = p.w.zero ? -sum : -sum * (1 << (p.w.bits - 1));
            }
        }
        for (int64_t column = 0, end; column < columns(p); column = end) {
            end = panel_at(p, column).end;
            int32_t* to = g.x + place(p, column, end, b);
            for (int64_t i = 0; i < end - column; i += 16) transpose(q, column + i, to + i);
        }
    }
}

}  // namespace
}  // namespace ptq::integer_tiled
