// The kernels by the names that the launchers use. The number is the blocks of threads that a multiprocessor shall hold at a time, which
// bounds the registers.
#pragma once
#include "cuda/decode.cuh"
#include "cuda/encode.cuh"
#include "cuda/hash.cuh"
#include "cuda/sum.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define ZIPCCL_DECODE_BLOCKS 3  // with 64 registers the decoder spills there
#else
#define ZIPCCL_DECODE_BLOCKS 4
#endif

#define ZIPCCL_CODEC(type, F, encode_blocks, decode_blocks)                                      \
  ZIPCCL_KERNEL(encode_blocks) zipccl_encode_##type##_cascade(const zipccl::EncodeJobs jobs) {    \
    zipccl::encode<zipccl::F, zipccl::Alone<zipccl::Cascade>>(jobs);                                            \
  }                                                                                              \
  ZIPCCL_KERNEL(encode_blocks) zipccl_encode_##type##_wide(const zipccl::EncodeJobs jobs) {     \
    zipccl::encode<zipccl::F, zipccl::Alone<zipccl::Wide>>(jobs);                                             \
  }                                                                                              \
  ZIPCCL_KERNEL(decode_blocks) zipccl_decode_##type(const zipccl::DecodeJobs jobs) { zipccl::decode<zipccl::F>(jobs); }
#define ZIPCCL_DELTA(type, F, encode_blocks, decode_blocks)                                       \
  ZIPCCL_KERNEL(encode_blocks) zipccl_encode_##type##_delta(const zipccl::EncodeJobs jobs) {      \
    zipccl::encode<zipccl::F, zipccl::AgainstBase>(jobs);                                        \
  }                                                                                              \
  ZIPCCL_KERNEL(decode_blocks) zipccl_decode_##type##_delta(const zipccl::DecodeJobs jobs) {      \
    zipccl::decode<zipccl::F, true>(jobs);                                                       \
  }
#define ZIPCCL_SUM(type, F) \
  ZIPCCL_KERNEL(2) zipccl_decode_sum_##type(const zipccl::SumJob job) { zipccl::decode_sum<zipccl::F>(job); }

ZIPCCL_CODEC(bf16, Bf16, 4, ZIPCCL_DECODE_BLOCKS)
ZIPCCL_CODEC(fp16, Fp16, 4, ZIPCCL_DECODE_BLOCKS)
ZIPCCL_CODEC(fp32, Fp32, 2, 3)
ZIPCCL_CODEC(e4m3, E4m3, 4, ZIPCCL_DECODE_BLOCKS)
ZIPCCL_CODEC(e5m2, E5m2, 4, ZIPCCL_DECODE_BLOCKS)
ZIPCCL_DELTA(bf16, Bf16, 3, 3)
ZIPCCL_DELTA(fp16, Fp16, 3, 3)
ZIPCCL_DELTA(fp32, Fp32, 2, 2)
ZIPCCL_SUM(bf16, Bf16)
ZIPCCL_SUM(fp16, Fp16)
ZIPCCL_SUM(fp32, Fp32)
#undef ZIPCCL_CODEC
#undef ZIPCCL_DELTA
#undef ZIPCCL_SUM
ZIPCCL_KERNEL(4) zipccl_hash(const zipccl::HashJob job) { zipccl::hash_region(job, gridDim.x); }
#undef ZIPCCL_DECODE_BLOCKS

// Calls each(kernel, type of its parameters).
#define ZIPCCL_CODEC_OF(each, type)                 \
  each(zipccl_encode_##type##_cascade, EncodeJobs)   \
  each(zipccl_encode_##type##_wide, EncodeJobs)    \
  each(zipccl_decode_##type, DecodeJobs)
#define ZIPCCL_EACH_KERNEL(each)                                                               \
  ZIPCCL_CODEC_OF(each, bf16)                                                                  \
  ZIPCCL_CODEC_OF(each, fp16)                                                                  \
  ZIPCCL_CODEC_OF(each, fp32)                                                                  \
  ZIPCCL_CODEC_OF(each, e4m3)                                                                  \
  ZIPCCL_CODEC_OF(each, e5m2)                                                                  \
  each(zipccl_encode_bf16_delta, EncodeJobs) each(zipccl_decode_bf16_delta, DecodeJobs)          \
  each(zipccl_encode_fp16_delta, EncodeJobs) each(zipccl_decode_fp16_delta, DecodeJobs)          \
  each(zipccl_encode_fp32_delta, EncodeJobs) each(zipccl_decode_fp32_delta, DecodeJobs)          \
  each(zipccl_hash, HashJob)                                                                     \
  each(zipccl_decode_sum_bf16, SumJob) each(zipccl_decode_sum_fp16, SumJob) each(zipccl_decode_sum_fp32, SumJob)

// The shared memory that kernels/cuda.py asks for suffices.
#define ZIPCCL_FITS(What, F, bytes) static_assert(sizeof(zipccl::What##Shared<zipccl::F>) <= (bytes), "SHARED_BYTES")
ZIPCCL_FITS(Encode, E4m3, 30720);
ZIPCCL_FITS(Encode, Bf16, 47104);
ZIPCCL_FITS(Encode, Fp32, 79872);
ZIPCCL_FITS(Decode, E4m3, 25088);
ZIPCCL_FITS(Decode, Bf16, 33280);
ZIPCCL_FITS(Decode, Fp32, 49664);
ZIPCCL_FITS(Sum, Bf16, 50176);
ZIPCCL_FITS(Sum, Fp32, 66560);
#undef ZIPCCL_FITS
static_assert(sizeof(zipccl::EncodeJobs) <= 4096 && sizeof(zipccl::DecodeJobs) <= 4096 && sizeof(zipccl::SumJob) <= 4096, "parameters");
