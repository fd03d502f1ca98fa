#if defined(__x86_64__)
#define PTQ_LEVEL avx512bf16
#include "steps/steps.h"
#endif
