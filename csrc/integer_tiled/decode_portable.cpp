#define PTQ_LEVEL portable
#include "integer_tiled/decode.h"
