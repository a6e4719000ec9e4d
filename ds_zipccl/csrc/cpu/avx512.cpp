// The AVX-512 level: Ice Lake, Zen 4 and later. kernels/build/__init__.py has its compiler flags.
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
#include "cpu/delta/change_avx512.h"

ZIPCCL_LEVEL(avx512, Avx512Lanes);
#endif
