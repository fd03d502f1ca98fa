// Products with few or many tokens as functions, for ops that do several steps at once.
#pragma once

#include <vector>

#include "minifloat_tiled/held.h"

namespace ptq::minifloat_tiled {

// Products whose sums and `spread` are made, each of few or many tokens.
void run_quantized(const std::vector<Quantized>& problems);
void run_floats(const std::vector<Floats>& problems);

}  // namespace ptq::minifloat_tiled
