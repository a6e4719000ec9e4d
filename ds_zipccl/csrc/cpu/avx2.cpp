// The AVX2 level: Haswell, Zen and later. kernels/build/__init__.py has its compiler flags.
#if defined(__x86_64__)
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
#include "cpu/simd/avx2.h"

ZIPCCL_LEVEL(avx2, Avx2Lanes);
#endif
