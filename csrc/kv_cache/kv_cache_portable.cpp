#define PTQ_LEVEL portable
#include "kv_cache/kernel.h"
