// The AVX2 level: Haswell, Zen and later. Its compiler flags: op_builder/cache.py.
#if defined(__x86_64__)
#include "cpu_delta_chunk.h"
#include "cpu_encode.h"
#include "cpu_hash.h"
#include "cpu_level.h"
#include "cpu_sum.h"
#include "lanes_avx2.h"

ZIPCCL_LEVEL(avx2, Avx2Lanes);
#endif
