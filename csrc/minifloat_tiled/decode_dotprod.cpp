#if defined(__aarch64__)
#define PTQ_LEVEL dotprod
#include "minifloat_tiled/decode.h"
#endif
