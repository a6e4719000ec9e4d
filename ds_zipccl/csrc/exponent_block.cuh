// The exponent payload (FORMAT.md section 2): constants, float traits, ranks and sizes. Integers only, host and device.
#pragma once
#include <stdint.h>

#ifdef __CUDACC__
#define ZIPCCL_FN __host__ __device__ inline
#else
#define ZIPCCL_FN inline
#endif

namespace zipccl {
namespace {  // each CPU level compiles its own copy: merging them would let one level's instructions reach another

enum Mode : uint32_t { FILL = 0, RAW = 1, CASCADE = 2, SPARSE = 3 };
enum Status : int32_t { OK = 0, INDEX = 11, BLOCK = 12 };  // FrameErrorCode of frame.py
enum Dtype : int32_t { BF16 = 1, FP16 = 2, FP32 = 3 };     // FORMAT.md table 1.1

constexpr uint32_t kChunkBlocks = 32;
constexpr uint32_t kMaxBlock = 1024;
constexpr uint32_t kTiers = 4;      // two bits each: three ranks and an escape
constexpr uint32_t kNoRank = 12;    // an exponent that no tier names
constexpr uint32_t kZeroRank = 11;  // exponent field 0 outside the window
constexpr uint32_t kTailBits = 13;
constexpr uint32_t kTopBias = 23;  // eighths of a binade from the mean exponent to the window's top (FORMAT.md section 3)

// Only these traits know where a float type keeps its bits.
template <typename W, uint32_t kExponentBits, uint32_t kMantissaBits, bool kHasTrim>
struct FloatBits {
  using Word = W;
  static constexpr uint32_t M = kMantissaBits;
  static constexpr uint32_t exponent_mask = (1u << kExponentBits) - 1;
  static constexpr uint32_t mantissa_mask = (1u << kMantissaBits) - 1;
  static constexpr bool has_trim = kHasTrim;

  // In words, not in wider integers: vector units then handle twice as many 16-bit elements at a time.
  static ZIPCCL_FN W exponent(W w) { return W(w >> M) & W(exponent_mask); }
  static ZIPCCL_FN bool is_zero(W w) { return W(w << 1) == 0; }
  static ZIPCCL_FN W sign_mantissa(W w) { return W(W(w >> (8 * sizeof(W) - 1)) << M) | W(w & W(mantissa_mask)); }
  static ZIPCCL_FN W join(W sign_mantissa, W e) {
    return W(W(W(sign_mantissa >> M) << (8 * sizeof(W) - 1)) | W(W(e & W(exponent_mask)) << M)) | W(sign_mantissa & W(mantissa_mask));
  }
  static ZIPCCL_FN W negative_zero() { return W(1u << (8 * sizeof(W) - 1)); }
};
using Bf16 = FloatBits<uint16_t, 8, 7, false>;
using Fp16 = FloatBits<uint16_t, 5, 10, false>;
using Fp32 = FloatBits<uint32_t, 8, 23, true>;

// k = (top + 1 - e) mod 256 <-> rank, for the ranks 0..10 of the window; 16 entries for lookups by byte shuffle.
constexpr uint32_t kWindow = 11;
alignas(16) constexpr uint8_t kRankOfK[16] = {9, 3, 0, 1, 2, 4, 5, 6, 7, 8, 10, kNoRank, kNoRank, kNoRank, kNoRank, kNoRank};
alignas(16) constexpr uint8_t kKOfRank[16] = {2, 3, 4, 1, 5, 6, 7, 8, 9, 0, 10};

ZIPCCL_FN uint32_t pad16(uint32_t x) { return (x + 15) & ~15u; }
ZIPCCL_FN uint32_t plane_bytes(uint32_t n) { return (n + 7) / 8; }

// Bytes of the first part of n coded elements with r sign and mantissa bits.
ZIPCCL_FN uint32_t first_part_bytes(uint32_t n, uint32_t r) { return r / 8 * n + (r % 8 + 2) * plane_bytes(n); }

template <typename F>
ZIPCCL_FN uint32_t table_bytes(uint32_t blocks) {
  return pad16(blocks * (F::has_trim ? 4 : 3));
}

// Bytes of a block's body with its padding.
template <typename F>
ZIPCCL_FN uint32_t body_bytes(uint32_t mode, uint32_t n, uint32_t trim) {
  if (mode == RAW) return pad16(n * uint32_t(sizeof(typename F::Word)));
  if (mode == CASCADE) return pad16(first_part_bytes(n, 1 + F::M - trim));
  return 0;
}

}  // namespace
}  // namespace zipccl
