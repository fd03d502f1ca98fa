#if defined(__x86_64__)
#define PTQ_LEVEL avx512
#include "gram/gram.h"
#endif
