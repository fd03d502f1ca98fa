#if defined(__x86_64__)
#define PTQ_LEVEL avx512
#include "minifloat_tiled/decode.h"
#endif
