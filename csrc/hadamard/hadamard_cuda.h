// The transform on a GPU as functions, for ops that do several steps at once.
#pragma once

#include <optional>
#include <tuple>
#include <vector>

#include "activations/input.cuh"
#include "cuda/torch_cuda.h"

namespace ptq::hadamard {

cuda::Tensor hadamard(const cuda::Tensor& x, const std::optional<cuda::Tensor>& signs,
                      const std::vector<cuda::Tensor>& factors, int64_t order, int64_t dim, bool transpose);
std::tuple<cuda::Tensor, cuda::Tensor> hadamard_quantize(const cuda::Tensor& x,
                                                         const std::optional<cuda::Tensor>& signs,
                                                         const std::vector<cuda::Tensor>& factors, int64_t order,
                                                         int64_t bits, double clip);

// Both with `input` in front, in one launch: the transform of every token of x (contiguous, not empty), or with bits
// its integers and their scales. `aligned`: so is all that `input` has. Nothing where the sizes need more launches.
std::vector<cuda::Tensor> of_input(const cuda::Tensor& x, const inputs::Input& input, bool aligned,
                                   const std::optional<cuda::Tensor>& signs, const std::vector<cuda::Tensor>& factors,
                                   int64_t order, int64_t bits, double clip);

}  // namespace ptq::hadamard
