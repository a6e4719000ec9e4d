// The kernels by name, as nvcc's launcher and NVRTC's callers know them. The number is the blocks of threads that a multiprocessor is to
// hold at a time, which bounds the registers.
#pragma once
#include "cuda_decode.cuh"
#include "cuda_encode.cuh"
#include "cuda_sum.cuh"

#define ZIPCCL_KERNELS(type, F, encode_blocks, decode_blocks, sum_blocks)                                                            \
  ZIPCCL_KERNEL(encode_blocks) zipccl_encode_##type##_cascade(const zipccl::EncodeJobs jobs) {                                        \
    zipccl::encode<zipccl::F, zipccl::Cascade>(jobs);                                                                                 \
  }                                                                                                                                   \
  ZIPCCL_KERNEL(encode_blocks) zipccl_encode_##type##_window(const zipccl::EncodeJobs jobs) {                                         \
    zipccl::encode<zipccl::F, zipccl::Window>(jobs);                                                                                  \
  }                                                                                                                                   \
  ZIPCCL_KERNEL(decode_blocks) zipccl_decode_##type(const zipccl::DecodeJobs jobs) { zipccl::decode<zipccl::F>(jobs); }               \
  ZIPCCL_KERNEL(sum_blocks) zipccl_decode_sum_##type(const zipccl::SumJob job) { zipccl::decode_sum<zipccl::F>(job); }

ZIPCCL_KERNELS(bf16, Bf16, 4, 4, 2)
ZIPCCL_KERNELS(fp16, Fp16, 4, 4, 2)
ZIPCCL_KERNELS(fp32, Fp32, 2, 3, 2)
#undef ZIPCCL_KERNELS

// Calls each(kernel, type of its parameters).
#define ZIPCCL_KERNELS_OF(each, type)                 \
  each(zipccl_encode_##type##_cascade, EncodeJobs) \
  each(zipccl_encode_##type##_window, EncodeJobs)  \
  each(zipccl_decode_##type, DecodeJobs)           \
  each(zipccl_decode_sum_##type, SumJob)
#define ZIPCCL_EACH_KERNEL(each) ZIPCCL_KERNELS_OF(each, bf16) ZIPCCL_KERNELS_OF(each, fp16) ZIPCCL_KERNELS_OF(each, fp32)

// kernels/cuda.py asks for so much shared memory.
static_assert(sizeof(zipccl::EncodeShared<zipccl::Bf16>) <= 43008 && sizeof(zipccl::EncodeShared<zipccl::Fp32>) <= 75776, "SHARED_BYTES");
static_assert(sizeof(zipccl::DecodeShared<zipccl::Bf16>) <= 16896 && sizeof(zipccl::DecodeShared<zipccl::Fp32>) <= 33280, "SHARED_BYTES");
static_assert(sizeof(zipccl::SumShared<zipccl::Bf16>) <= 33792 && sizeof(zipccl::SumShared<zipccl::Fp32>) <= 50176, "SHARED_BYTES");
