#if defined(__x86_64__)
#define PTQ_LEVEL avx512bf16
#include "e8p_tiled/decode.h"
#endif
