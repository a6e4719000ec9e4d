// Exponent payload encoder for the CPU, a chunk at a time (FORMAT.md sections 2 and 3). `Lanes` does the steps of 64 elements.
#pragma once
#include "common/bits.h"
#include "cpu/level.h"
#include "common/exponent_block.cuh"

namespace zipccl {
namespace {

struct Form {  // table entry of a block
  uint32_t mode, top, trim, body, tail;
};

// The first n words of a group, zeros after them.
template <typename F, typename Lanes>
__attribute__((always_inline)) inline auto load_group(const uint8_t* words, uint32_t n) {
  using Word = typename F::Word;
  uint8_t ragged[64 * sizeof(Word)];
  if (n < 64) {
    memset(ragged, 0, sizeof ragged);
    words = static_cast<const uint8_t*>(memcpy(ragged, words, n * sizeof(Word)));
  }
  return Lanes::template load_words<Word>(words);
}

// Byte and bit planes of `here` elements from element `at` of n on; v holds r bits of each.
template <typename Lanes, typename V>
__attribute__((always_inline)) inline void put_parts(V v, uint32_t r, uint32_t at, uint32_t here, uint32_t n, uint8_t* parts) {
  for (uint32_t byte = 0; byte < r / 8; ++byte) {
    const auto plane = Lanes::narrow(v >> 8 * byte);
    uint8_t* to = parts + byte * n + at;
    uint8_t ragged[64];
    Lanes::store(here < 64 ? ragged : to, plane);
    if (here < 64) memcpy(to, ragged, here);
  }
  if (r % 8) {
    const auto rest = Lanes::narrow(v >> r / 8 * 8);
    uint8_t* planes = parts + r / 8 * n;
    for (uint32_t p = 0; p < r % 8; ++p) store_plane(planes + p * plane_bytes(n), at, here, Lanes::plane(rest, p) & ones(here));
  }
}

// Exponents of n words to `exponents` (room for n + 64, zeros after the last); where the type has no trim also their signs and mantissas
// to `parts` (FORMAT.md 2.1, point 1), while the words are at hand.
template <typename F, typename Lanes>
Survey survey(const uint8_t* words, uint32_t n, uint8_t* exponents, uint8_t* parts) {
  using Word = typename F::Word;
  typename Lanes::Census groups;
  uint32_t at = 0;
  for (; at + 64 <= n; at += 64) {
    const auto group = Lanes::template load_words<Word>(words + at * sizeof(Word));
    const auto e = Lanes::narrow(F::exponent(group));
    Lanes::store(exponents + at, e);
    groups.add(e);
    if (!F::has_trim) put_parts<Lanes>(F::sign_mantissa(group), 1 + F::M, at, 64, n, parts);
  }
  Survey all = at ? groups.result() : Survey{255, 0, 0};
  memset(exponents + at, 0, 64);
  if (at == n) return all;
  Word ragged[64] = {0};
  memcpy(ragged, words + at * sizeof(Word), (n - at) * sizeof(Word));
  const auto group = Lanes::template load_words<Word>(reinterpret_cast<uint8_t*>(ragged));
  if (!F::has_trim) put_parts<Lanes>(F::sign_mantissa(group), 1 + F::M, at, n - at, n, parts);
  for (uint32_t i = 0; i < n - at; ++i) {
    const uint32_t e = F::exponent(ragged[i]);
    exponents[at + i] = uint8_t(e);
    all = {e < all.least ? e : all.least, e > all.largest ? e : all.largest, all.sum + e};
  }
  return all;
}

// Signs and mantissas of n words, r bits each after the trim.
template <typename F, typename Lanes>
void encode_parts(const uint8_t* words, uint32_t n, uint32_t r, uint32_t trim, uint8_t* parts) {
  using Word = typename F::Word;
  each_group(n, [&](uint32_t at, uint32_t here) __attribute__((always_inline)) {
    put_parts<Lanes>(F::sign_mantissa(load_group<F, Lanes>(words + at * sizeof(Word), here)) >> trim, r, at, here, n, parts);
  });
}

// Tier 1 of m exponents (64 more bytes are readable) to `planes`; those that escape go to `escapes`, which has room for m + 64.
// Returns how many.
template <typename Code, typename Lanes>
uint32_t encode_tier1(const uint8_t* exponents, uint32_t m, uint32_t top, uint8_t* planes, uint8_t* escapes) {
  uint32_t left = 0;
  each_group(m, [&](uint32_t at, uint32_t n) __attribute__((always_inline)) {
    const auto e = Lanes::load(exponents + at);
    const auto codes = Lanes::template codes<Code, 0>(e, top);
    uint64_t escaped = ones(n);
    for (uint32_t p = 0; p < Code::tier[0].bits; ++p) {
      const uint64_t plane = Lanes::plane(codes, p);
      escaped &= plane;
      store_plane(planes + p * plane_bytes(m), at, n, plane & ones(n));
    }
    Lanes::compress(e, escaped, escapes + left);
    left += popcount(escaped);
  });
  return left;
}

// A tier after the first: planes of the `left` exponents in `list` (64 more bytes are readable), where those that escape are kept.
// Returns how many.
template <typename Code, uint32_t kTier, typename Lanes>
uint32_t encode_tier(uint8_t* list, uint32_t left, uint32_t top, TierPlanes& planes) {
  static_assert(Code::tier[kTier].bits == 2, "two planes");
  planes.count = left;
  uint32_t escapes = 0;
  for (uint32_t at = 0; at < left; at += 64) {
    const auto e = Lanes::load(list + at);
    const auto codes = Lanes::template codes<Code, kTier>(e, top);
    const uint64_t here = ones(left - at), low = Lanes::plane(codes, 0) & here, high = Lanes::plane(codes, 1) & here;
    planes.low[at / 64] = low;
    planes.high[at / 64] = high;
    Lanes::compress(e, low & high, list + escapes);  // in place: never past the elements already read
    escapes += popcount(low & high);
  }
  return escapes;
}

// The second part: planes of the tiers after the first, then the `left` exponents that no tier named. Returns its bytes; 16 more may
// change.
uint32_t write_tiers(const TierPlanes* tiers, const uint8_t* list, uint32_t left, uint8_t* second) {
  BitWriter out(second);
  for (uint32_t tier = 0; tier + 1 < kTiers; ++tier) {
    const uint32_t count = tiers[tier].count;
    for (uint32_t at = 0; at < count; at += 64) out.put(tiers[tier].low[at / 64], count - at < 64 ? count - at : 64);
    for (uint32_t at = 0; at < count; at += 64) out.put(tiers[tier].high[at / 64], count - at < 64 ? count - at : 64);
  }
  uint8_t* end = out.end();
  memcpy(end, list, 8);
  if (left > 8) memcpy(end, list, left);
  return uint32_t(end - second) + left;
}

// Zero map, signs and the other words compacted (FORMAT.md 2.2). Returns the tail's bytes.
template <typename F, typename Lanes>
uint32_t encode_sparse(const uint8_t* words, uint32_t n, const uint8_t* exponents, const uint64_t* zeros, uint32_t top, uint32_t trim,
                       uint8_t* tail) {
  using Word = typename F::Word;
  if (!F::has_trim) trim = 0;  // the compiler then knows r
  const uint32_t r = 1 + F::M - trim, part_bytes = (r + 7) / 8;
  uint8_t others[kMaxBlock + 64], list[kMaxBlock + 64], parts[sizeof(Word)][kMaxBlock + 64];
  uint32_t m = 0;
  uint64_t negative[kGroups], any_negative = 0;
  each_group(n, [&](uint32_t at, uint32_t here) __attribute__((always_inline)) {
    const auto group = load_group<F, Lanes>(words + at * sizeof(Word), here);
    const uint64_t map = zeros[at / 64], keep = ~map & ones(here);
    store_plane(tail + 1, at, here, map);
    negative[at / 64] = map & ~Lanes::zeros(group);
    any_negative |= negative[at / 64];
    Lanes::compress(Lanes::load(exponents + at), keep, others + m);
    const auto v = F::sign_mantissa(group) >> trim;
    for (uint32_t byte = 0; byte < part_bytes; ++byte) Lanes::compress(Lanes::narrow(v >> 8 * byte), keep, parts[byte] + m);
    m += popcount(keep);
  });
  tail[0] = any_negative != 0;
  uint8_t* to = tail + 1 + plane_bytes(n);
  if (any_negative) {
    BitWriter signs(to);
    for (uint32_t group = 0; group < (n + 63) / 64; ++group)
      for (uint64_t map = zeros[group]; map; map &= map - 1) signs.put(negative[group] >> __builtin_ctzll(map) & 1, 1);
    to = signs.end();
  }
  for (uint32_t byte = 0; byte < r / 8; ++byte) memcpy(to + byte * m, parts[byte], m);
  if (r % 8)
    each_group(m, [&](uint32_t at, uint32_t here) __attribute__((always_inline)) {
      const auto rest = Lanes::load(parts[r / 8] + at);
      for (uint32_t p = 0; p < r % 8; ++p)
        store_plane(to + r / 8 * m + p * plane_bytes(m), at, here, Lanes::plane(rest, p) & ones(here));
    });
  TierPlanes tiers[kTiers - 1];
  uint32_t left = encode_tier1<Cascade, Lanes>(others, m, top, to + parts_bytes(m, r), list);
  left = encode_tier<Cascade, 1, Lanes>(list, left, top, tiers[0]);
  left = encode_tier<Cascade, 2, Lanes>(list, left, top, tiers[1]);
  left = encode_tier<Cascade, 3, Lanes>(list, left, top, tiers[2]);
  uint8_t* second = to + first_part_bytes(m, r, Cascade::tier[0].bits);
  return uint32_t(second - tail) + write_tiers(tiers, list, left, second);
}

// Bit map of the n words that are +0 or -0; returns their number.
template <typename F, typename Lanes>
uint32_t zero_map(const uint8_t* words, uint32_t n, uint64_t* map) {
  using Word = typename F::Word;
  uint32_t count = 0;
  each_group(n, [&](uint32_t at, uint32_t here) __attribute__((always_inline)) {
    Word ragged[64];
    const uint8_t* group = words + at * sizeof(Word);
    if (here < 64) group = static_cast<const uint8_t*>(memcpy(ragged, group, here * sizeof(Word)));
    map[at / 64] = Lanes::template without<Word>(group, Word(F::negative_zero - 1)) & ones(here);
    count += popcount(map[at / 64]);
  });
  return count;
}

// Low bits that are zero in all of n words, at most M.
template <typename F>
uint32_t trailing_zeros(const uint8_t* words, uint32_t n) {
  typename F::Word any = 0;
  for (uint32_t i = 0; i < n; ++i) any |= load_word<typename F::Word>(words + i * sizeof any);
  const uint32_t low = any ? uint32_t(__builtin_ctz(any)) : 0;
  return low < F::M ? low : F::M;
}

// A block between two passes: its table entry, its place, and the data for the next pass.
struct Block {
  Form form;
  Survey survey;
  const uint8_t *words, *body;
  uint32_t n, zero_count, left;
  uint64_t zeros[kGroups];
  TierPlanes tiers[kTiers - 1];
  uint8_t exponents[kMaxBlock + 64], list[kMaxBlock + 64];

