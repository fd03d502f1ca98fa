#if defined(__x86_64__)
#define PTQ_LEVEL avxvnni
#include "minifloat_tiled/decode.h"
#endif
