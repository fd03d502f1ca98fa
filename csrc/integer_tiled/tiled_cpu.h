// ptq::integer_linears_quantized and ptq::integer_linears_tiled as functions, for ops that do several steps at once.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <vector>

namespace ptq::integer_tiled {

using Tensors = std::vector<torch::stable::Tensor>;

Tensors linears_quantized(const torch::stable::Tensor& q, const torch::stable::Tensor& q_scale, const Tensors& tiles,
                          const Tensors& scale, const Tensors& zero, const Tensors& bias, const std::vector<int64_t>& n,
                          int64_t bits, int64_t group_size, torch::headeronly::ScalarType dtype);
Tensors linears_tiled(const torch::stable::Tensor& x, const Tensors& tiles, const Tensors& scale, const Tensors& zero,
                      const Tensors& bias, const std::vector<int64_t>& n, int64_t bits, int64_t group_size);

}  // namespace ptq::integer_tiled
