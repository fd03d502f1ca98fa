#define PTQ_LEVEL portable
#include "mixers/mixers.h"
