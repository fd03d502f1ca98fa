#if defined(__x86_64__)
#define PTQ_LEVEL avxvnni
#include "e8p_tiled/decode.h"
#endif
