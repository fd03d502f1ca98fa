#define PTQ_LEVEL portable
#include "dense/linear.h"
