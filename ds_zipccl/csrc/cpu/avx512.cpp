// The AVX-512 level: Ice Lake, Zen 4 and later. kernels/build.py has its compiler flags.
#if defined(__x86_64__)
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
#include "cpu/change_avx512.h"

ZIPCCL_LEVEL(avx512, Avx512Lanes);
#endif
