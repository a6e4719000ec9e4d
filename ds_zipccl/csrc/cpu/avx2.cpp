// The AVX2 level: Haswell, Zen and later. kernels/build/__init__.py has its compiler flags.
#if defined(__x86_64__)
#include "cpu/simd/parts.h"
#include "cpu/simd/avx2.h"

ZIPCCL_LEVEL(avx2, Avx2Lanes);
#endif
