#define PTQ_LEVEL portable
#include "e8p_tiled/decode.h"
