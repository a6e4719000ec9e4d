// The kernels by the names that the launchers use: one table. A launch with parameters that are all zero does nothing: such launches load
// the kernels.
#pragma once
#include "cuda/decode.cuh"
#include "cuda/encode.cuh"
#include "cuda/lossy/rounded.cuh"
#include "cuda/lossy/scaled.cuh"
#include "cuda/lossy/zfp.cuh"
#include "cuda/rows.cuh"
#include "cuda/sum.cuh"

// Bits of the parts that this translation unit has: 1 to 16 are types, 32 is rounded words, 64 scaled payloads, 128 ZFP. The builds compile
// parts side by side, because all together take a minute.
#ifndef ZIPCCL_PARTS
#define ZIPCCL_PARTS 255
#endif

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

// Rows of the table for a type: each(blocks, kernel, type of its parameters, one of them, function). A multiprocessor shall hold so many
// blocks of threads at a time, which bounds the registers; the one of the parameters is zero in an empty launch alone.
#define ZIPCCL_CODEC(each, type, F, encode_blocks, decode_blocks)                                   \
  each(encode_blocks, zipccl_encode_##type##_cascade, EncodeJobs, block, encode<F, Alone<Cascade>>) \
  each(encode_blocks, zipccl_encode_##type##_wide, EncodeJobs, block, encode<F, Alone<Wide>>)       \
  each(decode_blocks, zipccl_decode_##type, DecodeJobs, block, decode<F>)
#define ZIPCCL_DELTA(each, type, F, encode_blocks, decode_blocks)                              \
  each(encode_blocks, zipccl_encode_##type##_delta, EncodeJobs, block, encode<F, AgainstBase>) \
  each(decode_blocks, zipccl_decode_##type##_delta, DecodeJobs, block, decode<F, true>)
#define ZIPCCL_SUMS_AND_ROWS(each, type, F)                       \
  each(2, zipccl_decode_sum_##type, SumJob, block, decode_sum<F>) \
  each(4, zipccl_row_sums_##type, RowPairs, count, row_sums<F>)   \
  each(4, zipccl_predict_rows_##type, RowPairs, count, predict_rows<F>)
#define ZIPCCL_ROUNDED(each, type, F, Coded, encode_blocks)     \
  each(4, zipccl_round_##type, RoundJob, numel, round_words<F>) \
  each(encode_blocks, zipccl_encode_##type##_rounded, EncodeJobs, block, encode<Coded, OfRounded<Cascade>>)
#define ZIPCCL_TRIMMED(each, type, F, decode_blocks)                                         \
  each(decode_blocks, zipccl_decode_##type##_rounded, DecodeJobs, block, decode<Trimmed<F>>) \
  each(4, zipccl_untrimmed_##type, UntrimmedJobs, count, count_untrimmed<F>)
#define ZIPCCL_LOSSY(each, codec, Job, type, F)                          \
  each(4, zipccl_##codec##_encode_##type, Job, numel, encode_##codec<F>) \
  each(4, zipccl_##codec##_decode_##type, Job, numel, decode_##codec<F>) \
  each(4, zipccl_##codec##_project_##type, Job, numel, project_##codec<F>)

// The rows of each part that is here.
#if ZIPCCL_PARTS & 1
#define ZIPCCL_EACH_1(each)                                                                   \
  ZIPCCL_CODEC(each, bf16, Bf16, 4, 4) ZIPCCL_DELTA(each, bf16, Bf16, ZIPCCL_DELTA_BLOCKS, 3) \
  ZIPCCL_SUMS_AND_ROWS(each, bf16, Bf16)
#else
#define ZIPCCL_EACH_1(each)
#endif
#if ZIPCCL_PARTS & 2
#define ZIPCCL_EACH_2(each)                                                                        \
  ZIPCCL_CODEC(each, fp16, Fp16, 4, 4) ZIPCCL_DELTA(each, fp16, Fp16, ZIPCCL_FP16_DELTA_BLOCKS, 3) \
  ZIPCCL_SUMS_AND_ROWS(each, fp16, Fp16)
#else
#define ZIPCCL_EACH_2(each)
#endif
#if ZIPCCL_PARTS & 4
#define ZIPCCL_EACH_4(each) ZIPCCL_CODEC(each, fp32, Fp32, 2, 3) ZIPCCL_DELTA(each, fp32, Fp32, 2, 2) ZIPCCL_SUMS_AND_ROWS(each, fp32, Fp32)
#else
#define ZIPCCL_EACH_4(each)
#endif
#if ZIPCCL_PARTS & 8
#define ZIPCCL_EACH_8(each) ZIPCCL_CODEC(each, e4m3, E4m3, 4, 4) ZIPCCL_DELTA(each, u8, Byte, 3, 3)
#else
#define ZIPCCL_EACH_8(each)
#endif
#if ZIPCCL_PARTS & 16
#define ZIPCCL_EACH_16(each)           \
  ZIPCCL_CODEC(each, e5m2, E5m2, 4, 4) \
  each(4, zipccl_hash, HashJobs, count, hash_regions) each(4, zipccl_find_rows, FindRows, count, find_rows)
#else
#define ZIPCCL_EACH_16(each)
#endif
#if ZIPCCL_PARTS & 32
#define ZIPCCL_EACH_32(each)                                                             \
  ZIPCCL_ROUNDED(each, bf16, Bf16, Trimmed<Bf16>, 4) ZIPCCL_TRIMMED(each, bf16, Bf16, 4) \
  ZIPCCL_ROUNDED(each, fp16, Fp16, Trimmed<Fp16>, 4) ZIPCCL_TRIMMED(each, fp16, Fp16, 4) \
  ZIPCCL_ROUNDED(each, fp32, Fp32, Fp32, 2)
#else
#define ZIPCCL_EACH_32(each)
#endif
#if ZIPCCL_PARTS & 64
#define ZIPCCL_EACH_64(each)                        \
  ZIPCCL_LOSSY(each, scaled, ScaledJob, bf16, Bf16) \
  ZIPCCL_LOSSY(each, scaled, ScaledJob, fp16, Fp16) \
  ZIPCCL_LOSSY(each, scaled, ScaledJob, fp32, Fp32)
#else
#define ZIPCCL_EACH_64(each)
#endif
#if ZIPCCL_PARTS & 128
#define ZIPCCL_EACH_128(each)                 \
  ZIPCCL_LOSSY(each, zfp, ZfpJob, bf16, Bf16) \
  ZIPCCL_LOSSY(each, zfp, ZfpJob, fp16, Fp16) \
  ZIPCCL_LOSSY(each, zfp, ZfpJob, fp32, Fp32)
#else
#define ZIPCCL_EACH_128(each)
#endif
#define ZIPCCL_EACH_KERNEL(each)                                                                       \
  ZIPCCL_EACH_1(each) ZIPCCL_EACH_2(each) ZIPCCL_EACH_4(each) ZIPCCL_EACH_8(each) ZIPCCL_EACH_16(each) \
  ZIPCCL_EACH_32(each) ZIPCCL_EACH_64(each) ZIPCCL_EACH_128(each)

#define ZIPCCL_DEFINE(blocks, kernel, Params, some, ...)      \
  ZIPCCL_KERNEL(blocks) kernel(const zipccl::Params params) { \
    using namespace zipccl;                                   \
    if (params.some) __VA_ARGS__(params);                     \
  }
ZIPCCL_EACH_KERNEL(ZIPCCL_DEFINE)
#undef ZIPCCL_DEFINE

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
static_assert(sizeof(zipccl::UntrimmedShared) <= 2048 && sizeof(zipccl::ZfpShared) <= 6144, "SHARED_BYTES");
static_assert(sizeof(zipccl::EncodeJobs) <= 4096 && sizeof(zipccl::DecodeJobs) <= 4096 && sizeof(zipccl::UntrimmedJobs) <= 4096 &&
                  sizeof(zipccl::SumJob) <= 4096 && sizeof(zipccl::HashJobs) <= 4096,
              "parameters");
