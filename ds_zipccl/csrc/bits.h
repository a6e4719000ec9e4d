// Bit planes on the host: 64 elements at a time, one bit each.
#pragma once
#include <stdint.h>
#include <string.h>
#ifdef ZIPCCL_BMI2
#include <immintrin.h>
#endif

namespace zipccl {
namespace {

inline uint64_t ones(uint32_t n) { return n >= 64 ? ~0ull : (1ull << n) - 1; }
inline uint32_t popcount(uint64_t x) { return uint32_t(__builtin_popcountll(x)); }

// Bits of x at the ones of mask, packed to the low end; and the inverse.
inline uint64_t compress_bits(uint64_t x, uint64_t mask) {
#ifdef ZIPCCL_BMI2
  return _pext_u64(x, mask);
#else
  uint64_t out = 0;
  for (uint32_t at = 0; mask; mask &= mask - 1, ++at) out |= (x >> __builtin_ctzll(mask) & 1) << at;
  return out;
#endif
}
inline uint64_t expand_bits(uint64_t x, uint64_t mask) {
#ifdef ZIPCCL_BMI2
  return _pdep_u64(x, mask);
#else
  uint64_t out = 0;
  for (; mask; mask &= mask - 1, x >>= 1)
    if (x & 1) out |= mask & -mask;
  return out;
#endif
}

// The low bits of 8 bytes as one byte, and the inverse: bytes of 0 or 1.
inline uint64_t gather_low_bits(uint64_t bytes) { return (bytes & 0x0101010101010101ull) * 0x0102040810204080ull >> 56; }
inline uint64_t spread_low_bits(uint64_t bits) {
  uint64_t picked = (bits & 0xff) * 0x0101010101010101ull & 0x8040201008040201ull;
  return (picked + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull;
}


// The n (at most 64) bits of a plane that start at element `at`, a multiple of 64; bits past n are zero.
inline uint64_t load_plane(const uint8_t* plane, uint32_t at, uint32_t n) {
  uint64_t word = 0;
  memcpy(&word, plane + at / 8, (n + 7) / 8);
  return word & ones(n);
}
inline void store_plane(uint8_t* plane, uint32_t at, uint32_t n, uint64_t word) { memcpy(plane + at / 8, &word, (n + 7) / 8); }

// A growing bit string; the caller owns room for all its bits and 8 bytes more.
struct BitWriter {
  uint8_t* bytes;
  uint32_t bits = 0;
  explicit BitWriter(uint8_t* to) : bytes(to) { bytes[0] = 0; }
  void put(uint64_t value, uint32_t n) {  // value has no bits past n
    uint32_t shift = bits % 8;
    uint64_t low = value << shift | bytes[bits / 8];
    memcpy(bytes + bits / 8, &low, 8);
    bytes[bits / 8 + 8] = shift ? uint8_t(value >> (64 - shift)) : 0;
    bits += n;
  }
};

// n (at most 64) bits from bit `at` of a string that has 9 readable bytes past its end.
inline uint64_t read_bits(const uint8_t* bytes, uint32_t at, uint32_t n) {
  uint64_t low;
  uint32_t shift = at % 8;
  memcpy(&low, bytes + at / 8, 8);
  low >>= shift;
  if (shift) low |= uint64_t(bytes[at / 8 + 8]) << (64 - shift);
  return low & ones(n);
}

}  // namespace
}  // namespace zipccl
