// What the ops of mixers ask of their inputs.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include "common/cpu_level.h"
#include "common/linear.h"
#include "common/tensors.h"
#include "mixers/kernels.h"

namespace ptq::mixers {

using torch::stable::Tensor;

inline const Kernels& kernels() {
    return at_level<portable, avx2, avx2, avx512>();
}

inline Number checked(const char* op, const Tensor& x) {
    using torch::headeronly::ScalarType;
    const ScalarType type = x.scalar_type();
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::BFloat16, op, ": x must be float32 or bfloat16");
    return number_of(type);
}

// Rows that are evenly apart.
struct StridedRows {
    Tensor held;
    int64_t apart;  // numbers between the first ones of two rows

    const void* data() const { return held.const_data_ptr(); }
};

// The last `inner` dimensions of x are a row; a slice of wider rows is read where it is, anything else is copied.
inline StridedRows rows_of(const Tensor& x, int64_t inner) {
    int64_t width = 1, at = x.dim() - 1;
    bool fits = true;
    for (; at >= x.dim() - inner; width *= x.size(at--)) fits = fits && (x.size(at) == 1 || x.stride(at) == width);
    int64_t apart = -1, step = 0;
    for (; at >= 0; at--) {
        if (x.size(at) == 1) continue;
        if (apart < 0) apart = step = x.stride(at);
        fits = fits && x.stride(at) == step;
        step *= x.size(at);
    }
    if (fits) return {x, std::max(apart, int64_t{0})};
    return {compact(x), width};
}

}  // namespace ptq::mixers
