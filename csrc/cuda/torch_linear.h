// What the CUDA files of linear layers have in common: tokens, bias and result, and torch's own product.
#pragma once

#include "cuda/numbers.cuh"
#include "cuda/torch_cuda.h"

namespace ptq::cuda {

inline Number kind_of(const char* op, const char* name, ScalarType type) {
    STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Half || type == ScalarType::BFloat16, op, ": ",
                    name, " must be float16, bfloat16 or float32");
    return type == ScalarType::Float ? Number::float32 : type == ScalarType::Half ? Number::float16 : Number::bfloat16;
}

inline Number bias_kind(const char* op, const std::optional<Tensor>& bias, const Tensor& beside, int64_t n) {
    if (!bias) return Number::none;
    const ScalarType type = bias->scalar_type();
    check_tensor(op, "bias", *bias, beside, type);
    STD_TORCH_CHECK(bias->numel() == n, op, ": bias has ", bias->numel(), " numbers, expected ", n);
    return kind_of(op, "bias", type);
}

// Sizes of the result for x [*t, k].
inline std::vector<int64_t> out_sizes(const char* op, const Tensor& x, int64_t n) {
    STD_TORCH_CHECK(x.dim() > 0, op, ": x has no axis");
    std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
    sizes.back() = n;
    return sizes;
}

inline int64_t tokens_of(const Tensor& x) {
    int64_t tokens = 1;
    for (int64_t d = 0; d + 1 < x.dim(); d++) tokens *= x.size(d);
    return tokens;
}

// The scales of quantised tokens: one of them for each.
inline void check_token_scale(const char* op, const Tensor& scale, const Tensor& beside, int64_t tokens) {
    check_tensor(op, "q_scale", scale, beside, ScalarType::Float);
    STD_TORCH_CHECK(scale.numel() == tokens, op, ": q_scale has ", scale.numel(), " numbers for ", tokens, " tokens");
}

// x w^T + bias, w of the type of x.
inline Tensor torch_linear(const char* op, const Tensor& x, const Tensor& w, const std::optional<Tensor>& bias) {
    std::optional<Tensor> same;
    if (bias) same = bias->scalar_type() == x.scalar_type() ? *bias : torch::stable::to(*bias, x.scalar_type());
    std::array<StableIValue, 3> stack{torch::stable::detail::from(x), torch::stable::detail::from(w),
                                      torch::stable::detail::from(same)};
    STD_TORCH_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION) == 0, op,
                    ": torch's own product failed");
    return torch::stable::detail::to<Tensor>(stack[0]);
}

}  // namespace ptq::cuda
