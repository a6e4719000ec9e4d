// The portable level: any CPU.
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
#include "cpu/simd/scalar.h"

ZIPCCL_LEVEL(scalar, ScalarLanes);
