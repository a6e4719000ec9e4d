// LIST chunks of delta payloads on the CPU (FORMAT.md 2.5 and section 3).
#pragma once
#include "common/bits.h"
#include "common/change_list.cuh"
#include "cpu/delta/change_parts.h"

namespace zipccl {
namespace {

constexpr uint32_t kChunkGroups = kChunkWords / 64;
// A LIST chunk is shorter, but for zeros at its end: all its gaps add up to no more than the sizes of their sets.
constexpr uint32_t kListBytes =
    list_set_at(kLevels) + kListWords * 4 + (kLevels * kListWords * (kMaxRice + 2) + kListWords + kChunkWords) / 8;

// Which words of a chunk differ from their bases'.
struct ChangeMap {
  uint32_t count;
  uint64_t words[kChunkGroups];
};
template <typename F, typename Lanes>
void map_changes(const uint8_t* words, const uint8_t* base, uint32_t n, ChangeMap& map) {
  using Word = typename F::Word;
  map.count = 0;
  uint32_t at = 0;
  for (; at + 64 <= n; at += 64) {
    const uint64_t mask = Lanes::template differing<Word>(words + at * sizeof(Word), base + at * sizeof(Word));
    map.words[at / 64] = mask;
    map.count += popcount(mask);
  }
  if (at == n) return;
  Word ragged[2][64] = {};
  memcpy(ragged[0], words + at * sizeof(Word), (n - at) * sizeof(Word));
  memcpy(ragged[1], base + at * sizeof(Word), (n - at) * sizeof(Word));
  const uint64_t mask = Lanes::template differing<Word>(reinterpret_cast<uint8_t*>(ragged[0]), reinterpret_cast<uint8_t*>(ragged[1]));
  map.words[at / 64] = mask;
  map.count += popcount(mask);
}

// The changes of a chunk in at most kListWords words.
template <typename F>
struct List {
  using Word = typename F::Word;
  uint32_t levels, escapes, bits;
  ListSet sets[kLevels];
  uint16_t gaps[kLevels][kListWords + 64];
  uint16_t places[kListWords + 64];
  Word words[kListWords + 64], sizes[kListWords + 64];  // in the end `words` are those of level 6
  uint64_t negative[kListWords / 64 + 1];
};

// Chooses the parameter of a level of m places among `list.places`; returns its bits.
template <typename F>
uint32_t enter_level(List<F>& list, uint32_t m) {
  uint16_t* const gaps = list.gaps[list.levels];
  gaps[0] = list.places[0];
  for (uint32_t i = 1; i < m; ++i) gaps[i] = uint16_t(list.places[i] - list.places[i - 1] - 1);
  const RiceChoice choice = best_rice(m, rice_guess(m, list.places[m - 1] + 1 - m), [&](uint32_t r) {
    uint16_t sum = 0;  // of all gaps it is below the chunk's words
    for (uint32_t i = 0; i < m; ++i) sum = uint16_t(sum + (gaps[i] >> r));
    return uint32_t(sum);
  });
  list.sets[list.levels++] = {m, choice.r};
  return rice_bits(m, choice.r, choice.sum);
}

// Level 1 of a chunk's changes.
template <typename F, typename Lanes>
void list_level1(const ChangeMap& map, uint32_t n, Ahead& ahead, List<F>& list) {
  uint32_t count = 0;
  for (uint32_t group = 0; group * 64 < n; ++group) {
    if (group % 2) ahead.ask();
    Lanes::places(map.words[group], uint16_t(group * 64), list.places + count);
    count += popcount(map.words[group]);
  }
  list.levels = 0;
  list.bits = enter_level(list, count);
}

// Sizes and signs of the changes, and the levels after the first.
template <typename F, typename Lanes>
void list_levels(const uint8_t* words, const uint8_t* base, uint32_t count, Ahead& ahead, List<F>& list) {
  using Word = typename F::Word;
  constexpr uint32_t top_bit = 8 * sizeof(Word) - 1;
  Word* const before = list.sizes;  // until the sizes take their places
  for (uint32_t i = 0; i < count; ++i) {
    if (i % 4 == 0) ahead.ask();
    const uint32_t at = list.places[i] * uint32_t(sizeof(Word));
    memcpy(list.words + i, words + at, sizeof(Word));
    memcpy(before + i, base + at, sizeof(Word));
  }
  memset(before + count, 0, 64 * sizeof(Word));
  memset(list.words + count, 0, 64 * sizeof(Word));
  for (uint32_t at = 0; at < count; at += 64) {
    alignas(64) Word minus[64];
    for (uint32_t i = 0; i < 64; ++i) {
      const Word d = Word(order_of(list.words[at + i]) - order_of(before[at + i])), flip = Word(Word(0) - (d >> top_bit));
      minus[i] = flip;
      list.sizes[at + i] = Word((d ^ flip) - flip);
    }
    list.negative[at / 64] = Lanes::template at_least<Word>(minus, 1);
  }
  uint32_t all = count;
  for (uint32_t level = 2; level <= kLevels; ++level) {
    uint32_t reached = 0;
    for (uint32_t at = 0; at < all; at += 64) {
      uint64_t mask = Lanes::template at_least<Word>(list.sizes + at, Word(level)) & ones(all - at);
      if (!mask) continue;
      Lanes::places(mask, uint16_t(at), list.places + reached);
      // In place: never past the elements already read.
      Word ragged[64];
      memcpy(ragged, list.sizes + at, sizeof ragged);
      Lanes::template pick<Word>(reinterpret_cast<const uint8_t*>(ragged), mask, list.sizes + reached);
      memcpy(ragged, list.words + at, sizeof ragged);
      Lanes::template pick<Word>(reinterpret_cast<const uint8_t*>(ragged), mask, list.words + reached);
      reached += popcount(mask);
    }
    if (!reached) break;
    list.bits += enter_level(list, reached);
    all = reached;
  }
  list.escapes = list.levels == kLevels ? all : 0;
}

// Writes the chunk (kListBytes and 16 more bytes may change); returns its bytes before the padding.
template <typename F, typename Lanes>
uint32_t write_list(const List<F>& list, uint8_t* to) {
  to[0] = uint8_t(list.levels);
  for (uint32_t level = 0; level < list.levels; ++level) {
    const uint16_t m = uint16_t(list.sets[level].m);
    memcpy(to + list_set_at(level), &m, 2);
    to[list_set_at(level) + 2] = uint8_t(list.sets[level].r);
  }
  uint8_t* const escaped = to + list_set_at(list.levels);
  memcpy(escaped, list.words, list.escapes * sizeof(typename F::Word));
  BitWriter out(escaped + list.escapes * sizeof(typename F::Word));
  for (uint32_t level = 0; level < list.levels; ++level) Lanes::put_lows(out, list.gaps[level], list.sets[level].m, list.sets[level].r);
  each_group(list.sets[0].m, [&](uint32_t at, uint32_t here) { out.put(list.negative[at / 64] & ones(here), here); });
  for (uint32_t level = 0; level < list.levels; ++level) Lanes::put_unary(out, list.gaps[level], list.sets[level].m, list.sets[level].r);
  return uint32_t(out.end() - to);
}

// The places of a set of m among `of` words from its low bits at bit `low` and the unary part from bit `at` to `end` on (64 bytes after it
// are readable and zero), to `places` (room for m + 64). Advances both; returns BLOCK where the set has other places or the ones end.
template <typename Lanes>
Status read_set(const uint8_t* bits, const ListSet& set, uint32_t of, uint32_t end, uint32_t& low, uint32_t& at, uint16_t* places) {
  uint16_t unary[kListWords + 64], lows[kListWords + 64];
  uint32_t found = 0;
  for (uint32_t next = at; found < set.m; next += 64) {
    if (next >= end || next - at > 2 * kChunkWords) return BLOCK;  // places so far apart are in no set
    const uint64_t some = peek_bits(bits, next);
    Lanes::places(some, uint16_t(next - at), unary + found);
    found += popcount(some);
  }
  Lanes::get_lows(bits, low, set.m, set.r, lows);
  low += set.m * set.r;
  at += unary[set.m - 1] + 1u;
  const uint32_t last = Lanes::add_gaps(unary, lows, set.m, set.r, places);
  if (last >= of) return BLOCK;
  return OK;
}

// Decodes a LIST chunk. `words` are where the base is, or elsewhere.
template <typename F, typename Lanes>
Status decode_list(const uint8_t* chunk, uint64_t bytes, const uint8_t* base, uint32_t n, uint8_t* words) {
  using Word = typename F::Word;
  if (bytes % 16) return BLOCK;
  uint8_t copy[kListBytes + 64];  // bit strings are read eight bytes at a time
  for (; bytes > kListBytes; --bytes)
    if (chunk[bytes - 1]) return BLOCK;  // a one more than words, or a place too far
  memcpy(copy, chunk, bytes);
  memset(copy + bytes, 0, 64);
  const uint32_t levels = copy[0];
  if (!bytes || !levels || levels > kLevels || list_set_at(levels) > bytes) return BLOCK;
  ListSet sets[kLevels];
  uint32_t most = n / 4, fixed = 0;
  for (uint32_t level = 0; level < levels; ++level) {
    sets[level] = {load_word<uint16_t>(copy + list_set_at(level)), copy[list_set_at(level) + 2]};
    if (!sets[level].m || sets[level].m > most || sets[level].r > kMaxRice) return BLOCK;
    most = sets[level].m;
    fixed += sets[level].m * sets[level].r;
  }
  const uint32_t m = sets[0].m, escapes = levels == kLevels ? most : 0, end = 8 * uint32_t(bytes);
  const uint8_t* const escaped = copy + list_set_at(levels);
  uint32_t low = 8 * (list_set_at(levels) + escapes * uint32_t(sizeof(Word))), signs = low + fixed, at = signs + m;
  if (at > end) return BLOCK;
  uint16_t places[kListWords + 64], within[kListWords + 64], reached[kListWords + 64];
  uint8_t sizes[kListWords + 64];
  Status status = read_set<Lanes>(copy, sets[0], n, end, low, at, places);
  if (status) return status;
  memset(sizes, 1, (m + 63) / 64 * 64);
  for (uint32_t level = 1; level < levels; ++level) {
    status = read_set<Lanes>(copy, sets[level], sets[level - 1].m, end, low, at, within);
    if (status) return status;
    for (uint32_t i = 0; i < sets[level].m; ++i) {
      reached[i] = level > 1 ? reached[within[i]] : within[i];  // in place: within[i] >= i
      ++sizes[reached[i]];
    }
  }
  for (; at < end; at += 64)
    if (peek_bits(copy, at)) return BLOCK;  // a one more than words
  if (words != base) memcpy(words, base, n * sizeof(Word));
  Ahead ahead = {base + n * sizeof(Word), chunk + bytes, n * uint32_t(sizeof(Word))};
  Word moved[kListWords + 64];  // one pass after the other: vectors read what single stores wrote long before
  for (uint32_t i = 0; i < m; ++i) {
    if (i % 4 == 0) ahead.ask();
    moved[i] = load_word<Word>(words + places[i] * sizeof(Word));
  }
  for (uint32_t first = 0; first < m; first += 64) {
    const uint64_t minus = peek_bits(copy, signs + first);
    alignas(64) uint8_t negative[64];
    Lanes::store(negative, Lanes::from_planes(&minus, 1));
    for (uint32_t i = 0; i < 64; ++i) {
      const Word flip = Word(Word(0) - Word(negative[i]));
      moved[first + i] = word_of(Word(order_of(moved[first + i]) + Word((Word(sizes[first + i]) ^ flip) - flip)));
    }
  }
  for (uint32_t i = 0; i < m; ++i) memcpy(words + places[i] * sizeof(Word), moved + i, sizeof(Word));
  for (uint32_t i = 0; i < escapes; ++i) memcpy(words + places[reached[i]] * sizeof(Word), escaped + i * sizeof(Word), sizeof(Word));
  return OK;
}

}  // namespace
}  // namespace zipccl
