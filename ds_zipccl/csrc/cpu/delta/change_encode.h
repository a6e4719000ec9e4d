// Encoder of CHANGE blocks on the CPU (FORMAT.md 2.4 and section 3).
#pragma once
#include "cpu/delta/change_parts.h"
#include "cpu/encode.h"

namespace zipccl {
namespace {

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

// Elements of the groups with a changed one, for each group size.
struct GroupCensus {
  uint32_t live[kGroupSizes] = {0};
  // The changed ones of 64 elements, or of `here`, the block's last.
  void add(uint64_t changed, uint32_t here) {
    uint64_t some = changed | changed >> 1;
    for (uint32_t size = 1; size < kGroupSizes; ++size) {
      some |= some >> (1u << size);
      live[size] += popcount(some & group_starts(size + 1, 64)) << (size + 1);
      const uint32_t last = here % (1u << (size + 1));  // of a group that the block's end cuts short
      if (here < 64 && last && some >> (here - last) & 1) live[size] -= (1u << (size + 1)) - last;
    }
  }
};

// The group size with the fewest bits for a block of n elements, of which those of `level1` have a level.
inline GroupChoice choose_groups(const uint64_t* level1, uint32_t n) {
  // A group size pays only where more than one in its size of the groups is dead, and so of its parts: most blocks have too few.
  uint32_t live = 0;
  for (uint32_t at = 0; at < n; at += 64) {
    const uint64_t two = level1[at / 64] | level1[at / 64] >> 1;
    live += popcount((two | two >> 2) & group_starts(2, 64));
  }
  if (64 * (n / 4 - (live < n / 4 ? live : n / 4)) + 64 <= n) return {0, n};
  GroupCensus census;
  for (uint32_t at = 0; at < n; at += 64) census.add(level1[at / 64], n - at);
  return best_groups(n, census.live);
}

// A block's changes at one scale: min(q, 6) and k of all elements, and the tail that they make.
struct Scaled {
  uint32_t top, flags, tail;
  alignas(64) uint8_t levels[kMaxBlock];
  alignas(64) uint8_t shifts[kMaxBlock] = {0};

  // `bits` are those beside groups and level 1; the elements of `level1` have a level, and `escapes` of them all levels.
  template <typename F>
  void enter(const uint64_t* level1, uint32_t n, uint32_t bits, uint32_t escapes) {
    const GroupChoice groups = choose_groups(level1, n);
    flags = groups.flags;
    tail = 1 + (groups.bits + bits + 7) / 8 + escapes * uint32_t(sizeof(typename F::Word));
  }
};

// The changes of a block.
template <typename F>
struct Change {
  using Word = typename F::Word;
  uint32_t n, escapes;
  alignas(64) Word sizes[kMaxBlock];         // |D|
  alignas(64) uint8_t exponents[kMaxBlock];  // of the base
  Scaled plain, mean;                        // with a top of 0, and with one from the mean of the changes
  uint64_t negative[kGroups], level1[kGroups], escaped[kGroups];
  PlaneBits level[kLevels - 1], sign, low[kLowPlanes<F>];
};

// Passes over the elements of a block, 64 at a time. Levels with vectors specialize it.
template <typename F, typename Lanes, typename Enable = void>
struct ChangeSums {
  using Word = typename F::Word;
  typename Lanes::Census exponents, logs, bits, lows;
  uint32_t signs = 0, escapes = 0;

  // Writes |D| and the exponents of the base, and returns the signs of D.
  uint64_t survey(const uint8_t* words, const uint8_t* base, Word* to_sizes, uint8_t* to_exponents) {
    constexpr uint32_t top_bit = 8 * sizeof(Word) - 1;
    alignas(64) uint8_t negative[64], changed[64], log2[64], levels[64];
    alignas(64) Word sizes[64];  // not in the block's: there each store might alter its words
    for (uint32_t i = 0; i < 64; ++i) {
      const Word before = load_word<Word>(base + i * sizeof(Word));
      const Word d = Word(order_of(load_word<Word>(words + i * sizeof(Word))) - order_of(before)), minus = Word(Word(0) - (d >> top_bit));
      sizes[i] = Word((d ^ minus) - minus);
      negative[i] = uint8_t(d >> top_bit);
      to_exponents[i] = uint8_t(F::exponent(before));
    }
    for (uint32_t i = 0; i < 64; ++i) changed[i] = uint8_t(sizes[i] ? to_exponents[i] : 0);
    for (uint32_t i = 0; i < 64; ++i) levels[i] = uint8_t(sizes[i] < kLevels ? sizes[i] : kLevels);
    memcpy(to_sizes, sizes, sizeof sizes);
    exponents.add(Lanes::load(changed));
    const auto q = Lanes::load(levels);
    bits.add(q);
    escapes += popcount(Lanes::above(q, kLevels - 1));
    if (Lanes::above(q, 1)) {  // not all logs are 0: seldom so where few words change
      for (uint32_t i = 0; i < 64; ++i) {
        Word log = 0;
        for (uint32_t bit = 1; bit <= Scale<F>::shifts; ++bit) log = Word(log + (sizes[i] >= Word(1u << bit)));
        log2[i] = uint8_t(log);
      }
      logs.add(Lanes::load(log2));
    }
    return Lanes::plane(Lanes::load(negative), 0);
  }
  // Of the changed elements' exponents and logs.
  uint32_t scale() const { return exponents.result().sum + logs.result().sum; }

