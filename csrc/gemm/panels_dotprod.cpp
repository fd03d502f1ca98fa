#if defined(__aarch64__)
#define PTQ_PANELS_LEVEL panels_dotprod
#include "gemm/panels.h"
#endif
