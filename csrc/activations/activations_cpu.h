// ptq::quantize_tokens for ops that do several steps at once.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "activations/quantize.h"

namespace ptq::activations {

std::tuple<torch::stable::Tensor, torch::stable::Tensor> quantize_tokens(const torch::stable::Tensor& x, int64_t bits,
                                                                         double clip);

// The tokens of x, and the tensor that holds them.
struct HeldTokens {
    torch::stable::Tensor x;
    Numbers numbers;
};
HeldTokens hold(const torch::stable::Tensor& x, int64_t bits, double clip);

}  // namespace ptq::activations
