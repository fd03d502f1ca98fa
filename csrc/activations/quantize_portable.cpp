#define PTQ_LEVEL portable
#include "activations/kernel.h"
