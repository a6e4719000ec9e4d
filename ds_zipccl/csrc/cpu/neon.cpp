// The NEON level: every 64-bit Arm CPU.
#if defined(__aarch64__)
#include "cpu/delta/delta_chunk.h"
#include "cpu/encode.h"
#include "cpu/hash.h"
#include "cpu/level.h"
#include "cpu/lossy/lowrank.h"
#include "cpu/lossy/rounded.h"
#include "cpu/rows/rows.h"
#include "cpu/lossy/scaled.h"
#include "cpu/lossy/squared_error.h"
#include "cpu/sum.h"
#include "cpu/simd/neon.h"

ZIPCCL_LEVEL(neon, NeonLanes);
#endif
