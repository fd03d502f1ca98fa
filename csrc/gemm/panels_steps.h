// The panels of a product, and the steps of x. Included once per level, into an anonymous namespace.
#pragma once

#include <algorithm>
#include <cstring>

#include "gemm/block.h"
#include "gemm/panels_kernels.h"
#include "gemm/transpose.h"

namespace ptq::gemm {
namespace {

// Tokens of a block: their numbers lie side by side, and so many sums stay in registers. Integers leave some for the
// scaled sums of the groups before; the other products have a longer latency, which takes more sums of their own.
constexpr int64_t tokens_of([[maybe_unused]] Mode mode) {
#if defined(__AVX512F__)
    return are_integers(mode) ? quad_tokens : 8;
#elif defined(__AVX2__)
    return are_integers(mode) ? quad_tokens : 6;
#else
    return 4;
#endif
}

// Row tiles of a strip.
constexpr int64_t tiles_of(Mode mode) {
    return are_integers(mode) ? quad_tiles : 3;
}

// The most vectors of sixteen rows of a panel. Those of 24 KB lie in the first-level cache. Sums of floats are stored
// and loaded once for each panel: with AVX-512, twice as many steps gain 1 to 2 % on Zen 4 (no difference on Zen 5).
constexpr int64_t panel_vectors([[maybe_unused]] Mode mode) {
#if defined(__AVX512F__) && !defined(__AMX_TILE__)
    if (!are_integers(mode)) return 768;
#endif
    return 384;
}
static_assert(panel_vectors(Mode::quads) / direct_tiles * columns_of(Mode::quads) == direct_columns);
// The most steps.
inline int64_t panel_steps(const Product& p) {
    return panel_vectors(p.mode) / p.strip_tiles;
}

inline Columns panel_at(const Product& p, int64_t column) {
    return Columns::panel(column, p.w.columns, p.w.group_columns, panel_steps(p) * columns_of(p.mode));
}

// The scales of a row tile's group.
inline Lanes scale_at(const Panels& w, int64_t tile, int64_t group) {
    if (!w.scale && !w.multiples) return fill(w.factor);
    return tiles::load_scales(w.scale, w.multiples, w.groups, tile, group);
}

// Where block b of tokens begins in a panel.
inline int64_t place(const Product& p, int64_t column, int64_t end, int64_t b) {
    return (column * p.blocks() + b * (end - column)) / columns_of(p.mode) * p.block_tokens;
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
    if (p.rows && token < p.t) return load_vector<Eight>(p.rows + token * p.row_steps + column / columns_of(mode));
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

}  // namespace
}  // namespace ptq::gemm
