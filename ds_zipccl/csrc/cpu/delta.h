// The CHANGE block of delta payloads on the CPU (FORMAT.md 2.3 and section 3). Encoder and decoder share the arithmetic of 64 elements as
// plain loops, which each level compiles to its own vectors.
#pragma once
#include "common/change_block.cuh"
#include "cpu/decode.h"
#include "cpu/encode.h"

namespace zipccl {
namespace {

constexpr uint32_t kStep = 4;        // low planes that are handled together
constexpr uint32_t kGroupSizes = 4;  // 1, 4, 8, 16 elements share a bit of the group map

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
// log2 of the group size that the flags name.
inline uint32_t group_log2(uint32_t flags) { return flags ? flags + 1 : 0; }

// A plane that grows: room for the bits of a whole block and a word more.
struct PlaneBits {
  uint32_t count;
  uint64_t words[kGroups + 2];
  void clear() { count = 0, words[0] = 0; }
  void put(uint64_t value, uint32_t n) {  // n at most 64; value has no bits past n
    uint64_t* const word = words + count / 64;
    const uint32_t shift = count % 64;
    word[0] |= value << shift;
    word[1] = value >> 1 >> (63 - shift);
    count += n;
  }
};

// A block's changes at one scale: min(q, 6) and k of all elements, and the tail that they make.
struct Scaled {
  uint32_t top, flags, tail;
  alignas(64) uint8_t levels[kMaxBlock];
  alignas(64) uint8_t shifts[kMaxBlock] = {0};
};

// Adds up the tail of a block at one scale, 64 elements at a time.
template <typename F, typename Lanes>
struct TailCensus {
  typename Lanes::Census levels;
  uint32_t signs = 0, escapes = 0, live[kGroupSizes] = {0};

