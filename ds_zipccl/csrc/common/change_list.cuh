// LIST chunks (FORMAT.md 2.5), and the choice between them and TABLE (section 3), host and device.
#pragma once
#include "common/change_block.cuh"

namespace zipccl {
namespace {

constexpr uint32_t kChunkWords = kChunkBlocks * kMaxBlock;
constexpr uint32_t kListWords = kChunkWords / 4;  // a LIST has no more words in level 1
constexpr uint32_t kListBit = 1u << 31;  // of a chunk's entry in the index
constexpr uint32_t kMaxRice = 13;        // the largest r

// The head of a LIST chunk: the number of levels (1 byte); `m` (u16) and `r` (u8) of each; then the words of level 6.
struct ListSet {
  uint32_t m, r;
};
ZIPCCL_FN constexpr uint32_t list_set_at(uint32_t level) { return 1 + 3 * level; }  // of level 1: 0; of the number of levels: their end

// Bits of m gaps with parameter r, where `sum` is the sum of gap >> r.
ZIPCCL_FN constexpr uint32_t rice_bits(uint32_t m, uint32_t r, uint32_t sum) { return m * (1 + r) + sum; }

// The parameter with the fewest bits, and its sum of gap >> r; the smallest of equals. sum_of(r) adds up gap >> r over m gaps. From r to
// r + 1 the sum falls by that of ceil((gap >> r) / 2), which never grows with r: rice_bits is convex, and the search may begin anywhere.
struct RiceChoice {
  uint32_t r, sum;
};
template <typename SumOf>
ZIPCCL_FN RiceChoice best_rice(uint32_t m, uint32_t guess, SumOf sum_of) {
  uint32_t r = guess < kMaxRice ? guess : kMaxRice, sum = sum_of(r);
  const uint32_t start = r;
  for (uint32_t below; r && rice_bits(m, r - 1, below = sum_of(r - 1)) <= rice_bits(m, r, sum); --r) sum = below;
  if (r < start) return {r, sum};
  for (uint32_t above; r < kMaxRice && rice_bits(m, r + 1, above = sum_of(r + 1)) < rice_bits(m, r, sum); ++r) sum = above;
  return {r, sum};
}
// A guess for m gaps that add up to `sum`: log2 of ln 2 times the mean, rounded.
ZIPCCL_FN uint32_t rice_guess(uint32_t m, uint32_t sum) {
  uint32_t r = 0;
  while (r < kMaxRice && sum > m << r) ++r;
  return r ? r - 1 : 0;
}

// Whether a chunk of n words, of which m differ from their bases, may be a LIST; and whether it is one without a comparison of sizes, where
// `escapes` words have level 6 and level 1 takes no more bits than blocks do (least_table_bits).
ZIPCCL_FN constexpr bool list_allowed(uint32_t n, uint32_t m) { return 4 * m <= n; }
ZIPCCL_FN constexpr bool list_certain(uint32_t n, uint32_t m, uint32_t escapes) { return 8 * m <= n && 4 * escapes <= m; }

// The share of a block in G: `groups` are its fewest bits in groups and level 1 for t = 0, zero where no word changed.
ZIPCCL_FN constexpr uint32_t least_table_bits(uint32_t groups) { return 24 + (groups ? 8 + groups : 0); }

// Bytes of a LIST chunk of `levels` levels whose level 1 has m words; `bits` are those of all gaps, `escapes` the words of level 6.
template <typename F>
ZIPCCL_FN uint32_t list_bytes(uint32_t levels, uint32_t m, uint32_t bits, uint32_t escapes) {
  return pad16(list_set_at(levels) + escapes * uint32_t(sizeof(typename F::Word)) + (bits + m + 7) / 8);
}

}  // namespace
}  // namespace zipccl
