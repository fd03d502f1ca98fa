// Few tokens times a plain weight as a function, for ops that do several steps at once.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

namespace ptq::dense {

// What ptq::dense_linear gives.
torch::stable::Tensor linear(const torch::stable::Tensor& x, const torch::stable::Tensor& weight,
                             const std::optional<torch::stable::Tensor>& bias);
// The same up to `few_tokens`, and for more what torch's own product gives.
torch::stable::Tensor few_tokens_linear(const torch::stable::Tensor& x, const torch::stable::Tensor& weight,
                                        const std::optional<torch::stable::Tensor>& bias = std::nullopt);

// Of each head: x [heads, t, k] times weights [heads, n, k], of one dtype, which is [heads, t, n].
torch::stable::Tensor linear_of_heads(const torch::stable::Tensor& x, const torch::stable::Tensor& weights);

}  // namespace ptq::dense
