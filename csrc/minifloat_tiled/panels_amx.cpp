// Small floats in the panels of gemm/amx.h.
#if defined(__x86_64__)
#include "minifloat_tiled/panels.h"

namespace ptq::minifloat_tiled {

extern const gemm::PanelUnpack panels_amx;
const gemm::PanelUnpack panels_amx{unpack_bytes, unpack_pairs};

}  // namespace ptq::minifloat_tiled
#endif
