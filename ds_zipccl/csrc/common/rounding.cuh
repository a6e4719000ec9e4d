// Words rounded to fewer mantissa bits, and the size of rounded blocks without their trims (FORMAT.md 2.9). Integers only, host and device.
#pragma once
#include "common/exponent_block.cuh"

namespace zipccl {
namespace {

// Rounds to `kept` mantissa bits. Number is the type of the constants: the word's, or a register with several words of 16 bits.
template <typename F, typename Number = typename F::Word>
struct Rounding {
  static constexpr uint32_t kWordBits = 8 * sizeof(typename F::Word);
  static constexpr bool packed = sizeof(Number) > sizeof(typename F::Word);
  static constexpr Number one = packed ? Number(Number(1) << kWordBits % (8 * sizeof(Number)) | 1) : Number(1);
  static constexpr Number field = Number(one * F::exponent_mask << F::M), sign = Number(one << (F::E + F::M));
  Number cut, half, last, kept_bits;

  explicit ZIPCCL_FN Rounding(uint32_t kept)
      : cut(Number(F::M - kept)), half(Number(one * (((1u << cut) - 1) >> 1))), last(Number(one << cut)),
        kept_bits(Number(~(last - one))) {}

  // Ones in the words whose exponent field is all ones.
  template <typename V>
  static ZIPCCL_FN V special(V w) {
    if constexpr (packed) {  // the field and more reach the sign's place, without the sign
      const V reached = ((w & V(~sign)) + (sign - field)) & sign;
      return (reached << 1) - (reached >> (kWordBits - 1));
    } else {
      return V((w & field) == field ? V(~V{}) : V{});
    }
  }

  // V: Number, or a compiler's vector of words. No branches, so that loops over this function vectorize.
  template <typename V>
  ZIPCCL_FN V operator()(V w) const {
    if constexpr (packed) {
      const V kept = w & special(w), t = nearest(V(w & V(~special(w))));
      return V(kept | V(t - (special(t) & last)));  // the largest finite value instead of infinity
    } else {
      const V largest = V(V{} + Number(field - last)), size = V(w & Number(~sign)), t = nearest(size);
      return V((size < field ? V(t < largest ? t : largest) : size) | (w & sign));
    }
  }

  // The same of words whose exponent field is none of the two largest.
  template <typename V>
  ZIPCCL_FN V nearest(V w) const {
    return V((w + half + (w >> cut & one)) & kept_bits);
  }
};

// Bytes of a rounded block's body and tail without its trim, in an exponent payload.
struct Untrimmed {
  uint32_t body, tail;
};
// `others`: the words of a SPARSE block that are not zero.
template <typename F>
ZIPCCL_FN Untrimmed untrimmed_block(uint32_t mode, uint32_t n, uint32_t trim, uint32_t tail_bytes, uint32_t others) {
  const uint32_t body = body_bytes<F>(mode, n, 0), raw = body_bytes<F>(RAW, n, 0);
  const uint32_t tail = tail_bytes + (mode == SPARSE ? parts_bytes(others, 1 + F::M) - parts_bytes(others, 1 + F::M - trim) : 0);
  return mode > RAW && body + tail >= raw ? Untrimmed{raw, 0} : Untrimmed{body, tail};
}

}  // namespace
}  // namespace zipccl
