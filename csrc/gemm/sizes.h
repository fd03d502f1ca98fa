// Sizes that the products of many tokens have in common: see strips.h.
#pragma once

#include <cstdint>

namespace ptq::gemm {

// Tokens of a block, whose numbers lie side by side. Products of integers need twelve sums that do not depend on each
// other; those of floats take longer, and need more.
constexpr int64_t tokens_of_a_block(int64_t columns_of_a_step) {
    return columns_of_a_step == 4 ? 4 : 8;
}
constexpr int64_t row_tiles_of_a_strip = 3;  // which is unpacked and multiplied at once
constexpr int64_t steps_of_a_panel = 128;    // those of a strip lie in the first-level cache

// Tokens of a unit of work, which takes a strip: as many as possible, as long as every thread gets several units. The
// sums of 512 stay in the second-level cache; below 64, unpacking would cost too large a share.
constexpr int64_t tokens_of_a_unit(int64_t tokens, int64_t strips, int64_t threads) {
    int64_t unit = 512;
    while (unit > 64 && strips * ((tokens + unit - 1) / unit) < 8 * threads) unit /= 2;
    return unit;
}

}  // namespace ptq::gemm
