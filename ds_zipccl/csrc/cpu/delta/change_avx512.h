// Steps of CHANGE blocks in AVX-512 (FORMAT.md 2.4) for words of 16 bits, in lanes of their size.
#pragma once
#include <type_traits>

#include "cpu/delta/change_decode.h"
#include "cpu/delta/change_encode.h"
#include "cpu/simd/avx512.h"

namespace zipccl {
namespace {

template <typename F>
struct ChangeSums<F, Avx512Lanes, std::enable_if_t<sizeof(typename F::Word) == 2>> {
  __m512i scales = _mm512_setzero_si512(), bits = _mm512_setzero_si512();  // sums in lanes: a block's are below 2^16
  uint32_t signs = 0, escapes = 0;

  static __m512i every(uint32_t x) { return _mm512_set1_epi16(short(x)); }
  static uint64_t both(__mmask32 low, __mmask32 high) { return uint64_t(low) | uint64_t(high) << 32; }
  static uint32_t total(__m512i lanes) {
    const __m512i ones = every(1);
    return uint32_t(_mm512_reduce_add_epi32(_mm512_madd_epi16(lanes, ones)));
  }
  static __m512i order(__m512i w) {  // w ^ (a | b)
    return _mm512_ternarylogic_epi64(w, _mm512_srai_epi16(w, 15), every(0x8000), 0x1e);
  }
  static void store_low_bytes(uint8_t* to, __m512i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_cvtepi16_epi8(x)); }

  // min(floor(log2 of each), M + 1), zero for zero.
  static __m512i logs(__m512i x) {
    const __m512i low = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 0, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3, 3, 3, 3, 3));
    const __m512i high = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7, 7, 7, 7, 7));
    const __m512i nibble = _mm512_set1_epi8(15);
    const __m512i log = _mm512_max_epu8(_mm512_shuffle_epi8(low, _mm512_and_si512(x, nibble)),
                                        _mm512_shuffle_epi8(high, _mm512_and_si512(_mm512_srli_epi16(x, 4), nibble)));
    const __m512i large = _mm512_min_epu16(_mm512_add_epi16(_mm512_srli_epi16(log, 8), every(8)), every(F::M + 1));
    return _mm512_mask_mov_epi16(_mm512_and_si512(log, every(255)), _mm512_cmpgt_epu16_mask(x, every(255)), large);
  }

  uint64_t survey(const uint8_t* words, const uint8_t* base, uint16_t* to_sizes, uint8_t* to_exponents) {
    __mmask32 negative[2], escaped[2];
#pragma GCC unroll 2
    for (uint32_t i = 0; i < 2; ++i) {
      const __m512i before = _mm512_loadu_si512(base + 64 * i);
      const __m512i d = _mm512_sub_epi16(order(_mm512_loadu_si512(words + 64 * i)), order(before));
      const __m512i size = _mm512_abs_epi16(d), e = _mm512_and_si512(_mm512_srli_epi16(before, F::M), every(F::exponent_mask));
      negative[i] = _mm512_movepi16_mask(d);
      escaped[i] = _mm512_cmpge_epu16_mask(size, every(kLevels));
      _mm512_storeu_si512(to_sizes + 32 * i, size);
      store_low_bytes(to_exponents + 32 * i, e);
      scales = _mm512_add_epi16(_mm512_mask_add_epi16(scales, _mm512_test_epi16_mask(d, d), scales, e), logs(size));
      bits = _mm512_add_epi16(bits, _mm512_min_epu16(size, every(kLevels - 1)));
    }
    escapes += popcount(both(escaped[0], escaped[1]));
    return both(negative[0], negative[1]);
  }
  uint32_t scale() const { return total(scales); }

  uint64_t scale(const uint16_t* sizes, const uint8_t* exponents, uint32_t top, uint8_t* to_levels, uint8_t* to_shifts) {
    __mmask32 level1[2], shifted[2], escaped[2];
#pragma GCC unroll 2
    for (uint32_t i = 0; i < 2; ++i) {
      const __m512i e = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(exponents + 32 * i)));
      const __m512i k = _mm512_maskz_min_epu16(_mm512_test_epi16_mask(e, e), _mm512_subs_epu16(every(top), e), every(Scale<F>::shifts));
      const __m512i q = _mm512_srlv_epi16(_mm512_loadu_si512(sizes + 32 * i), k);
      level1[i] = _mm512_test_epi16_mask(q, q);
      shifted[i] = _mm512_test_epi16_mask(k, k);
      escaped[i] = _mm512_cmpge_epu16_mask(q, every(kLevels));
      bits = _mm512_add_epi16(bits, _mm512_add_epi16(k, _mm512_min_epu16(q, every(kLevels - 1))));
      store_low_bytes(to_levels + 32 * i, _mm512_min_epu16(q, every(kLevels)));
      store_low_bytes(to_shifts + 32 * i, k);
    }
    escapes += popcount(both(escaped[0], escaped[1]));
    signs += popcount(both(level1[0], level1[1]) | both(shifted[0], shifted[1]));
    return both(level1[0], level1[1]);
  }
  uint32_t level_bits() const { return total(bits); }  // q counts as 5 at most: level 6 has no further bit
};

