#if defined(__x86_64__)
#include "gemm/amx.h"

namespace ptq::gemm {

const PanelKernels panels_amx{{tile_tokens, panel_tiles}, {tile_tokens, panel_tiles}, pack, multiply};

}  // namespace ptq::gemm
#endif
