#if defined(__x86_64__)
#define PTQ_PANELS_LEVEL panels_avx512
#include "gemm/panels.h"
#endif
