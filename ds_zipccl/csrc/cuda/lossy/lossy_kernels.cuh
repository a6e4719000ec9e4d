// The lossy kernels by the names that the launchers use, as in kernels.cuh, which includes this file. Part 32: rounded words;
// part 64: scaled payloads; part 128: ZFP.
#pragma once
#include "cuda/lossy/rounded.cuh"
#include "cuda/lossy/scaled.cuh"
#include "cuda/lossy/zfp.cuh"

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

// Encoder, decoder and projection of a codec for a type.
#define ZIPCCL_LOSSY(codec, Job, type, F)                                       \
  ZIPCCL_KERNEL(4) zipccl_##codec##_encode_##type(const zipccl::Job job) {      \
    if (job.numel) zipccl::encode_##codec<zipccl::F>(job);                      \
  }                                                                             \
  ZIPCCL_KERNEL(4) zipccl_##codec##_decode_##type(const zipccl::Job job) {      \
    if (job.numel) zipccl::decode_##codec<zipccl::F>(job);                      \
  }                                                                             \
  ZIPCCL_KERNEL(4) zipccl_##codec##_project_##type(const zipccl::Job job) {     \
    if (job.numel) zipccl::project_##codec<zipccl::F>(job);                     \
  }
#define ZIPCCL_EACH_OF(each, codec, Job, type) \
  each(zipccl_##codec##_encode_##type, Job)    \
  each(zipccl_##codec##_decode_##type, Job)    \
  each(zipccl_##codec##_project_##type, Job)

#if ZIPCCL_PARTS & 64
ZIPCCL_LOSSY(scaled, ScaledJob, bf16, Bf16)
ZIPCCL_LOSSY(scaled, ScaledJob, fp16, Fp16)
ZIPCCL_LOSSY(scaled, ScaledJob, fp32, Fp32)
#define ZIPCCL_EACH_64(each)                      \
  ZIPCCL_EACH_OF(each, scaled, ScaledJob, bf16)   \
  ZIPCCL_EACH_OF(each, scaled, ScaledJob, fp16)   \
  ZIPCCL_EACH_OF(each, scaled, ScaledJob, fp32)
#else
#define ZIPCCL_EACH_64(each)
#endif
#if ZIPCCL_PARTS & 128
ZIPCCL_LOSSY(zfp, ZfpJob, bf16, Bf16)
ZIPCCL_LOSSY(zfp, ZfpJob, fp16, Fp16)
ZIPCCL_LOSSY(zfp, ZfpJob, fp32, Fp32)
#define ZIPCCL_EACH_128(each)              \
  ZIPCCL_EACH_OF(each, zfp, ZfpJob, bf16)  \
  ZIPCCL_EACH_OF(each, zfp, ZfpJob, fp16)  \
  ZIPCCL_EACH_OF(each, zfp, ZfpJob, fp32)
#else
#define ZIPCCL_EACH_128(each)
#endif
#undef ZIPCCL_LOSSY

// Calls each(kernel, type of its parameters) for every lossy kernel of this translation unit.
#define ZIPCCL_EACH_LOSSY(each) ZIPCCL_EACH_32(each) ZIPCCL_EACH_64(each) ZIPCCL_EACH_128(each)

static_assert(sizeof(zipccl::UntrimmedShared) <= 2048 && sizeof(zipccl::ZfpShared) <= 6144, "SHARED_BYTES");
static_assert(sizeof(zipccl::UntrimmedJobs) <= 4096, "parameters");
