// Elements, groups and planes of CHANGE blocks on the CPU (FORMAT.md 2.4); encoder and decoder share the arithmetic of 64 elements.
#pragma once
#include "common/bits.h"
#include "common/change_block.cuh"

namespace zipccl {
namespace {

// Asks for the words and bases of the chunk that probably comes next, two cache lines at a time: requests in a burst would stall the work
// behind which they hide.
struct Ahead {
  const uint8_t *words, *base;
  uint32_t bytes, at = 0;
  void ask() {
    if (at >= bytes) return;
    prefetch(words + at);
    prefetch(base + at);
    at += 64;
  }
};

constexpr uint32_t kStep = 4;  // low planes that are handled together
template <typename F>
constexpr uint32_t kLowPlanes = Scale<F>::shifts ? Scale<F>::shifts : 1;  // of bytes too, whose k are zero

// k of 64 elements from their bases' exponents.
template <typename F>
inline void shifts_of(const uint8_t* exponents, uint32_t top, uint8_t* shifts) {
  const uint8_t t = uint8_t(top);
  for (uint32_t i = 0; i < 64; ++i) {
    const uint8_t e = exponents[i], above = uint8_t(t > e ? t - e : 0), most = uint8_t(Scale<F>::shifts);
    shifts[i] = uint8_t((above < most ? above : most) & (e ? 255 : 0));
  }
}

// The first element of each group of 1 << log2, of n (at most 64) elements.
inline uint64_t group_starts(uint32_t log2, uint32_t n) {
  static const uint64_t first[] = {~0ull, 0, 0x1111111111111111ull, 0x0101010101010101ull, 0x0001000100010001ull};
  return first[log2] & ones(n);
}
// Elements of the groups in which some bit of x is set.
inline uint64_t fill_groups(uint64_t x, uint32_t log2) {
  for (uint32_t by = 1; by < 1u << log2; by *= 2) x |= x >> by;
  return (x & group_starts(log2, 64)) * ((1ull << (1u << log2)) - 1);
}

}  // namespace
}  // namespace zipccl