  // Writes min(q, 6) and k, and returns the elements with a level.
  uint64_t scale(const Word* sizes, const uint8_t* to_exponents, uint32_t top, uint8_t* to_levels, uint8_t* to_shifts) {
    alignas(64) uint8_t levels[64], shifts[64];
    shifts_of<F>(to_exponents, top, shifts);
    for (uint32_t i = 0; i < 64; ++i) {
      const uint32_t q = uint32_t(sizes[i]) >> shifts[i];
      levels[i] = uint8_t(q < kLevels ? q : kLevels);
    }
    const auto q = Lanes::load(levels), k = Lanes::load(shifts);
    Lanes::store(to_levels, q);
    Lanes::store(to_shifts, k);
    lows.add(k);
    bits.add(q);
    const uint64_t level1 = Lanes::above(q, 0);
    signs += popcount(level1 | Lanes::above(k, 0));
    escapes += popcount(Lanes::above(q, kLevels - 1));
    return level1;
  }
  // Of the levels after the first and the low bits: level j + 1 has a bit of each element that has level j.
  uint32_t level_bits() const { return bits.result().sum - escapes + lows.result().sum; }
};

// |D|, signs and exponents of the base of all elements; enters `plain`, and finds the top of `mean`. The words of `changed`, at least one,
// differ from their bases.
template <typename F, typename Lanes>
void survey_change(const uint8_t* words, const uint8_t* base, const uint64_t* changed, Ahead& ahead, Change<F>& change) {
  using Word = typename F::Word;
  ChangeSums<F, Lanes> sums;
  uint32_t count = 0;
  each_group(change.n, [&](uint32_t at, uint32_t here) __attribute__((always_inline)) {
    ahead.ask();
    Word ragged[2][64];
    const uint8_t *w = words + at * sizeof(Word), *b = base + at * sizeof(Word);
    if (here < 64) {
      memset(ragged, 0, sizeof ragged);
      w = static_cast<const uint8_t*>(memcpy(ragged[0], w, here * sizeof(Word)));
      b = static_cast<const uint8_t*>(memcpy(ragged[1], b, here * sizeof(Word)));
    }
    change.negative[at / 64] = sums.survey(w, b, change.sizes + at, change.exponents + at);
    count += popcount(changed[at / 64]);
  });
  const uint32_t top = (8 * sums.scale() + Scale<F>::bias * count) / (8 * count);
  change.plain.template enter<F>(changed, change.n, sums.level_bits() + count, sums.escapes);
  change.plain.top = 0;
  change.mean.top = top < 255 ? top : 255;
}

// Levels and shifts of a surveyed block, which has its top, at its scale: of `mean`, or of `plain` where the tail is shorter.
template <typename F, typename Lanes>
const Scaled& scale_change(const uint64_t* changed, Ahead& ahead, Change<F>& change) {
  Scaled& mean = change.mean;
  if (Scale<F>::shifts) {
    ChangeSums<F, Lanes> sums;
    each_group(change.n, [&](uint32_t at, uint32_t) __attribute__((always_inline)) {
      ahead.ask();
      change.level1[at / 64] = sums.scale(change.sizes + at, change.exponents + at, mean.top, mean.levels + at, mean.shifts + at);
    });
    mean.template enter<F>(change.level1, change.n, sums.level_bits() + sums.signs, sums.escapes);
    if (mean.tail <= change.plain.tail) return mean;
  }
  for (uint32_t at = 0; at < change.n; at += 64) {
    change.level1[at / 64] = changed[at / 64];
    for (uint32_t i = at; i < at + 64; ++i) change.plain.levels[i] = uint8_t(change.sizes[i] < kLevels ? change.sizes[i] : kLevels);
  }
  return change.plain;
}

// Fills the planes of a block at its scale. Levels with vectors specialize it.
template <typename F, typename Lanes, typename Enable = void>
struct ChangePlanes {
  static void fill(const Scaled& scaled, Change<F>& change) {
    using Word = typename F::Word;
    for (PlaneBits& plane : change.level) plane.clear();
    for (PlaneBits& plane : change.low) plane.clear();
    change.sign.clear();
    change.escapes = 0;
    each_group(change.n, [&](uint32_t at, uint32_t) __attribute__((always_inline)) {
      const auto q = Lanes::load(scaled.levels + at), k = Lanes::load(scaled.shifts + at);
      uint64_t reached = Lanes::above(q, 0);
      const uint64_t shifted = Lanes::above(k, 0), level1 = reached, signs = level1 | shifted;
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
};

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

}  // namespace
}  // namespace zipccl
