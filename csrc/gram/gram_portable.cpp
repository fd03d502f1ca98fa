#define PTQ_LEVEL portable
#include "gram/gram.h"
