// Values of words as floats, and floats rounded to words: to nearest, ties to even. For sums, on host and device.
#pragma once
#include "common/exponent_block.cuh"
#ifndef __CUDACC__
#include <string.h>
#endif

namespace zipccl {
namespace {

ZIPCCL_FN float as_float(uint32_t bits) {
#ifdef __CUDA_ARCH__
  return __uint_as_float(bits);
#else
  float f;
  memcpy(&f, &bits, 4);
  return f;
#endif
}
ZIPCCL_FN uint32_t as_bits(float f) {
#ifdef __CUDA_ARCH__
  return __float_as_uint(f);
#else
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
#endif
}

// No branches, so that loops over these functions vectorize.
template <typename F>
struct Values;
template <>
struct Values<Bf16> {
  static ZIPCCL_FN float from(uint16_t w) { return as_float(uint32_t(w) << 16); }
  static ZIPCCL_FN uint16_t round(float f) {  // every NaN becomes 0x7fc0, as in c10::BFloat16 and gloo
    const uint32_t bits = as_bits(f);
    return (bits & 0x7fffffff) > 0x7f800000 ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};
template <>
struct Values<Fp16> {
  static constexpr uint32_t kInfinity = 255u << 23, kBias = 112u << 23;
  static ZIPCCL_FN float from(uint16_t w) {
    const uint32_t sign = uint32_t(w & 0x8000) << 16, magnitude = uint32_t(w & 0x7fff) << 13;
    const uint32_t normal = magnitude >= 31u << 23 ? magnitude | kInfinity : magnitude + kBias;
    // Subnormal: add the leading one of 2^-14 above the bits, and subtract it as a float.
    const uint32_t subnormal = as_bits(as_float(magnitude + kBias + (1u << 23)) - as_float(kBias + (1u << 23)));
    return as_float(sign | (magnitude < 1u << 23 ? subnormal : normal));
  }
  static ZIPCCL_FN uint16_t round(float f) {
    const uint32_t bits = as_bits(f), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
    const uint32_t normal = (magnitude - kBias + 0xfff + (magnitude >> 13 & 1)) >> 13;
    const float shift = as_float(126u << 23);  // its last bit is worth the least subnormal
    const uint32_t subnormal = as_bits(as_float(magnitude) + shift) - as_bits(shift);
    const uint32_t special = magnitude > kInfinity ? 0x7e00 : 0x7c00;
    return uint16_t(sign | (magnitude >= 143u << 23 ? special : magnitude < 113u << 23 ? subnormal : normal));
  }
};
template <>
struct Values<Fp32> {
  static ZIPCCL_FN float from(uint32_t w) { return as_float(w); }
  static ZIPCCL_FN uint32_t round(float f) { return as_bits(f); }
};
template <typename F>
struct Values<Trimmed<F>> : Values<F> {};

}  // namespace
}  // namespace zipccl
