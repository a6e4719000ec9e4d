// The portable level: any CPU.
#include "cpu_delta_chunk.h"
#include "cpu_encode.h"
#include "cpu_hash.h"
#include "cpu_level.h"
#include "cpu_sum.h"
#include "lanes_scalar.h"

ZIPCCL_LEVEL(scalar, ScalarLanes);
