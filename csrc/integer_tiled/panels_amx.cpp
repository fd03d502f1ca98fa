// Integer weights in the panels of gemm/amx.h.
#if defined(__x86_64__)
#include "integer_tiled/panels.h"

namespace ptq::integer_tiled {

extern const gemm::Unpack signed_bytes_amx;
const gemm::Unpack signed_bytes_amx = unpack_bytes;

}  // namespace ptq::integer_tiled
#endif
