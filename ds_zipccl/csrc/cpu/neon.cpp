// The NEON level: every 64-bit Arm CPU.
#if defined(__aarch64__)
#include "cpu/simd/parts.h"
#include "cpu/simd/neon.h"

ZIPCCL_LEVEL(neon, NeonLanes);
#endif
