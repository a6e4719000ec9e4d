// The NEON level: every 64-bit Arm CPU.
#if defined(__aarch64__)
#include "cpu/delta_chunk.h"
#include "cpu/encode.h"
#include "cpu/hash.h"
#include "cpu/level.h"
#include "cpu/lowrank.h"
#include "cpu/rounded.h"
#include "cpu/rows.h"
#include "cpu/scaled.h"
#include "cpu/squares.h"
#include "cpu/sum.h"
#include "cpu/lanes_neon.h"

ZIPCCL_LEVEL(neon, NeonLanes);
#endif
