#define PTQ_LEVEL portable
#include "e8p/kernel.h"
