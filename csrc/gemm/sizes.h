// Sizes that the products of many tokens have in common: see int8.h.
#pragma once

#include <cstdint>

namespace ptq::gemm {

constexpr int64_t tokens_of_a_block = 4;     // their numbers lie side by side
constexpr int64_t row_tiles_of_a_strip = 3;  // which is unpacked and multiplied at once
constexpr int64_t panel_columns = 512;       // those of a strip lie in the first-level cache

constexpr int64_t most_tokens = 512;  // of a unit of work: their sums stay in the second-level cache
constexpr int64_t least_tokens = 64;  // below, unpacking would cost too large a share

constexpr int64_t token_blocks(int64_t tokens) {
    return (tokens + tokens_of_a_block - 1) / tokens_of_a_block;
}

// Tokens of a unit, which takes a strip: as many as possible, as long as every thread gets several units.
constexpr int64_t tokens_of_a_unit(int64_t tokens, int64_t strips, int64_t threads) {
    int64_t unit = most_tokens;
    while (unit > least_tokens && strips * ((tokens + unit - 1) / unit) < 8 * threads) unit /= 2;
    return unit;
}

}  // namespace ptq::gemm
