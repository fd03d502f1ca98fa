#if defined(__x86_64__)
#define PTQ_LEVEL run_avx2
#include "hadamard/kernel.h"
#endif
