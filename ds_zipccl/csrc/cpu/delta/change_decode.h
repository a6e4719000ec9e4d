// Decoder of CHANGE blocks on the CPU (FORMAT.md 2.4).
#pragma once
#include "cpu/delta/change_parts.h"
#include "cpu/decode.h"

namespace zipccl {
namespace {

// Reads a CHANGE tail from its level 1 on. Levels with vectors specialize it.
template <typename F, typename Lanes, typename Enable = void>
struct ChangeReader {
  using Word = typename F::Word;

  // `level1` are the elements of the `count` bits that begin at bit `at` of the tail; the rest as in decode_change.
  static Status read(const uint8_t* tail, uint32_t bytes, uint32_t at, uint32_t count, uint64_t* level1, const uint8_t* base, uint32_t n,
                     uint32_t top, uint8_t* words) {
    const uint32_t end = 8 * bytes;
    uint64_t reached[kGroups], q[3][kGroups], shift[kLowPlanes<F>][kGroups];
    memcpy(reached, level1, sizeof reached);
    // Levels as binary numbers in three planes: an element that goes on from level to level counts up.
    for (uint32_t level = 1; level <= kLevels; ++level) {
      if (at + count > end) return BLOCK;
      if (!count && level > 1) break;
      count = 0;
      const uint64_t second = level % 2 ? 0 : ~0ull, third = level == 4 ? ~0ull : 0;
      for (uint32_t i = 0; i < n; i += 64) {
        uint64_t& here = reached[i / 64];
        if (level == 1) q[0][i / 64] = q[1][i / 64] = q[2][i / 64] = 0;
        if (level > 2 && !here) continue;  // rare at these levels
        const uint32_t bits = popcount(here);
        here = Lanes::scatter(peek_bits(tail, at), here);
        at += bits;
        count += popcount(here);
        if (level == 1) level1[i / 64] = here;
        q[0][i / 64] ^= here;
        q[1][i / 64] ^= here & second;
        q[2][i / 64] |= here & third;
      }
    }
    uint32_t sign_at = at, low_at[kLowPlanes<F>], lows[kLowPlanes<F>] = {0};
    each_group(n, [&](uint32_t i, uint32_t here) __attribute__((always_inline)) {
      Word ragged[64];
      alignas(64) uint8_t exponents[64], shifts[64];
      const uint8_t* b = base + i * sizeof(Word);
      if (here < 64) {
        memset(ragged, 0, sizeof ragged);
        b = static_cast<const uint8_t*>(memcpy(ragged, b, here * sizeof(Word)));
      }
      for (uint32_t j = 0; j < 64; ++j) exponents[j] = uint8_t(F::exponent(load_word<Word>(b + j * sizeof(Word))));
      shifts_of<F>(exponents, top, shifts);
      const auto k = Lanes::load(shifts);
      for (uint32_t p = 0; p < kLowPlanes<F>; ++p) {
        shift[p][i / 64] = Lanes::above(k, uint8_t(p));
        lows[p] += popcount(shift[p][i / 64]);
      }
      at += popcount(level1[i / 64] | shift[0][i / 64]);
    });
    for (uint32_t p = 0; p < Scale<F>::shifts; ++p) {
      low_at[p] = at;
      at += lows[p];
    }
    const uint32_t escapes_at = (at + 7) / 8;
    if (escapes_at + count * sizeof(Word) != bytes) return BLOCK;
    const uint8_t* escape = tail + escapes_at;
    each_group(n, [&](uint32_t i, uint32_t here) __attribute__((always_inline)) {
      const uint32_t g = i / 64;
      alignas(64) uint8_t negative[64], levels[64];
      alignas(64) Word sizes[64], units[64], after[64], ragged[64];
      const uint8_t* b = base + i * sizeof(Word);
      const uint64_t signs = level1[g] | shift[0][g], minus = Lanes::scatter(peek_bits(tail, sign_at), signs);
      sign_at += popcount(signs);
      const uint64_t level[3] = {q[0][g], q[1][g], q[2][g]};
      Lanes::store(negative, Lanes::from_planes(&minus, 1));
      Lanes::store(levels, Lanes::from_planes(level, 3));
      typename Lanes::template Vec<Word> low = {}, unit = {};  // of k: 2^k - 1
#pragma GCC unroll 8
      for (uint32_t first = 0; first < Scale<F>::shifts; first += kStep) {
        if (!shift[first][g]) break;  // no element has a higher bit
        uint64_t bits[kStep], has[kStep];
#pragma GCC unroll 4
        for (uint32_t p = 0; p < kStep; ++p) {
          const bool exists = first + p < Scale<F>::shifts;
          has[p] = exists ? shift[first + p][g] : 0;
          bits[p] = exists ? Lanes::scatter(peek_bits(tail, low_at[first + p]), has[p]) : 0;
          if (exists) low_at[first + p] += popcount(has[p]);
        }
        low = low | (Lanes::template widen<Word>(Lanes::from_planes(bits, kStep)) << first);
        unit = unit | (Lanes::template widen<Word>(Lanes::from_planes(has, kStep)) << first);
      }
      Lanes::template store_words<Word>(reinterpret_cast<uint8_t*>(sizes), low);
      Lanes::template store_words<Word>(reinterpret_cast<uint8_t*>(units), unit);
      if (here < 64) {
        memset(ragged, 0, sizeof ragged);
        b = static_cast<const uint8_t*>(memcpy(ragged, b, here * sizeof(Word)));
      }
      for (uint32_t j = 0; j < 64; ++j) {
        const Word size = Word(sizes[j] + uint32_t(levels[j]) * (units[j] + 1u)), flip = Word(Word(0) - negative[j]);
        after[j] = word_of(Word(order_of(load_word<Word>(b + j * sizeof(Word))) + Word((size ^ flip) - flip)));
      }
      memcpy(words + i * sizeof(Word), after, here * sizeof(Word));
      for (uint64_t left = reached[g]; left; left &= left - 1, escape += sizeof(Word))
        memcpy(words + (i + uint32_t(__builtin_ctzll(left))) * sizeof(Word), escape, sizeof(Word));
    });
    return OK;
  }
};

// Decodes a CHANGE tail of `bytes` bytes (16 more are readable). `words` are where the base is, or elsewhere.
template <typename F, typename Lanes>
Status decode_change(const uint8_t* tail, uint32_t bytes, const uint8_t* base, uint32_t n, uint32_t top, uint8_t* words) {
  using Word = typename F::Word;
  if (!bytes) {
    if (words != base) memcpy(words, base, n * sizeof(Word));
    return OK;
  }
  if (tail[0] >= kGroupSizes) return BLOCK;
  const uint32_t log2 = group_log2(tail[0]), end = 8 * bytes;
  uint64_t level1[kGroups];  // the elements that have a bit there
  uint32_t at = 8, count = n;
  for (uint32_t i = 0; i < n; i += 64) level1[i / 64] = ones(n - i);
  if (log2) {
    if (at + (((n - 1) >> log2) + 1) > end) return BLOCK;
    count = 0;
    for (uint32_t i = 0; i < n; i += 64) {
      const uint64_t starts = group_starts(log2, n - i);
      level1[i / 64] &= fill_groups(Lanes::scatter(peek_bits(tail, at), starts), log2);
      at += popcount(starts);
      count += popcount(level1[i / 64]);
    }
  }
  return ChangeReader<F, Lanes>::read(tail, bytes, at, count, level1, base, n, top, words);
}

}  // namespace
}  // namespace zipccl
