#define PTQ_LEVEL portable
#include "steps/steps.h"
