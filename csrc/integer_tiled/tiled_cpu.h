// Products with few or many tokens as functions, for ops that do several steps at once.
#pragma once

#include "integer_tiled/held.h"

namespace ptq::integer_tiled {

// The products of weights that share an input: x [*t, k], or its integers, int8, and their scales.
Tensors multiply_floats(const Tensor& x, const std::vector<Held>& held);
Tensors multiply_quantized(const Tensor& q, const Tensor& q_scale, const std::vector<Held>& held, ScalarType dtype);

// Products whose sums and `spread` are made, each of few or many tokens.
void run_quantized(const std::vector<Quantized>& problems);
void run_floats(const std::vector<Floats>& problems);

}  // namespace ptq::integer_tiled
