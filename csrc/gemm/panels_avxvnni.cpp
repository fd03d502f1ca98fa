#if defined(__x86_64__)
#define PTQ_PANELS_LEVEL panels_avxvnni
#include "gemm/panels.h"
#endif
