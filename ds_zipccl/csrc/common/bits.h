// Bit planes and bit strings on the host: 64 elements at a time, one bit each.
#pragma once
#include <stdint.h>
#include <string.h>

#include "common/exponent_block.cuh"

namespace zipccl {
namespace {

constexpr uint32_t kGroups = kMaxBlock / 64;  // of 64 elements

inline uint64_t ones(uint32_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }
inline uint32_t popcount(uint64_t x) { return uint32_t(__builtin_popcountll(x)); }

// The n (at most 64) bits of a plane that start at element `at`, a multiple of 64; bits past n are zero.
inline uint64_t load_plane(const uint8_t* plane, uint32_t at, uint32_t n) {
  uint64_t word = 0;
  memcpy(&word, plane + at / 8, (n + 7) / 8);
  return word & ones(n);
}
inline void store_plane(uint8_t* plane, uint32_t at, uint32_t n, uint64_t word) { memcpy(plane + at / 8, &word, (n + 7) / 8); }

// Writes a bit string, 64 bits at a time; up to 16 bytes past its end may change.
struct BitWriter {
  uint8_t* word;
  uint64_t bits = 0;  // of the word under way, `fill` of them
  uint32_t fill = 0;
  explicit BitWriter(uint8_t* to) : word(to) {}
  void put(uint64_t value, uint32_t n) {  // n at most 64; value has no bits past n
    bits |= value << fill;
    memcpy(word, &bits, 8);
    const uint64_t over = value >> 1 >> (63 - fill);
    const bool full = fill + n >= 64;
    bits = full ? over : bits;
    word += full ? 8 : 0;
    fill = (fill + n) % 64;
  }
  uint8_t* end() {  // the byte after the last bit
    memcpy(word, &bits, 8);
    return word + (fill + 7) / 8;
  }
};

// The 64 bits from bit `at` of a string that has 9 readable bytes past its end; and the first n of them.
inline uint64_t peek_bits(const uint8_t* bytes, uint32_t at) {
  uint64_t low;
  const uint32_t shift = at % 8;
  memcpy(&low, bytes + at / 8, 8);
  return low >> shift | uint64_t(bytes[at / 8 + 8]) << 1 << (63 - shift);
}
inline uint64_t read_bits(const uint8_t* bytes, uint32_t at, uint32_t n) { return peek_bits(bytes, at) & ones(n); }

// The two bit planes of a tier after the first, and its entries.
struct TierPlanes {
  uint32_t count = 0;
  uint64_t low[kMaxBlock / 64], high[kMaxBlock / 64];
};

// Extremes and sum of exponents.
struct Survey {
  uint32_t least, largest, sum;
};

// A number as a type, for generic lambdas.
template <uint32_t kValue>
struct Index {
  static constexpr uint32_t value = kValue;
};

// Calls step(at, n) for every group of 64 of m elements; inlined twice, so that copies of a whole group have a fixed size.
template <typename Step>
__attribute__((always_inline)) inline void each_group(uint32_t m, Step step) {
  uint32_t at = 0;
  for (; at + 64 <= m; at += 64) step(at, 64u);
  if (at < m) step(at, m - at);
}

// Ask for a cache line, to read or to write it; any address is allowed.
inline void prefetch(const uint8_t* at) { __builtin_prefetch(at, 0, 2); }
inline void prefetch_to_write(const uint8_t* at) { __builtin_prefetch(at, 1, 2); }

// A word at any address.
template <typename W>
inline W load_word(const uint8_t* from) {
  W w;
  memcpy(&w, from, sizeof w);
  return w;
}

}  // namespace
}  // namespace zipccl
