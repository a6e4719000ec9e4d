// The AVX-512 level: Ice Lake, Zen 4 and later. kernels/build/__init__.py has its compiler flags.
#if defined(__x86_64__)
#include "cpu/simd/parts.h"
#include "cpu/delta/change_avx512.h"

ZIPCCL_LEVEL(avx512, Avx512Lanes);
#endif
