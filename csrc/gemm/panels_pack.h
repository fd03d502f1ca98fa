// x in the steps in which many tokens are multiplied, included by panels.h.
#pragma once

#include <cstring>

#include "gemm/panels_steps.h"
#include "gemm/quads.h"

namespace ptq::gemm {
namespace {

template <Mode mode>
void pack_of(const Product& p, int64_t first, int64_t last) {
    constexpr int64_t columns = 8 * columns_of(mode), tokens = tokens_of(mode);
    static_assert(tokens <= 8);
    for (int64_t b = first; b < last; b++)
        for (int64_t column = 0; column < p.w.columns;) {
            const int64_t end = panel_at(p, column).end;
            uint32_t* to = p.packed + place(p, column, end, b);
            for (; column < end; column += columns, to += 8 * tokens) {
                Eight x[8];
#pragma GCC unroll 8
                for (int64_t j = 0; j < 8; j++)
                    x[j] = j < tokens ? eight_steps<mode>(p, b * tokens + j, column) : Eight{};
                transpose(x);
#pragma GCC unroll 8
                for (int64_t i = 0; i < 8; i++) std::memcpy(to + i * tokens, &x[i], tokens * sizeof *to);
            }
        }
}

void pack_integers(const Product& p, int64_t first, int64_t last) {
    pack_quads({p.from, p.w.columns, p.w.group_columns, p.w.groups, panel_steps(p) * columns_of(p.mode),
                reinterpret_cast<int32_t*>(p.packed), p.offset, p.w.zero ? -1 : -p.w.byte_offset},
               first, last);
}

void pack(const Product& p, int64_t first, int64_t last) {
    if (are_integers(p.mode)) return pack_integers(p, first, last);
    if (p.mode == Mode::pairs) return pack_of<Mode::pairs>(p, first, last);
    pack_of<Mode::floats>(p, first, last);
}

}  // namespace
}  // namespace ptq::gemm
