// ptq::quantize_tokens as a function, for ops that do several steps at once.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <tuple>

namespace ptq::activations {

std::tuple<torch::stable::Tensor, torch::stable::Tensor> quantize_tokens(const torch::stable::Tensor& x, int64_t bits,
                                                                         double clip);

}  // namespace ptq::activations
