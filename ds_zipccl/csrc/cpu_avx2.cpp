// The AVX2 level: x86-64 with AVX2 and BMI2 (Haswell, Zen and later).
#if defined(__x86_64__)
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,bmi,bmi2,popcnt"))), apply_to = function)
#else
#pragma GCC target("avx2,bmi,bmi2,popcnt")
#endif

#define ZIPCCL_BMI2
#include "cpu_decode.h"
#include "cpu_encode.h"
#include "cpu_level.h"
#include "lanes_avx2.h"

ZIPCCL_LEVEL(avx2, Avx2Lanes);

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
