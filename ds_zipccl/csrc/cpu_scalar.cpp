// The portable level: any CPU.
#include "cpu_encode.h"
#include "cpu_level.h"
#include "cpu_sum.h"
#include "lanes_scalar.h"

ZIPCCL_LEVEL(scalar, ScalarLanes);
