// Sums of the products of channels, as plain C++: no torch here.
#pragma once

#include <cstdint>

#include "gemm/panels_kernels.h"
#include "tiles/layout.h"

namespace ptq::gram {

using tiles::tile_rows;

// x [t, k], and the same numbers as a weight of gemm/ whose rows are the channels and whose columns are the tokens:
// [tile, step, 16], zeros behind the last token. A step is two tokens where `pairs`.
struct Channels {
    const float* x;
    int64_t t, k;
    bool rounded;  // to bfloat16
    bool pairs;    // and multiplied so
    uint32_t* tiles;
    int64_t steps;
};

struct Kernels {
    bool has_pairs;
    void (*arrange)(const Channels&, int64_t first, int64_t last);  // makes steps [first, last) of `tiles`
    gemm::Unpack unpack;                                            // `tiles` into panels
    gemm::Pack pack;                                                // channels from p.x on as the tokens of p
    // Blocks [first, last) of sixteen channels from c.x on, where `pairs`: [channel, step]
    void (*turn)(const Channels& c, int64_t count, int64_t first, int64_t last, uint32_t* rows);
};

extern const Kernels portable, avx2, avx512, avx512bf16;

}  // namespace ptq::gram
