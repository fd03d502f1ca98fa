// A product of quantised tokens, of what kernels of every format are given.
#pragma once

#include "gemm/panels_kernels.h"

namespace ptq::gemm {

template <class Quantized>
Product product_of(const Panels& w, Mode mode, const Quantized& p, const Tokens& from) {
    return {.w = w,
            .mode = mode,
            .x = nullptr,
            .x_type = Number::float32,
            .t = p.t,
            .k = from.k,
            .token_scale = p.q_scale,
            .bias = p.bias,
            .out = p.out,
            .out_type = p.out_type,
            .from = from};
}

}  // namespace ptq::gemm
