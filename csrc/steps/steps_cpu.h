// The small steps as functions, for ops that do several at once. ptq/ops/steps.py says what they compute.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>

#include "steps/kernels.h"

namespace ptq::steps {

torch::stable::Tensor rms_norm(const torch::stable::Tensor& x, const torch::stable::Tensor& gain, double eps,
                               double offset, bool round_first);
std::tuple<torch::stable::Tensor, torch::stable::Tensor> rotary(const torch::stable::Tensor& q,
                                                                const torch::stable::Tensor& k,
                                                                const torch::stable::Tensor& cos,
                                                                const torch::stable::Tensor& sin);
// Writes to keys and values.
torch::stable::Tensor decode_attention(const torch::stable::Tensor& q, const torch::stable::Tensor& k,
                                       const torch::stable::Tensor& v, const torch::stable::Tensor& cos,
                                       const torch::stable::Tensor& sin, const torch::stable::Tensor& keys,
                                       const torch::stable::Tensor& values, int64_t before, double scaling,
                                       const std::optional<torch::stable::Tensor>& mask,
                                       const std::optional<torch::stable::Tensor>& sinks);
// Of queries and keys that are turned already; `partial` and `units` are set here.
void attend(Attend p, int64_t batch);
// Of so many numbers of one head of one token.
decltype(Kernels::rotary) rotary_kernel();
torch::stable::Tensor silu_mul(const torch::stable::Tensor& gate, const torch::stable::Tensor& up);
torch::stable::Tensor gelu_mul(const torch::stable::Tensor& gate, const torch::stable::Tensor& up);
torch::stable::Tensor sigmoid_mul(const torch::stable::Tensor& gate, const torch::stable::Tensor& x);
torch::stable::Tensor clamped_swiglu(const torch::stable::Tensor& gate, const torch::stable::Tensor& up, double alpha,
                                     double limit);
torch::stable::Tensor sum(const torch::stable::Tensor& a, const torch::stable::Tensor& b);

}  // namespace ptq::steps
