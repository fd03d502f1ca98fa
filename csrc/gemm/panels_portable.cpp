#define PTQ_PANELS_LEVEL panels_portable
#include "gemm/panels.h"
