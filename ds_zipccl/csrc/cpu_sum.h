// Decode and add: each decoded block goes from the cache into a sum (FORMAT.md says nothing of sums; ds_zipccl/comm/reduction.py does).
#pragma once
#include "cpu_decode.h"

namespace zipccl {
namespace {

inline float as_float(uint32_t bits) {
  float f;
  memcpy(&f, &bits, 4);
  return f;
}
inline uint32_t as_bits(float f) {
  uint32_t bits;
  memcpy(&bits, &f, 4);
  return bits;
}

// A type's values as floats, and floats rounded to it: to nearest, ties to even. No branches, so that loops over them vectorise.
template <typename F>
struct Values;
template <>
struct Values<Bf16> {
  static float from(uint16_t w) { return as_float(uint32_t(w) << 16); }
  static uint16_t round(float f) {  // every NaN becomes 0x7fc0, as in c10::BFloat16 and gloo
    const uint32_t bits = as_bits(f);
    return (bits & 0x7fffffff) > 0x7f800000 ? uint16_t(0x7fc0) : uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
};
template <>
struct Values<Fp16> {
  static constexpr uint32_t kInfinity = 255u << 23, kBias = 112u << 23;
  static float from(uint16_t w) {
    const uint32_t sign = uint32_t(w & 0x8000) << 16, magnitude = uint32_t(w & 0x7fff) << 13;
    const uint32_t normal = magnitude >= 31u << 23 ? magnitude | kInfinity : magnitude + kBias;
    // Subnormal: put the bits below the leading one of 2^-14 and take that one away.
    const uint32_t subnormal = as_bits(as_float(magnitude + kBias + (1u << 23)) - as_float(kBias + (1u << 23)));
    return as_float(sign | (magnitude < 1u << 23 ? subnormal : normal));
  }
  static uint16_t round(float f) {
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
  static float from(uint32_t w) { return as_float(w); }
  static uint32_t round(float f) { return as_bits(f); }
};

// Adds a chunk of numel words to `sum`: words of the same type, each sum rounded to it, or floats.
template <typename F, typename Lanes, typename Sum>
int32_t add_chunk(const uint8_t* chunk, uint64_t bytes, uint32_t numel, uint32_t block, uint8_t* sum) {
  using Word = typename F::Word;
  alignas(64) uint8_t words[kMaxBlock * sizeof(Word)];
  return each_block<F, Lanes>(
      chunk, bytes, numel, block, false, [&](uint32_t) { return words; },
      [&](const uint8_t* from, uint32_t first, uint32_t n) {
        uint8_t* to = sum + uint64_t(first) * sizeof(Sum);
        for (uint32_t i = 0; i < n; ++i) {
          const float value = Values<F>::from(load_word<Word>(from + i * sizeof(Word)));
          const Sum before = load_word<Sum>(to + i * sizeof(Sum));
          Sum after;
          if constexpr (sizeof(Sum) == 4) {
            after = as_bits(as_float(before) + value);
          } else {
            after = Values<F>::round(Values<F>::from(before) + value);
          }
          memcpy(to + i * sizeof(Sum), &after, sizeof after);
        }
      });
}

}  // namespace
}  // namespace zipccl
