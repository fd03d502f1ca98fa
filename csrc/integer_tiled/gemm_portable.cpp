#define PTQ_GEMM_LEVEL gemm_portable
#include "integer_tiled/gemm.h"
