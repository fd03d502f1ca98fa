// Sums of the products of channels, as plain C++: no torch here.
#pragma once

#include <cstdint>

#include "gemm/panels_kernels.h"

namespace ptq::gram {

constexpr int64_t tile = 16;  // channels

// x [t, k], and the same numbers as a weight of gemm/ whose rows are the channels and whose columns are the tokens:
// [tile, step, 16], zeros behind the last token. A step is two tokens where `pairs`.
struct Channels {
    const float* x;
    int64_t t, k;
    bool rounded;  // to bfloat16, before they are multiplied
    bool pairs;    // with `rounded` only: as bfloat16
    uint32_t* tiles;
    int64_t steps;
};

// Steps [first, last) of `tiles`; a row of it in panels; channels from p.x on as tokens of a product.
struct Kernels {
    bool has_pairs;
    void (*arrange)(const Channels&, int64_t first, int64_t last);
    gemm::Unpack unpack;
    void (*pack)(const gemm::Product& p, int64_t first, int64_t last);
};

extern const Kernels portable, avx2, avx512, avx512bf16;

}  // namespace ptq::gram