  // `here` elements, zeros after them; `shifted` are those with k >= 1. Returns those with a level.
  template <typename Bytes>
  __attribute__((always_inline)) uint64_t add(const Bytes& level, uint64_t shifted, uint32_t here) {
    const uint64_t level1 = Lanes::above(level, 0);
    levels.add(level);
    signs += popcount(level1 | shifted);
    escapes += popcount(Lanes::above(level, kLevels - 1));
    uint64_t some = level1 | level1 >> 1;
    for (uint32_t size = 1; size < kGroupSizes; ++size) {
      some |= some >> (1u << size);
      live[size] += popcount(some & group_starts(size + 1, 64)) << (size + 1);
      const uint32_t last = here % (1u << (size + 1));  // of a group that the block's end cuts short
      if (last && some >> (here - last) & 1) live[size] -= (1u << (size + 1)) - last;
    }
    return level1;
  }
  // The group size with the fewest bits, and the bytes of the tail of n elements that have `lows` low bits.
  void enter(uint32_t n, uint32_t lows, Scaled& scaled) const {
    uint32_t bits = n;
    scaled.flags = 0;
    for (uint32_t flags = 1; flags < kGroupSizes; ++flags) {
      const uint32_t size = 1u << group_log2(flags), now = (n + size - 1) / size + live[flags];
      if (now < bits) bits = now, scaled.flags = flags;
    }
    bits += levels.result().sum - escapes + signs + lows;  // level j + 1 has a bit of each element that has level j
    scaled.tail = 1 + (bits + 7) / 8 + escapes * uint32_t(sizeof(typename F::Word));
  }
};

// The changes of a block.
template <typename F>
struct Change {
  using Word = typename F::Word;
  uint32_t n, escapes;
  alignas(64) Word sizes[kMaxBlock];             // |D|
  alignas(64) uint8_t exponents[kMaxBlock];      // of the base
  Scaled plain, mean;  // with a top of 0, and with one from the mean of the changes
  uint64_t negative[kGroups], level1[kGroups], escaped[kGroups];
  PlaneBits level[kLevels - 1], sign, low[Scale<F>::shifts];
};

// |D|, signs and exponents of the base of all elements; fills `plain`, and finds the top of `mean`. Some word differs from its base's.
template <typename F, typename Lanes>
void survey_change(const uint8_t* words, const uint8_t* base, Change<F>& change) {
  using Word = typename F::Word;
  constexpr uint32_t top_bit = 8 * sizeof(Word) - 1;
  typename Lanes::Census exponents, logs;
  TailCensus<F, Lanes> plain;
  uint32_t count = 0;
  each_group(change.n, [&](uint32_t at, uint32_t here) __attribute__((always_inline)) {
    Word ragged[2][64];
    const uint8_t *w = words + at * sizeof(Word), *b = base + at * sizeof(Word);
    if (here < 64) {
      memset(ragged, 0, sizeof ragged);
      w = static_cast<const uint8_t*>(memcpy(ragged[0], w, here * sizeof(Word)));
      b = static_cast<const uint8_t*>(memcpy(ragged[1], b, here * sizeof(Word)));
    }
    alignas(64) uint8_t negative[64], changed[64], log2[64], levels[64];  // not in `change`: there each store might alter its sizes
    Word* const sizes = change.sizes + at;
    uint8_t* const e = change.exponents + at;
    for (uint32_t i = 0; i < 64; ++i) {
      const Word before = load_word<Word>(b + i * sizeof(Word));
      const Word d = Word(order_of(load_word<Word>(w + i * sizeof(Word))) - order_of(before)), minus = Word(Word(0) - (d >> top_bit));
      sizes[i] = Word((d ^ minus) - minus);
      negative[i] = uint8_t(d >> top_bit);
      e[i] = uint8_t(F::exponent(before));
    }
    for (uint32_t i = 0; i < 64; ++i) changed[i] = uint8_t(sizes[i] ? e[i] : 0);
    for (uint32_t i = 0; i < 64; ++i) levels[i] = uint8_t(sizes[i] < kLevels ? sizes[i] : kLevels);
    exponents.add(Lanes::load(changed));
    change.negative[at / 64] = Lanes::plane(Lanes::load(negative), 0);
    const auto q = Lanes::load(levels);
    Lanes::store(change.plain.levels + at, q);
    count += popcount(plain.add(q, 0, here));
    if (!Lanes::above(q, 1)) return;  // all logs are 0: often so where few words change
    for (uint32_t i = 0; i < 64; ++i) {
      Word log = 0;
      for (uint32_t bit = 1; bit <= Scale<F>::shifts; ++bit) log = Word(log + (sizes[i] >= Word(1u << bit)));
      log2[i] = uint8_t(log);
    }
    logs.add(Lanes::load(log2));
  });
  const uint32_t top = (8 * (exponents.result().sum + logs.result().sum) + Scale<F>::bias * count) / (8 * count);
  plain.enter(change.n, 0, change.plain);
  change.plain.top = 0;
  change.mean.top = top < 255 ? top : 255;
}

// Fills `mean` of a surveyed block, which has its top; returns it, or `plain` where the tail is shorter.
template <typename F, typename Lanes>
const Scaled& scale_change(Change<F>& change) {
  Scaled& mean = change.mean;
  TailCensus<F, Lanes> census;
  typename Lanes::Census lows;
  each_group(change.n, [&](uint32_t at, uint32_t here) __attribute__((always_inline)) {
    alignas(64) uint8_t levels[64], shifts[64];
    const auto* const sizes = change.sizes + at;
    shifts_of<F>(change.exponents + at, mean.top, shifts);  // zero after the block's end, where exponents are
    for (uint32_t i = 0; i < 64; ++i) {
      const uint32_t q = uint32_t(sizes[i]) >> shifts[i];
      levels[i] = uint8_t(q < kLevels ? q : kLevels);
    }
    const auto q = Lanes::load(levels), k = Lanes::load(shifts);
    Lanes::store(mean.levels + at, q);
    Lanes::store(mean.shifts + at, k);
    lows.add(k);
    census.add(q, Lanes::above(k, 0), here);
  });
  census.enter(change.n, lows.result().sum, mean);
  return change.plain.tail < mean.tail ? change.plain : mean;
}

// Fills the planes of a block at its scale.
template <typename F, typename Lanes>
void plan_change(const Scaled& scaled, Change<F>& change) {
  using Word = typename F::Word;
  for (PlaneBits& plane : change.level) plane.clear();
  for (PlaneBits& plane : change.low) plane.clear();
  change.sign.clear();
  change.escapes = 0;
  each_group(change.n, [&](uint32_t at, uint32_t) __attribute__((always_inline)) {
    const auto q = Lanes::load(scaled.levels + at), k = Lanes::load(scaled.shifts + at);
    uint64_t reached = Lanes::above(q, 0);
    const uint64_t shifted = Lanes::above(k, 0), level1 = reached, signs = level1 | shifted;
    change.level1[at / 64] = level1;
    for (uint32_t level = 1; level < kLevels; ++level) {
      if (level > 1 && !reached) break;
      const uint64_t next = Lanes::above(q, uint8_t(level));
      change.level[level - 1].put(Lanes::gather(next, reached), popcount(reached));
      reached = next;
    }
    change.escaped[at / 64] = reached;
    change.escapes += popcount(reached);
    change.sign.put(Lanes::gather(change.negative[at / 64], signs), popcount(signs));
    const auto group = Lanes::template load_words<Word>(reinterpret_cast<const uint8_t*>(change.sizes + at));
    uint64_t has = shifted;
#pragma GCC unroll 8
    for (uint32_t first = 0; first < Scale<F>::shifts; first += kStep) {
      if (!has) break;  // no element has a higher bit
      const auto part = Lanes::template narrow<Word>(group >> first);
#pragma GCC unroll 4
      for (uint32_t p = 0; p < kStep; ++p) {
        if (first + p < Scale<F>::shifts) change.low[first + p].put(Lanes::gather(Lanes::plane(part, p), has), popcount(has));
        has = Lanes::above(k, uint8_t(first + p + 1));
      }
    }
  });
}

// Writes the tail of a planned block; up to 16 bytes past its end may change.
template <typename F, typename Lanes>
void write_change(const uint8_t* words, const Change<F>& change, uint32_t flags, uint8_t* tail) {
  using Word = typename F::Word;
  tail[0] = uint8_t(flags);
  BitWriter out(tail + 1);
  const uint32_t log2 = group_log2(flags);
  if (log2)
    for (uint32_t at = 0; at < change.n; at += 64) {
      const uint64_t starts = group_starts(log2, change.n - at);
      out.put(Lanes::gather(fill_groups(change.level1[at / 64], log2), starts), popcount(starts));
    }
  for (uint32_t at = 0; at < change.n; at += 64) {
    const uint64_t level1 = change.level1[at / 64], live = (log2 ? fill_groups(level1, log2) : ~0ull) & ones(change.n - at);
    out.put(Lanes::gather(level1, live), popcount(live));
  }
  const auto put = [&](const PlaneBits& plane) {
    uint32_t at = 0;
    for (; at + 64 <= plane.count; at += 64) out.put(plane.words[at / 64], 64);
    if (at < plane.count) out.put(plane.words[at / 64], plane.count - at);
  };
  for (const PlaneBits& plane : change.level) put(plane);
  put(change.sign);
  for (const PlaneBits& plane : change.low) put(plane);
  uint8_t* end = out.end();
  for (uint32_t at = 0; change.escapes && at < change.n; at += 64)
    for (uint64_t left = change.escaped[at / 64]; left; left &= left - 1, end += sizeof(Word))
      memcpy(end, words + (at + uint32_t(__builtin_ctzll(left))) * sizeof(Word), sizeof(Word));
}

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
  uint64_t reached[kGroups], level1[kGroups], q[3][kGroups], shift[Scale<F>::shifts][kGroups];
  uint32_t at = 8, count = n;
  for (uint32_t i = 0; i < n; i += 64) reached[i / 64] = ones(n - i);
  if (log2) {
    if (at + (((n - 1) >> log2) + 1) > end) return BLOCK;
    count = 0;
    for (uint32_t i = 0; i < n; i += 64) {
      const uint64_t starts = group_starts(log2, n - i);
      reached[i / 64] &= fill_groups(Lanes::scatter(peek_bits(tail, at), starts), log2);
      at += popcount(starts);
      count += popcount(reached[i / 64]);
    }
  }
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
  uint32_t sign_at = at, low_at[Scale<F>::shifts], lows[Scale<F>::shifts] = {0};
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
    for (uint32_t p = 0; p < Scale<F>::shifts; ++p) {
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

}  // namespace
}  // namespace zipccl
