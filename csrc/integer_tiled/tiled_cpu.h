// ptq::integer_linears_quantized and ptq::integer_linears_tiled as functions, for ops that do several steps at once.
#pragma once

#include "integer_tiled/held.h"

namespace ptq::integer_tiled {

Tensors linears_quantized(const Tensor& q, const Tensor& q_scale, const Tensors& tiles, const Tensors& scale,
                          const Tensors& zero, const Tensors& bias, const std::vector<int64_t>& n, int64_t bits,
                          int64_t group_size, ScalarType dtype);
Tensors linears_tiled(const Tensor& x, const Tensors& tiles, const Tensors& scale, const Tensors& zero,
                      const Tensors& bias, const std::vector<int64_t>& n, int64_t bits, int64_t group_size);

}  // namespace ptq::integer_tiled
