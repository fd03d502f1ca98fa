// Sizes that the products of many tokens have in common: see strips.h.
#pragma once

#include <cstdint>

namespace ptq::gemm {

constexpr int64_t tokens_of_a_block = 4;     // their numbers lie side by side
constexpr int64_t row_tiles_of_a_strip = 3;  // which is unpacked and multiplied at once
constexpr int64_t steps_of_a_panel = 128;    // those of a strip lie in the first-level cache

constexpr int64_t token_blocks(int64_t tokens) {
    return (tokens + tokens_of_a_block - 1) / tokens_of_a_block;
}

// Tokens of a unit of work, which takes a strip: as many as possible, as long as every thread gets several units. The
// sums of 512 stay in the second-level cache; below 64, unpacking would cost too large a share.
constexpr int64_t tokens_of_a_unit(int64_t tokens, int64_t strips, int64_t threads) {
    int64_t unit = 512;
    while (unit > 64 && strips * ((tokens + unit - 1) / unit) < 8 * threads) unit /= 2;
    return unit;
}

}  // namespace ptq::gemm
