// The lossy kernels by the names that the launchers use, as in kernels.cuh, which includes this file. Part 32: rounded words.
#pragma once
#include "cuda/rounded.cuh"

#define ZIPCCL_ROUNDED(type, F, Coded, encode_blocks)                                              \
  ZIPCCL_KERNEL(4) zipccl_round_##type(const zipccl::RoundJob job) {                               \
    if (job.numel) zipccl::round_words<zipccl::F>(job);                                            \
  }                                                                                                \
  ZIPCCL_KERNEL(encode_blocks) zipccl_encode_##type##_rounded(const zipccl::EncodeJobs jobs) {     \
    if (jobs.block) zipccl::encode<zipccl::Coded, zipccl::OfRounded<zipccl::Cascade>>(jobs);       \
  }
#define ZIPCCL_TRIMMED(type, F, decode_blocks)                                                     \
  ZIPCCL_KERNEL(decode_blocks) zipccl_decode_##type##_rounded(const zipccl::DecodeJobs jobs) {     \
    if (jobs.block) zipccl::decode<zipccl::Trimmed<zipccl::F>>(jobs);                              \
  }                                                                                                \
  ZIPCCL_KERNEL(4) zipccl_untrimmed_##type(const zipccl::UntrimmedJobs jobs) {                     \
    if (jobs.count) zipccl::count_untrimmed<zipccl::F>(jobs);                                      \
  }

#define ZIPCCL_EACH_ROUNDED(each, type) \
  each(zipccl_round_##type, RoundJob)   \
  each(zipccl_encode_##type##_rounded, EncodeJobs)
#define ZIPCCL_EACH_TRIMMED(each, type)            \
  ZIPCCL_EACH_ROUNDED(each, type)                  \
  each(zipccl_decode_##type##_rounded, DecodeJobs) \
  each(zipccl_untrimmed_##type, UntrimmedJobs)

#if ZIPCCL_PARTS & 32
ZIPCCL_ROUNDED(bf16, Bf16, Trimmed<zipccl::Bf16>, 4)
ZIPCCL_ROUNDED(fp16, Fp16, Trimmed<zipccl::Fp16>, 4)
ZIPCCL_ROUNDED(fp32, Fp32, Fp32, 2)
ZIPCCL_TRIMMED(bf16, Bf16, 4)
ZIPCCL_TRIMMED(fp16, Fp16, 4)
#define ZIPCCL_EACH_32(each) ZIPCCL_EACH_TRIMMED(each, bf16) ZIPCCL_EACH_TRIMMED(each, fp16) ZIPCCL_EACH_ROUNDED(each, fp32)
#else
#define ZIPCCL_EACH_32(each)
#endif
#undef ZIPCCL_ROUNDED
#undef ZIPCCL_TRIMMED

// Calls each(kernel, type of its parameters) for every lossy kernel of this translation unit.
#define ZIPCCL_EACH_LOSSY(each) ZIPCCL_EACH_32(each)

static_assert(sizeof(zipccl::UntrimmedShared) <= 2048, "SHARED_BYTES");
static_assert(sizeof(zipccl::UntrimmedJobs) <= 4096, "parameters");
