// Products with few or many tokens as functions, for ops that do several steps at once.
#pragma once

#include "integer_tiled/held.h"

namespace ptq::integer_tiled {

// The products of weights that share an input: x [*t, k], or its integers, int8, and their scales.
Tensors multiply_floats(const Tensor& x, const std::vector<HeldWeight>& held);
Tensors multiply_quantized(const Tensor& q, const Tensor& q_scale, const std::vector<HeldWeight>& held,
                           ScalarType dtype);

// Whether there are so many tokens that they go to gemm/, which needs no sums and no `arranged`.
bool is_many(const Quantized& p);
bool is_many(const Floats& p);
// Products of few tokens, whose sums and `arranged` are made, and of many.
void run_quantized(const std::vector<Quantized>& problems);
void run_floats(const std::vector<Floats>& problems);

}  // namespace ptq::integer_tiled
