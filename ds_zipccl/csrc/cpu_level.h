// What a CPU level offers: the codec for each dtype. cpu_scalar.cpp and cpu_avx2.cpp define one each, cpu_dispatch.cpp chooses.
#pragma once
#include <stdint.h>

struct ZipcclLevel {
  const char* name;
  // Both indexed by dtype (FORMAT.md table 1.1); entry 0 is unused.
  uint64_t (*encode[4])(const uint8_t* words, uint64_t numel, uint32_t block, uint8_t* out);
  int32_t (*decode[4])(const uint8_t* payload, uint64_t bytes, uint64_t numel, uint32_t block, uint8_t* words);
};

extern const ZipcclLevel zipccl_scalar;
#if defined(__x86_64__)
extern const ZipcclLevel zipccl_avx2;
#endif

#define ZIPCCL_LEVEL(NAME, LANES)                                                              \
  const ZipcclLevel zipccl_##NAME = {                                                          \
      #NAME,                                                                                   \
      {nullptr, zipccl::encode<zipccl::Bf16, zipccl::LANES>,                                   \
       zipccl::encode<zipccl::Fp16, zipccl::LANES>, zipccl::encode<zipccl::Fp32, zipccl::LANES>}, \
      {nullptr, zipccl::decode<zipccl::Bf16, zipccl::LANES>,                                   \
       zipccl::decode<zipccl::Fp16, zipccl::LANES>, zipccl::decode<zipccl::Fp32, zipccl::LANES>}}
