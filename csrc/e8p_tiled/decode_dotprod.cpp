#if defined(__aarch64__)
#define PTQ_LEVEL dotprod
#include "e8p_tiled/decode.h"
#endif
