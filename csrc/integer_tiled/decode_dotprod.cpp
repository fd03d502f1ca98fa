#if defined(__aarch64__)
#define PTQ_LEVEL dotprod
#include "integer_tiled/decode.h"
#endif
