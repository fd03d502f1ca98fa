// E8P weights in the panels of gemm/amx.h.
#if defined(__x86_64__)
#include "e8p_tiled/panels.h"

namespace ptq::e8p_tiled {

extern const gemm::Unpack signed_bytes_amx;
const gemm::Unpack signed_bytes_amx = unpack_bytes;

}  // namespace ptq::e8p_tiled
#endif
