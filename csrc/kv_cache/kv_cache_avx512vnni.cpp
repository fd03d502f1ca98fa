#if defined(__x86_64__)
#define PTQ_LEVEL avx512vnni
#include "kv_cache/kernel.h"
#endif
