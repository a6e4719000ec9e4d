// The 64-element steps of the codec in portable C++.
#pragma once
#include "bits.h"
#include "exponent_block.cuh"

namespace zipccl {
namespace {

struct ScalarLanes {
  // Bit `bit` of each of 64 bytes as a plane.
  static uint64_t plane_of(const uint8_t* bytes, uint32_t bit) {
    uint64_t plane = 0;
    for (uint32_t i = 0; i < 8; ++i) {
      uint64_t eight;
      memcpy(&eight, bytes + 8 * i, 8);
      plane |= gather_low_bits(eight >> bit) << 8 * i;
    }
    return plane;
  }

  // The inverse for `count` planes: bit p of byte i is bit i of planes[p].
  static void bytes_of(const uint64_t* planes, uint32_t count, uint8_t* bytes) {
    for (uint32_t i = 0; i < 8; ++i) {
      uint64_t eight = 0;
      for (uint32_t p = 0; p < count; ++p) eight |= spread_low_bits(planes[p] >> 8 * i) << p;
      memcpy(bytes + 8 * i, &eight, 8);
    }
  }

  // Codes of 64 exponents in every tier, low and high plane of tier 1, of tier 2, ...: min(rank - 3 (tier - 1), 3), and anything in a
  // tier after the one that names the element.
  static void tier_codes(const uint8_t* exponent, uint32_t top, uint64_t* codes) {
    uint8_t rank[64], code[64];
    for (uint32_t i = 0; i < 64; ++i) {
      const uint32_t k = uint8_t(top + 1 - exponent[i]);
      rank[i] = k < kWindow ? kRankOfK[k] : exponent[i] ? kNoRank : kZeroRank;
    }
    for (uint32_t tier = 0; tier < kTiers; ++tier) {
      for (uint32_t i = 0; i < 64; ++i) {
        const uint8_t c = uint8_t(rank[i] - 3 * tier);
        code[i] = c < 3 ? c : 3;
      }
      codes[2 * tier] = plane_of(code, 0);
      codes[2 * tier + 1] = plane_of(code, 1);
    }
  }

  // Exponents from their codes, which must be zero in tiers after the one that names the element. Those no tier names come out undefined.
  static void exponents(const uint64_t* codes, uint32_t top, uint8_t* exponent) {
    uint8_t rank[64] = {0};
    for (uint32_t plane = 0; plane < 2 * kTiers; ++plane)
      for (uint32_t i = 0; i < 8; ++i) {
        uint64_t eight;
        memcpy(&eight, rank + 8 * i, 8);
        eight += spread_low_bits(codes[plane] >> 8 * i) << plane % 2;
        memcpy(rank + 8 * i, &eight, 8);
      }
    for (uint32_t i = 0; i < 64; ++i) exponent[i] = rank[i] < kWindow ? uint8_t(top + 1 - kKOfRank[rank[i]]) : 0;
  }
};

}  // namespace
}  // namespace zipccl
