#define PTQ_GEMM_LEVEL gemm_portable
#include "e8p_tiled/gemm.h"
