// The arithmetic of CHANGE blocks (FORMAT.md 2.3 and section 3), host and device.
#pragma once
#include "common/exponent_block.cuh"

namespace zipccl {
namespace {

constexpr uint32_t kLevels = 6;  // an element that has all levels is written as a word

template <typename F>
struct Scale {  // of changes
  static constexpr uint32_t shifts = F::M + 1;                               // the largest k
  static constexpr uint32_t bias = F::M == 23 ? 16 : F::M == 10 ? 4 : 0;  // eighths of a binade from the mean size of the changes
};

// A word as a number in the order of the floats, and back.
template <typename Word>
ZIPCCL_FN Word order_of(Word w) {
  constexpr Word sign = Word(Word(1) << (8 * sizeof(Word) - 1));
  return Word(w ^ (Word(Word(0) - (w >> (8 * sizeof(Word) - 1))) | sign));
}
template <typename Word>
ZIPCCL_FN Word word_of(Word order) {
  constexpr Word sign = Word(Word(1) << (8 * sizeof(Word) - 1));
  return Word(order ^ (Word((order >> (8 * sizeof(Word) - 1)) - 1) | sign));
}

// The fewest bytes of n words without a base; more than plane_bytes(n). Not all words are equal, `zeros` of them are +0 or -0, and their
// `trim` low bits are zero.
template <typename F>
ZIPCCL_FN uint32_t least_alone_bytes(uint32_t n, uint32_t zeros, uint32_t trim) {
  const uint32_t raw = body_bytes<F>(RAW, n, 0), map = 1 + plane_bytes(n);
  const uint32_t coded = 16 * zeros < n ? body_bytes<F>(CASCADE, n, trim)
                                        : map + first_part_bytes(n - zeros, 1 + F::M - trim, Cascade::tier[0].bits);
  return coded < raw ? coded : raw;
}

}  // namespace
}  // namespace zipccl
