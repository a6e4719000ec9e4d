// The portable level: any CPU.
#include "cpu_decode.h"
#include "cpu_encode.h"
#include "cpu_level.h"
#include "lanes_scalar.h"

ZIPCCL_LEVEL(scalar, ScalarLanes);
