#define PTQ_LEVEL run_portable
#include "hadamard/kernel.h"
