// The 64-element steps of the codec in AVX2, two vectors of 32 bytes. What each does: lanes_scalar.h.
#pragma once
#include <immintrin.h>

#include "exponent_block.cuh"

namespace zipccl {
namespace {

struct Avx2Lanes {
  static __m256i load(const uint8_t* bytes) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(bytes)); }
  static void store(uint8_t* bytes, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(bytes), x); }
  static uint64_t high_bits(__m256i low, __m256i high) {
    return uint32_t(_mm256_movemask_epi8(low)) | uint64_t(uint32_t(_mm256_movemask_epi8(high))) << 32;
  }
  static __m256i table(const uint8_t* entries) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(entries)));
  }
  // 32 bits as 32 bytes: -1 for a one.
  static __m256i spread(uint32_t bits) {
    const __m256i byte = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
    const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi32(int(bits)), byte), bit), bit);
  }

  static uint64_t plane_of(const uint8_t* bytes, uint32_t bit) {
    const __m128i up = _mm_cvtsi32_si128(int(7 - bit));  // to each byte's top bit; what crosses into it from its neighbour stays below
    return high_bits(_mm256_sll_epi16(load(bytes), up), _mm256_sll_epi16(load(bytes + 32), up));
  }

  static void bytes_of(const uint64_t* planes, uint32_t count, uint8_t* bytes) {
    for (uint32_t half = 0; half < 2; ++half) {
      __m256i sum = _mm256_setzero_si256();
      for (uint32_t p = count; p-- > 0;) sum = _mm256_sub_epi8(_mm256_add_epi8(sum, sum), spread(uint32_t(planes[p] >> 32 * half)));
      store(bytes + 32 * half, sum);
    }
  }

  static void tier_codes(const uint8_t* exponent, uint32_t top, uint64_t* codes) {
    const __m256i ranks = table(kRankOfK), zero = _mm256_setzero_si256();
    __m256i rank[2];
    for (uint32_t half = 0; half < 2; ++half) {
      const __m256i e = load(exponent + 32 * half);
      const __m256i k = _mm256_min_epu8(_mm256_sub_epi8(_mm256_set1_epi8(char(top + 1)), e), _mm256_set1_epi8(15));
      rank[half] = _mm256_shuffle_epi8(ranks, k);
      const __m256i unnamed_zero = _mm256_and_si256(_mm256_cmpeq_epi8(e, zero), _mm256_cmpeq_epi8(rank[half], _mm256_set1_epi8(kNoRank)));
      rank[half] = _mm256_add_epi8(rank[half], unnamed_zero);  // kNoRank - 1 = kZeroRank
    }
    const __m256i three = _mm256_set1_epi8(3);
    for (uint32_t tier = 0; tier < kTiers; ++tier) {
      const __m256i c0 = _mm256_min_epu8(rank[0], three), c1 = _mm256_min_epu8(rank[1], three);
      codes[2 * tier] = high_bits(_mm256_slli_epi16(c0, 7), _mm256_slli_epi16(c1, 7));
      codes[2 * tier + 1] = high_bits(_mm256_slli_epi16(c0, 6), _mm256_slli_epi16(c1, 6));
      rank[0] = _mm256_subs_epu8(rank[0], three);
      rank[1] = _mm256_subs_epu8(rank[1], three);
    }
  }

  static void exponents(const uint64_t* codes, uint32_t top, uint8_t* exponent) {
    const __m256i ks = table(kKOfRank), window = _mm256_set1_epi8(kWindow), zero = _mm256_setzero_si256();
    const bool beyond_tier2 = (codes[2] & codes[3]) != 0;
    for (uint32_t half = 0; half < 2; ++half) {
      __m256i rank = zero;
      for (uint32_t plane = 0; plane < (beyond_tier2 ? 2 * kTiers : 4); ++plane) {
        const __m256i ones = spread(uint32_t(codes[plane] >> 32 * half));
        rank = _mm256_sub_epi8(rank, plane % 2 ? _mm256_add_epi8(ones, ones) : ones);
      }
      const __m256i e = _mm256_sub_epi8(_mm256_set1_epi8(char(top + 1)), _mm256_shuffle_epi8(ks, rank));
      store(exponent + 32 * half, _mm256_and_si256(e, _mm256_cmpgt_epi8(window, rank)));
    }
  }
};

}  // namespace
}  // namespace zipccl
