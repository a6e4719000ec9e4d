// The portable level: any CPU.
#include "cpu/simd/parts.h"
#include "cpu/simd/scalar.h"

ZIPCCL_LEVEL(scalar, ScalarLanes);
