// Where tokens lie when many of them are multiplied, included by gemm.h.
#pragma once

#include "gemm/quads.h"
#include "integer_tiled/gemm_kernels.h"

namespace ptq::integer_tiled {
namespace {

inline int64_t columns(const Quantized& p) {
    return blocks_in(p.w.k) * block_columns;
}

inline gemm::Columns panel_at(const Quantized& p, int64_t column) {
    return gemm::Columns::panel(column, columns(p), p.w.group_blocks * block_columns, gemm_columns);
}

// Where block b of tokens begins in a panel.
inline int64_t place(const Quantized& p, int64_t column, int64_t end, int64_t b) {
    return (column * ((p.t + gemm_tokens - 1) / gemm_tokens) + b * (end - column)) / 4 * gemm_tokens;
}

// offset: minus the sum of q, times the zero where all have the same.
void pack(const Gemm& g, int64_t first, int64_t last) {
    const Weight& w = g.p.w;
    gemm::pack_quads({g.from, columns(g.p), w.group_blocks * block_columns, w.groups, gemm_columns, g.x, g.offset,
                      w.zero ? -1 : -(1 << (w.bits - 1))},
                     first, last);
}

}  // namespace
}  // namespace ptq::integer_tiled
