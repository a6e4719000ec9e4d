// The arithmetic of CHANGE blocks (FORMAT.md 2.4 and section 3), host and device.
#pragma once
#include "common/exponent_block.cuh"

namespace zipccl {
namespace {

// The words of other dtypes in delta payloads: neither exponent nor sign.
using Byte = FloatBits<uint8_t, 0, 0>;

constexpr uint32_t kLevels = 6;      // an element that has all levels is written as a word
constexpr uint32_t kGroupSizes = 4;  // 1, 4, 8, 16 elements share a bit of the group map

template <typename F>
struct Scale {  // of changes
  static constexpr uint32_t shifts = F::E ? F::M + 1 : 0;                      // the largest k
  static constexpr uint32_t bias = F::M == 23 ? 16 : F::M == 10 ? 4 : 0;  // eighths of a binade from the mean size of the changes
};

// A word as a number in the order of the floats, and back. Bytes are in their own order.
template <typename Word>
ZIPCCL_FN Word order_of(Word w) {
  if (sizeof(Word) == 1) return w;
  constexpr Word sign = Word(Word(1) << (8 * sizeof(Word) - 1));
  return Word(w ^ (Word(Word(0) - (w >> (8 * sizeof(Word) - 1))) | sign));
}
template <typename Word>
ZIPCCL_FN Word word_of(Word order) {
  if (sizeof(Word) == 1) return order;
  constexpr Word sign = Word(Word(1) << (8 * sizeof(Word) - 1));
  return Word(order ^ (Word((order >> (8 * sizeof(Word) - 1)) - 1) | sign));
}

// log2 of the group size that the flags of a tail name.
ZIPCCL_FN constexpr uint32_t group_log2(uint32_t flags) { return flags ? flags + 1 : 0; }

// The group size of n elements with the fewest bits in groups and level 1. `live[f]` are the elements of the groups with some q >= 1,
// for flags f from 1 on.
struct GroupChoice {
  uint32_t flags, bits;
};
ZIPCCL_FN GroupChoice best_groups(uint32_t n, const uint32_t* live) {
  GroupChoice best = {0, n};
  for (uint32_t flags = 1; flags < kGroupSizes; ++flags) {
    const uint32_t bits = ((n - 1) >> group_log2(flags)) + 1 + live[flags];
    if (bits < best.bits) best = {flags, bits};
  }
  return best;
}

// The fewest bytes of n words without a base; more than plane_bytes(n) where they are floats. Not all words are equal, `zeros` of them are
// +0 or -0, and their `trim` low bits are zero.
template <typename F>
ZIPCCL_FN uint32_t least_alone_bytes(uint32_t n, uint32_t zeros, uint32_t trim) {
  const uint32_t raw = body_bytes<F>(RAW, n, 0), map = 1 + plane_bytes(n);
  if (!F::E) return raw;
  const uint32_t coded = 16 * zeros < n ? body_bytes<F>(CASCADE, n, trim)
                                        : map + first_part_bytes(n - zeros, 1 + F::M - trim, Cascade::tier[0].bits);
  return coded < raw ? coded : raw;
}

}  // namespace
}  // namespace zipccl
