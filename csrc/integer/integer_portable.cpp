#define PTQ_LEVEL portable
#include "integer/kernel.h"
