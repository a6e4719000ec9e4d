// Bit planes in registers: a lane has 32 elements in a row, one bit of each in a register, so that an instruction works on 32 elements.
#pragma once
#include "cuda/warp.cuh"

namespace zipccl {
namespace {

// Bits of a 4 x 4 square: exchanges the bits of x under ~mask with the bits of y under mask, `shift` places below.
ZIPCCL_DEVICE void exchange_bits(uint32_t& x, uint32_t& y, uint32_t shift, uint32_t mask) {
  const uint32_t low = blend(mask, x, y << shift);
  y = blend(mask, x >> shift, y);
  x = low;
}

// Numbers of four bits of 32 elements. As octets: octet q in word q, elements i and i + 4 in the low and high half of byte i. As planes:
// bit b of element n in word b, bit n.
struct Nibbles {
  uint32_t word[4];

  // Word q, byte i to word i, byte q.
  ZIPCCL_DEVICE void transpose_bytes() {
    const uint32_t a = __byte_perm(word[0], word[1], 0x5140), b = __byte_perm(word[2], word[3], 0x5140);
    const uint32_t c = __byte_perm(word[0], word[1], 0x7362), d = __byte_perm(word[2], word[3], 0x7362);
    word[0] = __byte_perm(a, b, 0x5410), word[1] = __byte_perm(a, b, 0x7632);
    word[2] = __byte_perm(c, d, 0x5410), word[3] = __byte_perm(c, d, 0x7632);
  }
  // Word i, bit b of each half byte to word b, bit i.
  ZIPCCL_DEVICE void transpose_bits() {
    exchange_bits(word[0], word[1], 1, 0x55555555u), exchange_bits(word[2], word[3], 1, 0x55555555u);
    exchange_bits(word[0], word[2], 2, 0x33333333u), exchange_bits(word[1], word[3], 2, 0x33333333u);
  }
  ZIPCCL_DEVICE void octets_to_planes() { transpose_bytes(), transpose_bits(); }
  ZIPCCL_DEVICE void planes_to_octets() { transpose_bits(), transpose_bytes(); }
};

// Bit k of a table of 16 bits for each element's number k.
template <uint32_t kTable>
ZIPCCL_DEVICE uint32_t look_up(const Nibbles& k) {
  const uint32_t below = look_up3<(kTable & 255)>(k.word[2], k.word[1], k.word[0]);
  if constexpr ((kTable & 255) == kTable >> 8) return below;
  const uint32_t above = look_up3<(kTable >> 8)>(k.word[2], k.word[1], k.word[0]);
  return (k.word[3] & above) | (~k.word[3] & below);
}

// How the bits that a mask marks move close together and back (Warren, "Hacker's Delight", 7-4 and 7-5): first in each byte, in three
// steps for all bytes at a time, then by byte.
struct Moves {
  uint32_t mask, moved[3];  // the places to which bits move by 1, 2 and 4
  uint32_t packed;          // the marked bits' places in each byte
  uint32_t at[3];           // places of the second to fourth byte's first bit

  ZIPCCL_DEVICE explicit Moves(uint32_t marks) : mask(marks) {
    uint32_t left = marks, zeros = ~marks << 1 & 0xfefefefeu;
#pragma unroll
    for (uint32_t step = 0; step < 3; ++step) {
      // Whether the number of zeros below is odd; then, of their pairs; then, of their fours.
      uint32_t odd = zeros ^ (zeros << 1 & 0xfefefefeu);
      odd ^= odd << 2 & 0xfcfcfcfcu;
      odd ^= odd << 4 & 0xf0f0f0f0u;
      moved[step] = (odd & left) >> (1 << step);
      left = (left & ~odd) | moved[step];
      zeros &= ~odd;
    }
    packed = left;
#pragma unroll
    for (uint32_t byte = 0; byte < 3; ++byte) at[byte] = uint32_t(__popc(marks & (256u << 8 * byte) - 1));
  }
  // The marked bits, close together from bit 0 on; bits past them are zero.
  ZIPCCL_DEVICE uint32_t close(uint32_t x) const {
#pragma unroll
    for (uint32_t step = 0; step < 3; ++step) x = blend(moved[step], x >> (1 << step), x);
    x &= packed;  // bits that were not marked, or have moved, are left above
    return __byte_perm(x, 0, 0x4440) + (__byte_perm(x, 0, 0x4441) << at[0]) + (__byte_perm(x, 0, 0x4442) << at[1]) + (x >> 24 << at[2]);
  }
  // The inverse; bits that are not marked are zero.
  ZIPCCL_DEVICE uint32_t open(uint32_t x) const {
    x = __byte_perm(__byte_perm(x, x >> at[0], 0x0040), __byte_perm(x >> at[1], x >> at[2], 0x0040), 0x5410);
#pragma unroll
    for (uint32_t step = 3; step-- > 0;) x = blend(moved[step] << (1 << step), x << (1 << step), x);
    return x & mask;
  }
};

// The same bit by bit, from the highest mark on, for a few marks.
ZIPCCL_DEVICE void close_few(uint32_t marks, uint32_t& low, uint32_t& high) {
  uint32_t lows = 0, highs = 0;
  while (marks) {
    const uint32_t above = zeros_above(marks);
    marks <<= above, low <<= above, high <<= above;
    lows = __funnelshift_l(low, lows, 1), highs = __funnelshift_l(high, highs, 1);
    marks &= 0x7fffffffu;
  }
  low = lows, high = highs;
}
ZIPCCL_DEVICE void open_few(uint32_t marks, uint32_t& low, uint32_t& high) {
  uint32_t lows = 0, highs = 0;
  const uint32_t unused = 32 - uint32_t(__popc(marks));
  for (low <<= unused % 32, high <<= unused % 32; marks; low <<= 1, high <<= 1) {
    const uint32_t mark = 0x80000000u >> zeros_above(marks);
    marks ^= mark;
    lows |= mark & uint32_t(int32_t(low) >> 31), highs |= mark & uint32_t(int32_t(high) >> 31);
  }
  low = lows, high = highs;
}

}  // namespace
}  // namespace zipccl
