#define PTQ_LEVEL portable
#include "minifloat_tiled/decode.h"
