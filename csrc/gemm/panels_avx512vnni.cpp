#if defined(__x86_64__)
#define PTQ_PANELS_LEVEL panels_avx512vnni
#include "gemm/panels.h"
#endif
