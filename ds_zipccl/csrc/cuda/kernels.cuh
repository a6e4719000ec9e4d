// The kernels by the names that the launchers use. The number is the blocks of threads that a multiprocessor shall hold at a time, which
// bounds the registers. A launch with parameters that are all zero does nothing: such launches load the kernels.
#pragma once
#include "cuda/decode.cuh"
#include "cuda/encode.cuh"
#include "cuda/rows.cuh"
#include "cuda/sum.cuh"

// Bits of the parts that this translation unit has. The builds compile parts side by side, because all together take a minute.
#ifndef ZIPCCL_PARTS
#define ZIPCCL_PARTS 255
#endif
#include "cuda/lossy/lossy_kernels.cuh"

// The encoders of differences need many registers, more of them on later architectures. sm_120 has shared memory for two blocks only.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
#define ZIPCCL_DELTA_BLOCKS 2
#else
#define ZIPCCL_DELTA_BLOCKS 3
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
#define ZIPCCL_FP16_DELTA_BLOCKS 2
#else
#define ZIPCCL_FP16_DELTA_BLOCKS 3
#endif

#define ZIPCCL_CODEC(type, F, encode_blocks, decode_blocks)                                      \
  ZIPCCL_KERNEL(encode_blocks) zipccl_encode_##type##_cascade(const zipccl::EncodeJobs jobs) {    \
    if (jobs.block) zipccl::encode<zipccl::F, zipccl::Alone<zipccl::Cascade>>(jobs);                \
  }                                                                                              \
  ZIPCCL_KERNEL(encode_blocks) zipccl_encode_##type##_wide(const zipccl::EncodeJobs jobs) {     \
    if (jobs.block) zipccl::encode<zipccl::F, zipccl::Alone<zipccl::Wide>>(jobs);                   \
  }                                                                                              \
  ZIPCCL_KERNEL(decode_blocks) zipccl_decode_##type(const zipccl::DecodeJobs jobs) {                     \
    if (jobs.block) zipccl::decode<zipccl::F>(jobs);                                               \
  }
#define ZIPCCL_DELTA(type, F, encode_blocks, decode_blocks)                                       \
  ZIPCCL_KERNEL(encode_blocks) zipccl_encode_##type##_delta(const zipccl::EncodeJobs jobs) {      \
    if (jobs.block) zipccl::encode<zipccl::F, zipccl::AgainstBase>(jobs);                          \
  }                                                                                              \
  ZIPCCL_KERNEL(decode_blocks) zipccl_decode_##type##_delta(const zipccl::DecodeJobs jobs) {      \
    if (jobs.block) zipccl::decode<zipccl::F, true>(jobs);                                         \
  }
#define ZIPCCL_SUM(type, F)                                                                        \
  ZIPCCL_KERNEL(2) zipccl_decode_sum_##type(const zipccl::SumJob job) {                             \
    if (job.block) zipccl::decode_sum<zipccl::F>(job);                                             \
  }
#define ZIPCCL_ROWS(type, F)                                                                \
  ZIPCCL_KERNEL(4) zipccl_row_sums_##type(const zipccl::RowPairs job) {                      \
    if (job.count) zipccl::row_sums<zipccl::F>(job);                                         \
  }                                                                                         \
  ZIPCCL_KERNEL(4) zipccl_predict_rows_##type(const zipccl::RowPairs job) {                  \
    if (job.count) zipccl::predict_rows<zipccl::F>(job);                                     \
  }