  // The window's top: `bias` eighths above the mean exponent of the words that are not zero (a zero adds nothing to the sum).
  uint32_t top(uint32_t bias) const {
    const uint32_t count = n - zero_count, mean = (8 * survey.sum + bias * count) / (8 * (count ? count : 1));
    return mean < survey.largest ? mean : survey.largest;
  }
};

// The rest of the first pass, after the survey: mode, top and trim (FORMAT.md section 3), signs and mantissas. `trim` is the block's trim if
// these are written already, otherwise more than M.
template <typename F, typename Code, typename Lanes>
void choose_form(Block& block, uint8_t* body, uint32_t trim) {
  using Word = typename F::Word;
  const uint8_t* words = block.words;
  const uint32_t n = block.n;
  block.form = {FILL, 0, 0, 0, 0};
  block.body = body;
  block.left = 0;
  if (block.survey.least == block.survey.largest && !memcmp(words, words + sizeof(Word), (n - 1) * sizeof(Word))) return;
  block.zero_count = block.survey.least ? 0 : zero_map<F, Lanes>(words, n, block.zeros);
  const bool sparse = 16 * block.zero_count >= n;
  block.form.mode = sparse ? SPARSE : Code::mode;
  block.form.top = block.top(sparse ? Cascade::top_bias : Code::top_bias);
  if (!F::has_trim) return;
  block.form.trim = trim <= F::M ? trim : trailing_zeros<F>(words, n);
  if (!sparse && trim > F::M) encode_parts<F, Lanes>(words, n, 1 + F::M - block.form.trim, block.form.trim, body);
}

// First pass: exponents, signs and mantissas, and the form of the block.
template <typename F, typename Code, typename Lanes>
void survey_block(Block& block, uint8_t* body) {
  block.survey = survey<F, Lanes>(block.words, block.n, block.exponents, body);
  choose_form<F, Code, Lanes>(block, body, F::M + 1);
}

// Second pass: tier 1, which completes the body.
template <typename F, typename Code, typename Lanes>
void encode_body(Block& block) {
  Form& form = block.form;
  if (form.mode != CASCADE && form.mode != WIDE) return;
  const uint32_t n = block.n, r = 1 + F::M - form.trim;
  uint8_t* tier1 = const_cast<uint8_t*>(block.body) + parts_bytes(n, r);
  block.left = encode_tier1<Code, Lanes>(block.exponents, n, form.top, tier1, block.list);
  if (form.mode == CASCADE && 8 * block.left > 3 * n) {
    form.mode = WIDE;
    form.top = block.top(kFallbackBias);
    block.left = encode_tier1<Wide, Lanes>(block.exponents, n, form.top, tier1, block.list);
  }
  form.body = body_bytes<F>(form.mode, n, form.trim);
  const uint32_t first = first_part_bytes(n, r, form.mode == WIDE ? Wide::tier[0].bits : Cascade::tier[0].bits);
  memset(tier1 + (first - parts_bytes(n, r)), 0, form.body - first);
}

// Last pass: the tail (room for its worst case), or RAW after all.
template <typename F, typename Code, typename Lanes>
void write_tail(Block& block, uint8_t* tail) {
  using Word = typename F::Word;
  Form& form = block.form;
  if (form.mode == FILL) {
    form.tail = load_word<Word>(block.words) ? sizeof(Word) : 0;
    memcpy(tail, block.words, form.tail);
    return;
  }
  form.tail = form.mode == SPARSE ? encode_sparse<F, Lanes>(block.words, block.n, block.exponents, block.zeros, form.top, form.trim, tail)
                                  : write_tiers(block.tiers, block.list, block.left, tail);
  const uint32_t raw = body_bytes<F>(RAW, block.n, 0);
  if (form.body + form.tail < raw) return;
  form = {RAW, 0, 0, raw, 0};
  block.body = block.words;
}

// Room for encoding a chunk. Its parts are then copied to where the chunk goes: table, bodies, tails.
struct Workspace {
  alignas(64) uint8_t bodies[kChunkBlocks * pad16(first_part_bytes(kMaxBlock, 24, 3))];
  // One block's worst case past the end: a tail is measured before it is known to lose against RAW.
  alignas(64) uint8_t tails[kChunkBlocks * kMaxBlock * 4 + 8 * kMaxBlock];
  alignas(64) uint8_t table[kChunkBlocks * 4];
  alignas(64) uint8_t rounded[kChunkBlocks * kMaxBlock * 4];  // cpu/lossy/rounded.h
  Block blocks[kChunkBlocks];
};
static_assert(sizeof(Workspace) <= kZipcclWorkspace, "callers provide that much");

// Writes the table entry of a block; returns its body.
template <typename F>
ZipcclPart enter(Workspace& work, uint32_t b, uint32_t blocks) {
  const Block& here = work.blocks[b];
  const Form& form = here.form;
  const uint16_t entry = uint16_t(form.mode << kTailBits | form.tail);
  work.table[b] = uint8_t(form.top);
  memcpy(work.table + blocks + 2 * b, &entry, 2);
  if (F::has_trim) work.table[3 * blocks + b] = uint8_t(form.trim);
  return {here.body, form.mode == RAW ? here.n * uint32_t(sizeof(typename F::Word)) : form.body, form.body};
}

// Encodes a chunk of numel words, at most 16 blocks at `places`. Returns its bytes; `parts` are its contents in order. The parts are
// copied to `soon` later; `next` are the words that are probably encoded next, a half of a block each. look(block, b, body) is the first
// pass over a block, which may give the block other words.
//
// Every pass goes over all blocks before the next pass starts. The steps of a pass for different blocks are independent, so that the
// processor works on several blocks at a time. Small stores of one pass have reached the cache when the next pass loads them as a whole.
// Prefetches are spread evenly over the passes that compute, because a burst of them would stall.
template <typename F, typename Code, typename Lanes, typename Look>
uint32_t encode_blocks(const uint8_t* const* places, uint32_t numel, uint32_t block, Workspace& work, ZipcclPart* parts,
                       const uint8_t* soon, const uint8_t* const* next, Look look) {
  using Word = typename F::Word;
  const uint32_t blocks = (numel + block - 1) / block, slot = pad16(first_part_bytes(block, 1 + F::M, Wide::tier[0].bits));
  for (uint32_t b = 0; b < blocks; ++b) {
    work.blocks[b].words = places[b];
    work.blocks[b].n = numel - b * block < block ? numel - b * block : block;
    for (uint32_t at = 0; at < slot; at += 64) prefetch_to_write(soon + b * slot + at);
    look(work.blocks[b], b, work.bodies + b * slot);
  }
  const auto each = [&](auto pass) __attribute__((always_inline)) {
    for (uint32_t b = 0; b < blocks; ++b) pass(work.blocks[b]);
  };
  const auto tier = [&](auto index) __attribute__((always_inline)) {
    each([&](Block& here) {
      TierPlanes& planes = here.tiers[index.value - 1];
      if (here.form.mode == CASCADE) here.left = encode_tier<Cascade, index.value, Lanes>(here.list, here.left, here.form.top, planes);
      if (here.form.mode == WIDE) here.left = encode_tier<Wide, index.value, Lanes>(here.list, here.left, here.form.top, planes);
    });
  };
  const uint32_t half = block * uint32_t(sizeof(Word)) / 2;
  const auto ask = [&] {
    for (uint32_t at = 0; at < half; at += 64) prefetch(*next + at);
    ++next;
  };
  each([&](Block& here) {
    ask();
    encode_body<F, Code, Lanes>(here);
  });
  tier(Index<1>());
  tier(Index<2>());
  tier(Index<3>());
  memset(work.table, 0, sizeof work.table);
  uint32_t bytes = table_bytes<F>(blocks), tail = 0;
  *parts++ = {work.table, bytes, bytes};
  for (uint32_t b = 0; b < blocks; ++b) {
    Block& here = work.blocks[b];
    ask();
    write_tail<F, Code, Lanes>(here, work.tails + tail);
    *parts++ = enter<F>(work, b, blocks);
    bytes += here.form.body;
    tail += here.form.tail;
  }
  *parts = {work.tails, tail, pad16(tail)};
  return bytes + pad16(tail);
}

template <typename F, typename Code, typename Lanes>
uint32_t encode_chunk(const uint8_t* const* places, uint32_t numel, uint32_t block, void* workspace, ZipcclPart* parts,
                      const uint8_t* soon, const uint8_t* const* next) {
  return encode_blocks<F, Code, Lanes>(places, numel, block, *static_cast<Workspace*>(workspace), parts, soon, next,
                                       [](Block& here, uint32_t, uint8_t* body) __attribute__((always_inline)) {
                                         survey_block<F, Code, Lanes>(here, body);
                                       });
}

}  // namespace
}  // namespace zipccl
