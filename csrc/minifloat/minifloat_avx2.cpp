#if defined(__x86_64__)
#define PTQ_LEVEL avx2
#include "minifloat/kernel.h"
#endif
