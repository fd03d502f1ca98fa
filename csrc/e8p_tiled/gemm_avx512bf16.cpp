#if defined(__x86_64__)
#define PTQ_GEMM_LEVEL gemm_avx512bf16
#include "e8p_tiled/gemm.h"
#endif
