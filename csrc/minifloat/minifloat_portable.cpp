#define PTQ_LEVEL portable
#include "minifloat/kernel.h"
