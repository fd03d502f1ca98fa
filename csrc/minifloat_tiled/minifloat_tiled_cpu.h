// Products with few or many tokens as functions, for ops that do several steps at once.
#pragma once

#include <vector>

#include "minifloat_tiled/held.h"

namespace ptq::minifloat_tiled {

// Whether there are so many tokens that they go to gemm/, which needs no sums and no `arranged`.
bool is_many(const Quantized& p);
bool is_many(const Floats& p);
// Products of few tokens, whose sums and `arranged` are made, and of many.
void run_quantized(const std::vector<Quantized>& problems);
void run_floats(const std::vector<Floats>& problems);

}  // namespace ptq::minifloat_tiled
