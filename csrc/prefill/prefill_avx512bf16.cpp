#if defined(__x86_64__)
#define PTQ_LEVEL avx512bf16
#include "prefill/attend.h"
#endif
