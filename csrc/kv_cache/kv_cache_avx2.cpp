#if defined(__x86_64__)
#define PTQ_LEVEL avx2
#include "kv_cache/kernel.h"
#endif
