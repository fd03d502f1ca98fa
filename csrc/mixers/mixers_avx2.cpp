#if defined(__x86_64__)
#define PTQ_LEVEL avx2
#include "mixers/mixers.h"
#endif
