// A block of ZFP in one dimension (FORMAT.md 2.11): four values as integers, and their bit planes. Integers only, host and device.
#pragma once
#include "common/float_values.cuh"

namespace zipccl {
namespace {

constexpr uint32_t kZfpValues = 4, kZfpHeadBits = 9, kZfpPlanes = 32;
constexpr uint32_t kNegabinary = 0xaaaaaaaau, kLargestFp32 = 0x7f7fffffu;

// Four fp32 words.
struct ZfpBlock {
  uint32_t word[kZfpValues];

  ZIPCCL_FN bool finite() const {
    bool good = true;
    for (uint32_t i = 0; i < kZfpValues; ++i) good &= (word[i] >> 23 & 255) != 255;
    return good;
  }
};

// Four numbers in negabinary, and the exponent byte of their block; 0 for a block of zeros.
struct ZfpNumbers {
  uint32_t u[kZfpValues];
  uint32_t head;
};

// The place of the highest one of x, which is not zero.
ZIPCCL_FN uint32_t highest_one(uint32_t x) {
#ifdef __CUDA_ARCH__
  return 31 - uint32_t(__clz(int(x)));
#else
  return 31 - uint32_t(__builtin_clz(x));
#endif
}

ZIPCCL_FN int32_t zfp_half(uint32_t q) { return int32_t(q) >> 1; }

ZIPCCL_FN ZfpNumbers zfp_numbers(const ZfpBlock& block) {
  ZfpNumbers numbers = {{0, 0, 0, 0}, 0};
  uint32_t top = 0, some = 0, q[kZfpValues];
  for (uint32_t i = 0; i < kZfpValues; ++i) {
    const uint32_t magnitude = block.word[i] & 0x7fffffff;
    top = magnitude >> 23 > top ? magnitude >> 23 : top;
    some |= magnitude;
  }
  if (!some) return numbers;
  numbers.head = top + 1;
  for (uint32_t i = 0; i < kZfpValues; ++i) {
    const uint32_t e = block.word[i] >> 23 & 255, significand = (block.word[i] & 0x7fffff) | (e ? 0x800000 : 0);
    const int32_t shift = int32_t(e ? e : 1) + 6 - int32_t(top);
    const uint32_t number = shift >= 0 ? significand << shift : shift > -32 ? significand >> -shift : 0;
    q[i] = block.word[i] >> 31 ? 0 - number : number;
  }
  uint32_t &x = q[0], &y = q[1], &z = q[2], &w = q[3];
  x = uint32_t(zfp_half(x + w)), w -= x;
  z = uint32_t(zfp_half(z + y)), y -= z;
  x = uint32_t(zfp_half(x + z)), z -= x;
  w = uint32_t(zfp_half(w + y)), y -= w;
  w += uint32_t(zfp_half(y)), y -= uint32_t(zfp_half(w));
  for (uint32_t i = 0; i < kZfpValues; ++i) numbers.u[i] = (q[i] + kNegabinary) ^ kNegabinary;
  return numbers;
}

// The fp32 word nearest to q 2^(head - 157), ties to even; beyond the largest finite value: that value.
ZIPCCL_FN uint32_t zfp_value(uint32_t q, uint32_t head) {
  if (!q) return 0;
  const uint32_t sign = q & 0x80000000u, number = sign ? 0 - q : q;
  const uint32_t last = highest_one(number);
  const int32_t field = int32_t(last + head) - 30, normal = int32_t(last) - 23, least = 8 - int32_t(head);
  const int32_t shift = normal > least ? normal : least;
  const uint64_t wide = number;
  const uint64_t significand =
      shift > 0 ? (wide + (1ull << (shift - 1)) - 1 + (wide >> shift & 1)) >> shift : wide << -shift;
  const uint64_t word = significand + (uint64_t(field > 1 ? field - 1 : 0) << 23);
  return sign | (word > kLargestFp32 ? kLargestFp32 : uint32_t(word));
}

ZIPCCL_FN ZfpBlock zfp_values(const ZfpNumbers& numbers) {
  uint32_t q[kZfpValues];
  for (uint32_t i = 0; i < kZfpValues; ++i) q[i] = (numbers.u[i] ^ kNegabinary) - kNegabinary;
  uint32_t &x = q[0], &y = q[1], &z = q[2], &w = q[3];
  y += uint32_t(zfp_half(w)), w -= uint32_t(zfp_half(y));
  y += w, w = 2 * w - y;
  z += x, x = 2 * x - z;
  y += z, z = 2 * z - y;
  w += x, x = 2 * x - w;
  ZfpBlock block;
  for (uint32_t i = 0; i < kZfpValues; ++i) block.word[i] = zfp_value(q[i], numbers.head);
  return block;
}

// The word of a type for a finite fp32 word: rounded, and finite.
template <typename F>
ZIPCCL_FN typename F::Word finite_word(uint32_t word) {
  using Word = typename F::Word;
  constexpr uint32_t infinity = F::exponent_mask << F::M;
  const uint32_t rounded = Values<F>::round(as_float(word)), magnitude = rounded & ~uint32_t(F::negative_zero);
  return Word((rounded & F::negative_zero) | (magnitude < infinity ? magnitude : infinity - 1));
}

// The bits of a plane, of which n elements have had a one above: how they are coded, and how many elements have one now.
struct ZfpPlane {
  uint8_t bits, length, next;
};
ZIPCCL_FN constexpr ZfpPlane zfp_code_plane(uint32_t n, uint32_t plane) {
  uint32_t bits = 0, length = 0;
  for (uint32_t i = 0; i < n; ++i, plane >>= 1) bits |= (plane & 1) << length++;
  while (n < kZfpValues) {
    bits |= (plane ? 1u : 0u) << length++;
    if (!plane) break;
    for (; n + 1 < kZfpValues; plane >>= 1, ++n) {
      bits |= (plane & 1) << length++;
      if (plane & 1) break;
    }
    plane >>= 1, ++n;
  }
  return {uint8_t(bits), uint8_t(length), uint8_t(n)};
}
constexpr uint32_t kZfpPlaneBits = 7;  // at most

// The inverse for the next `left` bits; `bits` of the result is the plane.
ZIPCCL_FN constexpr ZfpPlane zfp_plane_of(uint32_t n, uint32_t bits, uint32_t left) {
  uint32_t plane = 0, at = 0;
  for (uint32_t i = 0; i < n && at < left; ++i) plane |= (bits >> at++ & 1) << i;
  while (n < kZfpValues && at < left) {
    if (!(bits >> at++ & 1)) break;
    while (n + 1 < kZfpValues && at < left && !(bits >> at++ & 1)) ++n;
    plane |= 1u << n++;
  }
  return {uint8_t(plane), uint8_t(at), uint8_t(n)};
}

// Four bits, one in each byte, from bit 0 of each; and back.
ZIPCCL_FN uint32_t zfp_gather(uint32_t bytes) { return (bytes & 0x01010101u) * 0x01020408u >> 24 & 15; }
ZIPCCL_FN uint32_t zfp_spread(uint32_t plane) { return plane * 0x00204081u & 0x01010101u; }

// The value that stands in place i of a block of which `count` are left: a a a a, a b b a, a b c a.
ZIPCCL_FN uint32_t zfp_source(uint32_t i, uint64_t count) { return i < count ? i : count == 2 && i == 2 ? 1 : 0; }

// The code of a block: 4 rate bits. A Code begins with zeros, and has put(at, bits), from(at) for places but 0, some() for the bit
// there, and keep(count). The functions code(n, plane) and plane(n, bits) of the tables are zfp_code_plane, and zfp_plane_of for
// kZfpPlaneBits.
template <typename Code, typename Tables>
ZIPCCL_FN Code zfp_encode(const ZfpBlock& block, uint32_t rate, const Tables& tables) {
  const ZfpNumbers numbers = zfp_numbers(block);
  Code code;
  if (!numbers.head) return code;
  const uint32_t limit = kZfpValues * rate;
  code.put(0, 1), code.put(1, numbers.head);
  uint32_t at = kZfpHeadBits, n = 0;
  for (uint32_t byte = 4; byte-- > 0;) {
    uint32_t bytes = 0;
    for (uint32_t i = 0; i < kZfpValues; ++i) bytes |= (numbers.u[i] >> 8 * byte & 255) << 8 * i;
    for (uint32_t k = 8; k-- > 0;) {
      const ZfpPlane plane = tables.code(n, zfp_gather(bytes >> k));
      code.put(at, plane.bits);
      at += plane.length, n = plane.next;
      if (at < limit) continue;
      code.keep(limit);
      return code;
    }
  }
  return code;
}

template <typename Code, typename Tables>
ZIPCCL_FN ZfpBlock zfp_decode(const Code& code, uint32_t rate, const Tables& tables) {
  constexpr uint32_t mask = (1 << kZfpPlaneBits) - 1;
  if (!code.some()) return {{0, 0, 0, 0}};
  const uint32_t limit = kZfpValues * rate;
  ZfpNumbers numbers = {{0, 0, 0, 0}, code.from(1) & 255};
  uint32_t at = kZfpHeadBits, n = 0;
  for (uint32_t byte = 4; byte-- > 0 && at < limit;) {
    uint32_t bytes = 0;
    for (uint32_t k = 8; k-- > 0 && at < limit;) {
      const uint32_t bits = code.from(at) & mask, left = limit - at;
      const ZfpPlane plane = left >= kZfpPlaneBits ? tables.plane(n, bits) : zfp_plane_of(n, bits, left);
      bytes |= zfp_spread(plane.bits) << k;
      at += plane.length, n = plane.next;
    }
    for (uint32_t i = 0; i < kZfpValues; ++i) numbers.u[i] |= (bytes >> 8 * i & 255) << 8 * byte;
  }
  return zfp_values(numbers);
}

}  // namespace
}  // namespace zipccl
