// Integer weights in panels, at levels where gemm/panels_kernels.h is faster than gemm.h.
#pragma once

#include "gemm/panels_kernels.h"

namespace ptq::integer_tiled {

// The codes of a `Weight` as quads, and as pairs, less zero. Null: not at this level.
struct PanelUnpack {
    gemm::Unpack bytes = nullptr, pairs = nullptr;
};

extern const PanelUnpack panels_amx;

}  // namespace ptq::integer_tiled
