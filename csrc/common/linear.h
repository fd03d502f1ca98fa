// What ops on tokens [*, k] have in common: their count, results beside them, numbers as kernels take them, and how
// work is shared.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "common/number.h"
#include "common/parallel.h"
#include "common/tensors.h"

namespace ptq {

// x [*t, k]
inline int64_t tokens_of(const torch::stable::Tensor& x) {
    int64_t t = 1;
    for (int64_t i = 0; i + 1 < x.dim(); i++) t *= x.size(i);
    return t;
}

// [*t, n] for x [*t, k]
inline torch::stable::Tensor empty_result(const torch::stable::Tensor& x, int64_t n,
                                          torch::headeronly::ScalarType type) {
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    sizes.back() = n;
    return fresh(sizes, type);
}

// Kernels write float32 or bfloat16 themselves.
inline torch::headeronly::ScalarType kernel_type(torch::headeronly::ScalarType type) {
    using torch::headeronly::ScalarType;
    return type == ScalarType::BFloat16 ? type : ScalarType::Float;
}
inline Number number_of(torch::headeronly::ScalarType type) {
    return type == torch::headeronly::ScalarType::BFloat16 ? Number::bfloat16 : Number::float32;
}

// Calls work(first, last) on parts of `units`.
template <class Work>
void run_codes(int64_t units, int64_t unit_codes, const Work& work) {
    const int64_t grain = std::max(int64_t{1}, codes_of_thread / std::max(int64_t{1}, unit_codes));
    if (units <= grain) return work(0, units);
    torch::stable::parallel_for(0, units, grain, work);
}

}  // namespace ptq