// Where the low bits of all elements fit in a byte: those that have a bit in a plane are packed, so that each plane is one comparison of a
// list of bytes, and shorter than the one before it.
template <typename F>
struct ChangePlanes<F, Avx512Lanes, std::enable_if_t<sizeof(typename F::Word) == 2 && Scale<F>::shifts <= 8>> {
  struct Bytes {
    uint32_t count = 0;
    uint8_t at[kMaxBlock + 64];
    void put(__m512i x, uint64_t mask) {
      Avx512Lanes::compress(x, mask, at + count);
      count += popcount(mask);
    }
  };
  // Calls each(64 bytes of the list, which of them there are), and puts the plane that it returns.
  template <typename Each>
  static void plane(uint32_t count, PlaneBits& plane, Each each) {
    plane.count = count;
    for (uint32_t i = 0; i < count; i += 64) plane.words[i / 64] = each(i, ones(count - i));
  }

  static void fill(const Scaled& scaled, Change<F>& change) {
    Bytes levels, shifts, sizes;
    change.sign.clear();
    for (uint32_t at = 0; at < change.n; at += 64) {
      const __m512i k = Avx512Lanes::load(scaled.shifts + at);
      const uint64_t level1 = change.level1[at / 64], shifted = _mm512_test_epi8_mask(k, k), signs = level1 | shifted;
      levels.put(Avx512Lanes::load(scaled.levels + at), level1);
      change.sign.put(_pext_u64(change.negative[at / 64], signs), popcount(signs));
      change.escaped[at / 64] = 0;
      if (!shifted) continue;
      const __m256i low = _mm512_cvtepi16_epi8(_mm512_loadu_si512(change.sizes + at));
      const __m256i high = _mm512_cvtepi16_epi8(_mm512_loadu_si512(change.sizes + at + 32));
      sizes.put(_mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1), shifted);
      shifts.put(k, shifted);
    }
    for (uint32_t level = 1; level < kLevels; ++level) {  // bytes are packed in place: never past those already read
      const uint32_t count = levels.count;
      levels.count = 0;
      plane(count, change.level[level - 1], [&](uint32_t i, uint64_t here) {
        const __m512i q = Avx512Lanes::load(levels.at + i);
        const uint64_t next = _mm512_mask_cmpgt_epu8_mask(here, q, _mm512_set1_epi8(char(level)));
        levels.put(q, next);
        return next;
      });
    }
    change.escapes = levels.count;
    for (uint32_t p = 0; p < Scale<F>::shifts; ++p) {
      const uint32_t count = shifts.count;
      shifts.count = sizes.count = 0;
      plane(count, change.low[p], [&](uint32_t i, uint64_t here) {
        const __m512i k = Avx512Lanes::load(shifts.at + i), size = Avx512Lanes::load(sizes.at + i);
        const uint64_t next = _mm512_mask_cmpgt_epu8_mask(here, k, _mm512_set1_epi8(char(p + 1)));
        if (next) {
          shifts.put(k, next);
          sizes.put(size, next);
        }
        return _mm512_mask_test_epi8_mask(here, size, _mm512_set1_epi8(char(1 << p)));
      });
    }
    for (uint32_t at = 0; change.escapes && at < change.n; at += 64)
      change.escaped[at / 64] = _mm512_cmpge_epu8_mask(Avx512Lanes::load(scaled.levels + at), _mm512_set1_epi8(kLevels));
  }
};

