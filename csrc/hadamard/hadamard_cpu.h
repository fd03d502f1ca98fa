// ptq::hadamard and ptq::hadamard_quantize as functions, for ops that do several steps at once. Along the last axis
// each vector may have signs of its own: as many as x has elements.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace ptq::hadamard {

torch::stable::Tensor hadamard(const torch::stable::Tensor& x, const std::optional<torch::stable::Tensor>& signs,
                               const std::vector<torch::stable::Tensor>& factors, int64_t order, int64_t dim,
                               bool transpose);
std::tuple<torch::stable::Tensor, torch::stable::Tensor> hadamard_quantize(
    const torch::stable::Tensor& x, const std::optional<torch::stable::Tensor>& signs,
    const std::vector<torch::stable::Tensor>& factors, int64_t order, int64_t bits, double clip);

}  // namespace ptq::hadamard
