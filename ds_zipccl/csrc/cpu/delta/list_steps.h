// The steps of LIST chunks (FORMAT.md 2.5) in portable C++. Levels with vectors hide those that they do faster.
#pragma once
#include "common/bits.h"
#include "common/change_list.cuh"

namespace zipccl {
namespace {

struct ListSteps {
  // Which of 64 words differ.
  template <typename W>
  static uint64_t differing(const uint8_t* words, const uint8_t* base) {
    uint64_t mask = 0;
    for (uint32_t i = 0; i < 64; ++i)
      mask |= uint64_t(load_word<W>(words + i * sizeof(W)) != load_word<W>(base + i * sizeof(W))) << i;
    return mask;
  }
  // Which of 64 words have no bit of `mask`.
  template <typename W>
  static uint64_t without(const uint8_t* words, W mask) {
    uint64_t found = 0;
    for (uint32_t i = 0; i < 64; ++i) found |= uint64_t(!(load_word<W>(words + i * sizeof(W)) & mask)) << i;
    return found;
  }
  // Which of 64 words are `least` or more.
  template <typename W>
  static uint64_t at_least(const W* words, W least) {
    uint64_t mask = 0;
    for (uint32_t i = 0; i < 64; ++i) mask |= uint64_t(words[i] >= least) << i;
    return mask;
  }
  // Writes the places of the ones of mask, plus `first`, to `to`; and the words at the ones. 64 entries there may change.
  static void places(uint64_t mask, uint16_t first, uint16_t* to) {
    for (; mask; mask &= mask - 1) *to++ = uint16_t(first + uint32_t(__builtin_ctzll(mask)));
  }
  template <typename W>
  static void pick(const uint8_t* words, uint64_t mask, W* to) {
    for (; mask; mask &= mask - 1) *to++ = load_word<W>(words + uint32_t(__builtin_ctzll(mask)) * sizeof(W));
  }
  // The r low bits of each of m gaps (64 more are readable); and what remains of them in unary.
  static void put_lows(BitWriter& out, const uint16_t* gaps, uint32_t m, uint32_t r) {
    const uint64_t mask = ones(r);
    uint32_t i = 0;
    for (; i + 4 <= m; i += 4) {
      const uint64_t low = (gaps[i] & mask) | (gaps[i + 1] & mask) << r, high = (gaps[i + 2] & mask) | (gaps[i + 3] & mask) << r;
      out.put(low | high << 2 * r, 4 * r);
    }
    for (; i < m; ++i) out.put(gaps[i] & mask, r);
  }
  static void put_unary(BitWriter& out, const uint16_t* gaps, uint32_t m, uint32_t r) {
    uint32_t i = 0;
    for (; i + 4 <= m; i += 4) {
      const uint32_t a = gaps[i] >> r, b = a + 1 + (gaps[i + 1] >> r), c = b + 1 + (gaps[i + 2] >> r), d = c + 1 + (gaps[i + 3] >> r);
      if (d > 63) {
        for (uint32_t j = i; j < i + 4; ++j) put_rest(out, gaps[j] >> r);
        continue;
      }
      out.put(1ull << a | 1ull << b | 1ull << c | 1ull << d, d + 1);
    }
    for (; i < m; ++i) put_rest(out, gaps[i] >> r);
  }
  static void put_rest(BitWriter& out, uint32_t rest) {
    for (; rest > 63; rest -= 64) out.put(0, 64);
    out.put(1ull << rest, rest + 1);
  }
  // The inverse of put_lows from bit `at` on; 64 entries past the last may change.
  static void get_lows(const uint8_t* bits, uint32_t at, uint32_t m, uint32_t r, uint16_t* lows) {
    for (uint32_t i = 0; i < m; ++i, at += r) lows[i] = uint16_t(peek_bits(bits, at) & ones(r));
  }
  // The places of a set from those of its ones in the unary part and the low bits of its gaps. Returns the last place.
  static uint32_t add_gaps(const uint16_t* at, const uint16_t* lows, uint32_t m, uint32_t r, uint16_t* to) {
    uint32_t sum = 0, place = 0;
    for (uint32_t i = 0; i < m; ++i) {
      sum += lows[i];
      place = i + ((at[i] - i) << r) + sum;
      to[i] = uint16_t(place);
    }
    return place;
  }
};

}  // namespace
}  // namespace zipccl
