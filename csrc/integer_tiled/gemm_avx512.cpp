#if defined(__x86_64__)
#define PTQ_GEMM_LEVEL gemm_avx512
#include "integer_tiled/gemm.h"
#endif
