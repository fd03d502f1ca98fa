// Small floats in the panels of gemm/amx.h.
#if defined(__x86_64__)
#include "minifloat_tiled/panels.h"

namespace ptq::minifloat_tiled {

extern const gemm::Unpack signed_bytes_amx;
const gemm::Unpack signed_bytes_amx = unpack_bytes;

}  // namespace ptq::minifloat_tiled
#endif