// ZIPCCL_EACH_...: call each(kernel, type of its parameters) for the kernels of a type.
#define ZIPCCL_EACH_CODEC(each, type)              \
  each(zipccl_encode_##type##_cascade, EncodeJobs) \
  each(zipccl_encode_##type##_wide, EncodeJobs)    \
  each(zipccl_decode_##type, DecodeJobs)
#define ZIPCCL_EACH_DELTA(each, type)            \
  each(zipccl_encode_##type##_delta, EncodeJobs) \
  each(zipccl_decode_##type##_delta, DecodeJobs)
#define ZIPCCL_EACH_WIDER(each, type) \
  ZIPCCL_EACH_CODEC(each, type)       \
  ZIPCCL_EACH_DELTA(each, type)       \
  each(zipccl_decode_sum_##type, SumJob) \
  each(zipccl_row_sums_##type, RowPairs) \
  each(zipccl_predict_rows_##type, RowPairs)

#if ZIPCCL_PARTS & 1
ZIPCCL_CODEC(bf16, Bf16, 4, 4)
ZIPCCL_DELTA(bf16, Bf16, ZIPCCL_DELTA_BLOCKS, 3)
ZIPCCL_SUM(bf16, Bf16)
ZIPCCL_ROWS(bf16, Bf16)
#define ZIPCCL_EACH_1(each) ZIPCCL_EACH_WIDER(each, bf16)
#else
#define ZIPCCL_EACH_1(each)
#endif
#if ZIPCCL_PARTS & 2
ZIPCCL_CODEC(fp16, Fp16, 4, 4)
ZIPCCL_DELTA(fp16, Fp16, ZIPCCL_FP16_DELTA_BLOCKS, 3)
ZIPCCL_SUM(fp16, Fp16)
ZIPCCL_ROWS(fp16, Fp16)
#define ZIPCCL_EACH_2(each) ZIPCCL_EACH_WIDER(each, fp16)
#else
#define ZIPCCL_EACH_2(each)
#endif
#if ZIPCCL_PARTS & 4
ZIPCCL_CODEC(fp32, Fp32, 2, 3)
ZIPCCL_DELTA(fp32, Fp32, 2, 2)
ZIPCCL_SUM(fp32, Fp32)
ZIPCCL_ROWS(fp32, Fp32)
#define ZIPCCL_EACH_4(each) ZIPCCL_EACH_WIDER(each, fp32)
#else
#define ZIPCCL_EACH_4(each)
#endif
#if ZIPCCL_PARTS & 8
ZIPCCL_CODEC(e4m3, E4m3, 4, 4)
ZIPCCL_DELTA(u8, Byte, 3, 3)
#define ZIPCCL_EACH_8(each) ZIPCCL_EACH_CODEC(each, e4m3) ZIPCCL_EACH_DELTA(each, u8)
#else
#define ZIPCCL_EACH_8(each)
#endif
#if ZIPCCL_PARTS & 16
ZIPCCL_CODEC(e5m2, E5m2, 4, 4)
ZIPCCL_KERNEL(4) zipccl_hash(const zipccl::HashJobs jobs) {
  if (jobs.count) zipccl::hash_regions(jobs);
}
ZIPCCL_KERNEL(4) zipccl_find_rows(const zipccl::FindRows job) {
  if (job.count) zipccl::find_rows(job);
}
#define ZIPCCL_EACH_16(each) ZIPCCL_EACH_CODEC(each, e5m2) each(zipccl_hash, HashJobs) each(zipccl_find_rows, FindRows)
#else
#define ZIPCCL_EACH_16(each)
#endif
#undef ZIPCCL_CODEC
#undef ZIPCCL_DELTA
#undef ZIPCCL_DELTA_BLOCKS
#undef ZIPCCL_FP16_DELTA_BLOCKS
#undef ZIPCCL_SUM
#undef ZIPCCL_ROWS

// Calls each(kernel, type of its parameters) for every kernel of this translation unit.
#define ZIPCCL_EACH_KERNEL(each) \
  ZIPCCL_EACH_1(each) ZIPCCL_EACH_2(each) ZIPCCL_EACH_4(each) ZIPCCL_EACH_8(each) ZIPCCL_EACH_16(each) \
  ZIPCCL_EACH_LOSSY(each)

// The shared memory that kernels/cuda/backend.py asks for suffices.
#define ZIPCCL_FITS(What, F, bytes) static_assert(sizeof(zipccl::What##Shared<zipccl::F>) <= (bytes), "SHARED_BYTES")
ZIPCCL_FITS(Encode, E4m3, 30720);
ZIPCCL_FITS(Encode, Byte, 30720);
ZIPCCL_FITS(Encode, Bf16, 47104);
ZIPCCL_FITS(Encode, Fp32, 79872);
ZIPCCL_FITS(Decode, E4m3, 25088);
ZIPCCL_FITS(Decode, Byte, 25088);
ZIPCCL_FITS(Decode, Bf16, 33280);
ZIPCCL_FITS(Decode, Fp32, 49664);
ZIPCCL_FITS(Sum, Bf16, 50176);
ZIPCCL_FITS(Sum, Fp32, 66560);
#undef ZIPCCL_FITS
static_assert(sizeof(zipccl::EncodeJobs) <= 4096 && sizeof(zipccl::DecodeJobs) <= 4096, "parameters");
static_assert(sizeof(zipccl::SumJob) <= 4096 && sizeof(zipccl::HashJobs) <= 4096, "parameters");
