// The AVX-512 level: Ice Lake, Zen 4 and later. Its compiler flags: op_builder/cache.py.
#if defined(__x86_64__)
#include "cpu_delta_chunk.h"
#include "cpu_encode.h"
#include "cpu_hash.h"
#include "cpu_level.h"
#include "cpu_sum.h"
#include "lanes_avx512.h"

ZIPCCL_LEVEL(avx512, Avx512Lanes);
#endif
