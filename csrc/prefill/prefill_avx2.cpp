#if defined(__x86_64__)
#define PTQ_LEVEL avx2
#include "prefill/attend.h"
#endif
