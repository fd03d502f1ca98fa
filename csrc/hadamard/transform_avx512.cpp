#if defined(__x86_64__)
#define PTQ_LEVEL run_avx512
#include "hadamard/kernel.h"
#endif
