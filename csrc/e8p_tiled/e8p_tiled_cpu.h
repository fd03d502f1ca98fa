// Products with few or many tokens as functions, for ops that do several steps at once.
#pragma once

#include <vector>

#include "e8p_tiled/held.h"

namespace ptq::e8p_tiled {

// Products whose tokens are arranged, each of few or many.
void run_quantized(const std::vector<Quantized>& problems);
void run_floats(const std::vector<Floats>& problems);

}  // namespace ptq::e8p_tiled
