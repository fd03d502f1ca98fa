#if defined(__x86_64__)
#define PTQ_LEVEL avx512
#include "mixers/mixers.h"
#endif
