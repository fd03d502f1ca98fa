#if defined(__x86_64__)
#define PTQ_LEVEL amx
#include "prefill/attend.h"
#endif
