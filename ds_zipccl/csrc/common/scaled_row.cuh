// The prediction of a scaled row (FORMAT.md, row frames): a word of the source times a factor, rounded to nearest, ties to even. Integers
// only, so that no rounding mode, flushed denormal or fast division changes a bit. Host and device.
#pragma once
#include "common/exponent_block.cuh"

namespace zipccl {
namespace {

// A factor: a normal finite float, as its bits.
struct Factor {
  uint32_t negative, exponent, significand;
  explicit ZIPCCL_FN Factor(uint32_t bits)
      : negative(bits >> 31), exponent(bits >> 23 & 255), significand((bits & 0x7fffff) | 0x800000) {}
  static ZIPCCL_FN bool valid(uint32_t bits) { return (bits >> 23 & 255) - 1 < 254; }
};

// The product of two significands fits: bfloat16 has 8 bits beside the factor's 24.
template <typename F>
struct Product {
  using Type = uint64_t;
};
template <>
struct Product<Bf16> {
  using Type = uint32_t;
};

// No branches, so that loops over this function vectorize.
template <typename F>
ZIPCCL_FN typename F::Word predict(typename F::Word source, Factor factor) {
  using Wide = typename Product<F>::Type;
  constexpr uint32_t one = 1u << F::M, special = F::exponent_mask, sign_at = F::E + F::M;
  const uint32_t a = source, e_a = a >> F::M & special, sign = (a >> sign_at ^ factor.negative) << sign_at;
  const Wide p = Wide(one | (a & (one - 1))) * factor.significand;
  const uint32_t more = p >> (F::M + 24) ? 1 : 0;  // the product has one bit more
  // Just under half of the last bit is added, and a whole half where this bit is odd.
  const Wide q23 = (p + ((Wide(1) << 22) - 1) + (p >> 23 & 1)) >> 23, q24 = (p + ((Wide(1) << 23) - 1) + (p >> 24 & 1)) >> 24;
  const uint32_t q = uint32_t(more ? q24 : q23), over = q >> (F::M + 1);  // q = 2 * one, where over is 1: its mantissa is zero
  const int32_t e = int32_t(e_a + factor.exponent + more + over) - 127;
  const uint32_t normal = sign | uint32_t(e) << F::M | (q & (one - 1)), infinity = sign | special << F::M;
  const uint32_t scaled = e_a == 0 || e < 1 ? sign : e >= int32_t(special) ? infinity : normal;
  return typename F::Word(e_a == special ? a : scaled);
}

}  // namespace
}  // namespace zipccl
