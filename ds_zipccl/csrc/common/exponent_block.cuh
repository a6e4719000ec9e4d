// The exponent payload (FORMAT.md section 2): constants, float traits, codes and sizes. Integers only, host and device.
#pragma once
#ifdef __CUDACC_RTC__  // has no headers
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;
typedef uint64_t uintptr_t;
#else
#include <stdint.h>
#endif

#ifdef __CUDACC__
#define ZIPCCL_FN __host__ __device__ inline
#else
#define ZIPCCL_FN inline
#endif

namespace zipccl {
namespace {  // each CPU level compiles its own copy: a merged copy could carry instructions of one level into another

enum Mode : uint32_t { FILL = 0, RAW = 1, CASCADE = 2, SPARSE = 3, WIDE = 4, CHANGE = 5 };
enum Status : int32_t {  // FrameErrorCode of frame.py
  OK = 0, TRUNCATED = 1, MAGIC = 2, VERSION = 3, CODEC = 4, RESERVED = 6, SIZE = 8, MISMATCH = 10, INDEX = 11, BLOCK = 12, OVERFLOWED = 13
};

constexpr uint32_t kChunkBlocks = 16;
constexpr uint32_t kMaxBlock = 1024;
constexpr uint32_t kTailBits = 13;

// Only these traits know where a float type keeps its bits. The functions take words, or vectors of words.
template <typename W, uint32_t kExponentBits, uint32_t kMantissaBits, bool kHasTrim = false>
struct FloatBits {
  using Word = W;
  static constexpr uint32_t E = kExponentBits, M = kMantissaBits;
  static constexpr uint32_t exponent_mask = (1u << E) - 1;
  static constexpr bool has_trim = kHasTrim;

  template <typename V>
  static ZIPCCL_FN V exponent(V w) {
    return (w >> M) & W(exponent_mask);
  }
  template <typename V>
  static ZIPCCL_FN V sign_mantissa(V w) {
    return ((w >> E) & W(1u << M)) | (w & W((1u << M) - 1));
  }
  template <typename V>
  static ZIPCCL_FN V join(V sign_mantissa, V e) {  // e has no bits past E
    return (((sign_mantissa << E) & W(1u << (E + M))) | (e << M)) | (sign_mantissa & W((1u << M) - 1));
  }
  static constexpr W negative_zero = W(1u << (E + M));
};
using Bf16 = FloatBits<uint16_t, 8, 7>;
using Fp16 = FloatBits<uint16_t, 5, 10>;
using Fp32 = FloatBits<uint32_t, 8, 23, true>;
using E4m3 = FloatBits<uint8_t, 4, 3>;
using E5m2 = FloatBits<uint8_t, 5, 2>;
// A type whose blocks have trims: in rounded payloads.
template <typename F>
struct Trimmed : F {
  static constexpr bool has_trim = true;
};

// A tier codes each element that no tier before it named, in `bits` bits. With k = (top + 3 - e) mod 256: code_of_k is the
// code for k (15: any from 15 up), k_of_code the inverse. The largest code is the escape to the next tier.
struct Tier {
  uint32_t bits;
  alignas(16) uint8_t code_of_k[16], k_of_code[16];
  ZIPCCL_FN constexpr uint32_t escape() const { return (1u << bits) - 1; }
};
constexpr uint32_t kTiers = 4;
constexpr uint32_t kAbove = 3;     // k of the exponent `top` itself
constexpr uint32_t kZeroCode = 2;  // in the last tier: exponent field 0, where the tiers do not name it by its k

struct Cascade {
  static constexpr Mode mode = CASCADE;
  static constexpr uint32_t top_bias = 23;  // eighths of a binade from the mean exponent to the window's top (FORMAT.md section 3)
  static constexpr Tier tier[kTiers] = {{2, {3, 3, 3, 3, 0, 1, 2, 3, 3, 3, 3, 3, 3, 3, 3, 3}, {4, 5, 6}},
                                        {2, {3, 3, 3, 0, 3, 3, 3, 1, 2, 3, 3, 3, 3, 3, 3, 3}, {3, 7, 8}},
                                        {2, {3, 3, 3, 3, 3, 3, 3, 3, 3, 0, 1, 2, 3, 3, 3, 3}, {9, 10, 11}},
                                        {2, {3, 3, 0, 3, 3, 3, 3, 3, 3, 3, 3, 3, 1, 3, 3, 3}, {2, 12}}};
};
struct Wide {
  static constexpr Mode mode = WIDE;
  static constexpr uint32_t top_bias = 20;
  static constexpr Tier tier[kTiers] = {{3, {7, 7, 7, 0, 1, 2, 3, 4, 5, 6, 7, 7, 7, 7, 7, 7}, {3, 4, 5, 6, 7, 8, 9}},
                                        {2, {3, 3, 1, 3, 3, 3, 3, 3, 3, 3, 0, 2, 3, 3, 3, 3}, {10, 2, 11}},
                                        {2, {3, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 0, 2, 3, 3}, {12, 1, 13}},
                                        {2, {1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 0, 3}, {14, 0}}};
};
constexpr uint32_t kFallbackBias = 28;  // of WIDE in the place of CASCADE

ZIPCCL_FN constexpr uint32_t pad16(uint32_t x) { return (x + 15) & ~15u; }
ZIPCCL_FN constexpr uint32_t plane_bytes(uint32_t n) { return (n + 7) / 8; }

// Bytes of n elements' sign and mantissa, r bits each; and of the first part of n coded elements.
ZIPCCL_FN constexpr uint32_t parts_bytes(uint32_t n, uint32_t r) { return r / 8 * n + r % 8 * plane_bytes(n); }
ZIPCCL_FN constexpr uint32_t first_part_bytes(uint32_t n, uint32_t r, uint32_t tier1_bits) {
  return parts_bytes(n, r) + tier1_bits * plane_bytes(n);
}

template <typename F>
ZIPCCL_FN uint32_t table_bytes(uint32_t blocks) {
  return pad16(blocks * (F::has_trim ? 4 : 3));
}

// Bytes of a block's body with its padding.
template <typename F>
ZIPCCL_FN uint32_t body_bytes(uint32_t mode, uint32_t n, uint32_t trim) {
  switch (mode) {
    case RAW: return pad16(n * uint32_t(sizeof(typename F::Word)));
    case CASCADE: return pad16(first_part_bytes(n, 1 + F::M - trim, Cascade::tier[0].bits));
    case WIDE: return pad16(first_part_bytes(n, 1 + F::M - trim, Wide::tier[0].bits));
    default: return 0;
  }
}

}  // namespace
}  // namespace zipccl