// The inverse of ChangePlanes: lists of bytes that grow from the highest level, and the highest low bit, down.
template <typename F>
struct ChangeReader<F, Avx512Lanes, std::enable_if_t<sizeof(typename F::Word) == 2 && Scale<F>::shifts <= 8>> {
  using Sums = ChangeSums<F, Avx512Lanes>;
  struct List {
    uint8_t at[kMaxBlock + 64];
  };
  static __m512i shifts_of_words(__m512i base, uint32_t top) {
    const __m512i e = _mm512_and_si512(_mm512_srli_epi16(base, F::M), Sums::every(F::exponent_mask));
    return _mm512_maskz_min_epu16(_mm512_test_epi16_mask(e, e), _mm512_subs_epu16(Sums::every(top), e), Sums::every(Scale<F>::shifts));
  }
  // Half i of a group of n words, zeros after them.
  static __mmask32 half_of(uint32_t n, uint32_t i) { return __mmask32(ones(n) >> 32 * i); }

  static Status read(const uint8_t* tail, uint32_t bytes, uint32_t at, uint32_t count, const uint64_t* marked, const uint8_t* base,
                     uint32_t n, uint32_t top, uint8_t* words) {
    const uint32_t end = 8 * bytes;
    uint64_t level1[kGroups], shifted[kGroups], further[kLevels][kGroups], more[Scale<F>::shifts + 1][kGroups];
    List lists[4];
    // Levels: `further` are those of a list that have the next level.
    if (at + count > end) return BLOCK;
    uint32_t counts[kLevels + 1] = {count};
    for (uint32_t i = 0; i < n; i += 64) {
      level1[i / 64] = _pdep_u64(peek_bits(tail, at), marked[i / 64]);
      at += popcount(marked[i / 64]);
      counts[1] += popcount(level1[i / 64]);
    }
    for (uint32_t level = 1; level < kLevels; ++level) {
      if (at + counts[level] > end) return BLOCK;
      for (uint32_t i = 0; i < counts[level]; i += 64) {
        further[level][i / 64] = peek_bits(tail, at + i) & ones(counts[level] - i);
        counts[level + 1] += popcount(further[level][i / 64]);
      }
      at += counts[level];
    }
    // Low bits: their places follow from the base.
    const uint32_t signs_at = at, escapes = counts[kLevels];
    uint32_t lows[Scale<F>::shifts + 1] = {0}, low_at[Scale<F>::shifts + 1];
    List& shifts = lists[0];
    for (uint32_t i = 0; i < n; i += 64) {
      const auto half = [&](uint32_t h) {
        const __m512i b = _mm512_maskz_loadu_epi16(half_of(n - i, h), base + (i + 32 * h) * 2);
        return _mm512_cvtepi16_epi8(shifts_of_words(b, top));
      };
      const __m512i k = _mm512_inserti64x4(_mm512_castsi256_si512(half(0)), half(1), 1);
      shifted[i / 64] = _mm512_test_epi8_mask(k, k);
      Avx512Lanes::compress(k, shifted[i / 64], shifts.at + lows[0]);
      lows[0] += popcount(shifted[i / 64]);
      at += popcount(shifted[i / 64] | level1[i / 64]);
    }
    for (uint32_t p = 0; p < Scale<F>::shifts; ++p) {
      low_at[p] = at;
      for (uint32_t i = 0; i < lows[p]; i += 64) {  // packed in place: never past those already read
        const __m512i k = Avx512Lanes::load(shifts.at + i);
        more[p][i / 64] = _mm512_mask_cmpgt_epu8_mask(ones(lows[p] - i), k, _mm512_set1_epi8(char(p + 1)));
        Avx512Lanes::compress(k, more[p][i / 64], shifts.at + lows[p + 1]);
        lows[p + 1] += popcount(more[p][i / 64]);
      }
      at += lows[p];
    }
    const uint32_t escapes_at = (at + 7) / 8;
    if (escapes_at + escapes * sizeof(uint16_t) != bytes) return BLOCK;

    uint8_t *q = lists[0].at, *low = lists[2].at;
    memset(q, kLevels, escapes);
    for (uint32_t level = kLevels - 1; level; --level) {
      uint8_t *to = q == lists[0].at ? lists[1].at : lists[0].at, *from = q;
      for (uint32_t i = 0; i < counts[level]; i += 64) {
        const uint64_t next = further[level][i / 64];
        Avx512Lanes::store(to + i, Avx512Lanes::expand(_mm512_set1_epi8(char(level)), next, from));
        from += popcount(next);
      }
      q = to;
    }
    for (uint32_t p = Scale<F>::shifts; p-- > 0;) {
      if (!lows[p]) continue;
      uint8_t *to = low == lists[2].at ? lists[3].at : lists[2].at, *from = low;
      for (uint32_t i = 0; i < lows[p]; i += 64) {
        const uint64_t next = more[p][i / 64];
        const __m512i above = Avx512Lanes::expand(_mm512_setzero_si512(), next, from);
        Avx512Lanes::store(to + i, _mm512_mask_add_epi8(above, peek_bits(tail, low_at[p] + i), above, _mm512_set1_epi8(char(1 << p))));
        from += popcount(next);
      }
      low = to;
    }

    uint32_t sign_at = signs_at;
    const uint8_t* escape = tail + escapes_at;
    for (uint32_t i = 0; i < n; i += 64) {
      const uint64_t signs = level1[i / 64] | shifted[i / 64], minus = _pdep_u64(peek_bits(tail, sign_at), signs);
      sign_at += popcount(signs);
      const __m512i levels = Avx512Lanes::expand(_mm512_setzero_si512(), level1[i / 64], q);
      const __m512i bits = Avx512Lanes::expand(_mm512_setzero_si512(), shifted[i / 64], low);
      q += popcount(level1[i / 64]);
      low += popcount(shifted[i / 64]);
      const __m256i both[2][2] = {{_mm512_castsi512_si256(levels), _mm512_castsi512_si256(bits)},
                                  {_mm512_extracti64x4_epi64(levels, 1), _mm512_extracti64x4_epi64(bits, 1)}};
#pragma GCC unroll 2
      for (uint32_t h = 0; h < 2; ++h) {
        const __mmask32 here = half_of(n - i, h);
        const __m512i b = _mm512_maskz_loadu_epi16(here, base + (i + 32 * h) * 2);
        const __m512i level = _mm512_sllv_epi16(_mm512_cvtepu8_epi16(both[h][0]), shifts_of_words(b, top));
        const __m512i size = _mm512_or_si512(level, _mm512_cvtepu8_epi16(both[h][1]));
        const __m512i d = _mm512_mask_sub_epi16(size, __mmask32(minus >> 32 * h), _mm512_setzero_si512(), size);
        const __m512i order = _mm512_add_epi16(Sums::order(b), d);
        const __m512i word = _mm512_ternarylogic_epi64(order, _mm512_srai_epi16(order, 15), Sums::every(0x8000), 0x4b);  // order ^ (~a | b)
        _mm512_mask_storeu_epi16(words + (i + 32 * h) * 2, here, word);
      }
      if (!escapes) continue;
      for (uint64_t left = _mm512_cmpeq_epi8_mask(levels, _mm512_set1_epi8(kLevels)); left; left &= left - 1, escape += 2)
        memcpy(words + (i + uint32_t(__builtin_ctzll(left))) * 2, escape, 2);
    }
    return OK;
  }
};

}  // namespace
}  // namespace zipccl
