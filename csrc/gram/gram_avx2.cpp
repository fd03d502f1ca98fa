#if defined(__x86_64__)
#define PTQ_LEVEL avx2
#include "gram/gram.h"
#endif
