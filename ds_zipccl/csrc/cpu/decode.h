// Exponent payload decoder for the CPU, a chunk at a time; `Lanes` does the steps of 64 elements. No byte is read before it is proven to
// lie in the chunk (FORMAT.md section 4).
#pragma once
#include "common/bits.h"
#include "common/exponent_block.cuh"

namespace zipccl {
namespace {

constexpr uint32_t kAhead = 8192;  // bytes that the destination is asked for ahead of its writing
constexpr uint32_t kTailMax = 1u << kTailBits;

// Reads the `count` entries of a tier from bit `at` on; returns how many escape.
inline uint32_t read_tier(const uint8_t* second, uint32_t at, uint32_t count, TierPlanes& tier) {
  uint32_t escaped = 0;
  tier.count = count;
  for (uint32_t i = 0; i < count; i += 64) {
    const uint32_t n = count - i < 64 ? count - i : 64;
    tier.low[i / 64] = read_bits(second, at + i, n);
    tier.high[i / 64] = read_bits(second, at + count + i, n);
    escaped += popcount(tier.low[i / 64] & tier.high[i / 64]);
  }
  return escaped;
}

// Finds the tiers after the first in the second part, which has `bytes` bytes and 16 readable ones after them and must be used up
// exactly, and the exponents that no tier names, which go to `list` (room for m + 64). `tier1` are its planes for m elements.
template <typename Code>
Status read_tiers(const uint8_t* tier1, uint32_t m, const uint8_t* second, uint32_t bytes, TierPlanes* tiers, uint8_t* list) {
  uint32_t left = 0, end = 0;
  each_group(m, [&](uint32_t at, uint32_t n) __attribute__((always_inline)) {
    uint64_t escaped = ~0ull;
    for (uint32_t p = 0; p < Code::tier[0].bits; ++p) escaped &= load_plane(tier1 + p * plane_bytes(m), at, n);
    left += popcount(escaped);
  });
  for (uint32_t tier = 0; tier + 1 < kTiers; ++tier) {
    if (end + 2 * left > 8 * bytes) return BLOCK;
    const uint32_t count = left;
    left = read_tier(second, end, count, tiers[tier]);
    end += 2 * count;
  }
  const uint32_t at = (end + 7) / 8;
  if (at + left != bytes) return BLOCK;
  memcpy(list, second + at, 8);
  if (left > 8) memcpy(list, second + at, left);
  return OK;
}

// The exponents of a tier after the first, to `to` (room for 64 more): by its planes, or the next of those it escapes, `escapes`.
template <typename Code, uint32_t kTier, typename Lanes>
void decode_tier(const TierPlanes& planes, uint32_t top, const uint8_t* escapes, uint8_t* to) {
  for (uint32_t at = 0; at < planes.count; at += 64) {
    const uint64_t codes[2] = {planes.low[at / 64], planes.high[at / 64]}, escaped = codes[0] & codes[1];
    Lanes::store(to + at, Lanes::expand(Lanes::template exponents<Code, kTier>(codes, top), escaped, escapes));
    escapes += popcount(escaped);
  }
}

// Stores the first n words of a group.
template <typename Lanes, typename W, typename Group>
__attribute__((always_inline)) inline void put_group(uint8_t* to, const Group& group, uint32_t n, bool stream) {
  if (n == 64) return stream ? Lanes::template stream_words<W>(to, group) : Lanes::template store_words<W>(to, group);
  uint8_t last[64 * sizeof(W)];
  Lanes::template store_words<W>(last, group);
  memcpy(to, last, n * sizeof(W));
}

// Decodes m coded elements (FORMAT.md 2.1) from the whole first part and `list`, the exponents that tier 1 escapes. `stream`: the
// words go past the cache; their address is then a multiple of 64.
template <typename F, typename Code, typename Lanes>
void decode_elements(const uint8_t* first, const uint8_t* list, uint32_t m, uint32_t top, uint32_t trim, bool stream, uint8_t* words) {
  using Word = typename F::Word;
  if (!F::has_trim) trim = 0;  // the compiler then knows r
  constexpr uint32_t bits = Code::tier[0].bits;
  const uint32_t r = 1 + F::M - trim, planes = r % 8, plane = plane_bytes(m);
  const uint8_t* bit_planes = first + r / 8 * m;
  const uint8_t* tier1 = first + parts_bytes(m, r);
  each_group(m, [&](uint32_t at, uint32_t n) __attribute__((always_inline)) {
    uint64_t codes[bits], escaped = ~0ull;
    for (uint32_t p = 0; p < bits; ++p) escaped &= codes[p] = load_plane(tier1 + p * plane, at, n);
    auto e = Lanes::template widen<Word>(Lanes::expand(Lanes::template exponents<Code, 0>(codes, top), escaped, list));
    if (F::E < 8) e = e & Word(F::exponent_mask);
    list += popcount(escaped);

    typename Lanes::template Vec<Word> v = {};
    if (F::has_trim && r < 8) {  // as the top byte of the whole, so that the other shifts are by constants
      uint64_t kept[7];
      for (uint32_t p = 0; p < r; ++p) kept[p] = load_plane(bit_planes + p * plane, at, n);
      v = Lanes::template widen<Word>(Lanes::from_planes(kept, r) << (8 - r)) << (F::M - 7);
      put_group<Lanes, Word>(words + at * sizeof(Word), F::join(v, e), n, stream);
      return;
    }
    uint8_t ragged[64];
    for (uint32_t byte = 0; byte < r / 8; ++byte) {
      const uint8_t* part = first + byte * m + at;
      if (n < 64) part = static_cast<const uint8_t*>(memcpy(ragged, part, n));
      v = v | (Lanes::template widen<Word>(Lanes::load(part)) << 8 * byte);
    }
    if (planes) {
      uint64_t rest[7];
      for (uint32_t p = 0; p < planes; ++p) rest[p] = load_plane(bit_planes + p * plane, at, n);
      v = v | (Lanes::template widen<Word>(Lanes::from_planes(rest, planes)) << r / 8 * 8);
    }
    put_group<Lanes, Word>(words + at * sizeof(Word), F::join(v << trim, e), n, stream);
  });
}

// Decodes a SPARSE tail of `bytes` bytes (16 more are readable).
template <typename F, typename Lanes>
Status decode_sparse(const uint8_t* tail, uint32_t bytes, uint32_t n, uint32_t top, uint32_t trim, bool stream, uint8_t* words) {
  using Word = typename F::Word;
  const uint32_t plane = plane_bytes(n);
  if (bytes < 1 + plane || tail[0] > 1) return BLOCK;
  const uint8_t* map = tail + 1;
  uint32_t zeros = 0;
  each_group(n, [&](uint32_t at, uint32_t here) { zeros += popcount(load_plane(map, at, here)); });
  const uint32_t m = n - zeros, signs_at = 1 + plane, at = signs_at + (tail[0] ? plane_bytes(zeros) : 0);
  const uint32_t r = 1 + F::M - trim, first = first_part_bytes(m, r, Cascade::tier[0].bits);
  if (at + first > bytes) return BLOCK;
  Word others[kMaxBlock + 64];
  TierPlanes tiers[kTiers - 1];
  uint8_t list[kMaxBlock + 64], other[kMaxBlock + 64];
  const Status status = read_tiers<Cascade>(tail + at + parts_bytes(m, r), m, tail + at + first, bytes - at - first, tiers, list);
  if (status) return status;
  decode_tier<Cascade, 3, Lanes>(tiers[2], top, list, other);
  decode_tier<Cascade, 2, Lanes>(tiers[1], top, other, list);
  decode_tier<Cascade, 1, Lanes>(tiers[0], top, list, other);
  decode_elements<F, Cascade, Lanes>(tail + at, other, m, top, trim, false, reinterpret_cast<uint8_t*>(others));
  uint8_t bytes_of[sizeof(Word)][kMaxBlock + 64];  // the words as byte planes, to be expanded one by one
  each_group(m, [&](uint32_t i, uint32_t) __attribute__((always_inline)) {
    const auto group = Lanes::template load_words<Word>(reinterpret_cast<const uint8_t*>(others + i));
    for (uint32_t byte = 0; byte < sizeof(Word); ++byte) Lanes::store(bytes_of[byte] + i, Lanes::template narrow<Word>(group >> 8 * byte));
  });
  uint32_t next = 0;
  each_group(n, [&](uint32_t i, uint32_t here) __attribute__((always_inline)) {
    const uint64_t keep = ~load_plane(map, i, here) & ones(here);
    typename Lanes::template Vec<Word> group = {};
    for (uint32_t byte = 0; byte < sizeof(Word); ++byte)
      group = group | Lanes::template widen<Word>(Lanes::expand({}, keep, bytes_of[byte] + next)) << 8 * byte;
    next += popcount(keep);
    put_group<Lanes, Word>(words + i * sizeof(Word), group, here, stream);
  });
  if (!tail[0]) return OK;
  uint32_t zero = 0;
  each_group(n, [&](uint32_t i, uint32_t here) {
    uint64_t left = load_plane(map, i, here), signs = read_bits(tail + signs_at, zero, popcount(left));
    zero += popcount(left);
    for (; signs; signs >>= 1, left &= left - 1)
      if (signs & 1) memcpy(words + (i + uint32_t(__builtin_ctzll(left))) * sizeof(Word), &F::negative_zero, sizeof(Word));
  });
  return OK;
}

// A block between two passes: its table entry, and the data for the next pass.
struct Entry {
  uint32_t mode, top, trim, n, tail_bytes;
  const uint8_t *body, *tail;
  TierPlanes tiers[kTiers - 1];
  uint8_t lists[2][kMaxBlock + 64];  // of the escapes; tiers go from one to the other, the second one is read for the words
};

// First pass: checks a block's tail, which is readable to 16 bytes past its end, and finds its tiers. Its body lies in the chunk.
template <typename F>
Status read_tail(Entry& entry) {
  const uint8_t* tier1 = entry.body + parts_bytes(entry.n, 1 + F::M - entry.trim);
  switch (entry.mode) {
    case FILL: return entry.tail_bytes == 0 || entry.tail_bytes == sizeof(typename F::Word) ? OK : BLOCK;
    case RAW: return entry.tail_bytes == 0 ? OK : BLOCK;
    case CASCADE: return read_tiers<Cascade>(tier1, entry.n, entry.tail, entry.tail_bytes, entry.tiers, entry.lists[0]);
    case WIDE: return read_tiers<Wide>(tier1, entry.n, entry.tail, entry.tail_bytes, entry.tiers, entry.lists[0]);
    default: return OK;  // SPARSE and CHANGE are checked as they are decoded
  }
}

// Decoder of the modes of a delta payload (cpu/delta/delta_chunk.h) in a payload without a base: they are unknown there.
struct NoBase {
  static constexpr uint32_t last_mode = WIDE;
  template <typename F, typename Lanes>
  Status decode(const Entry&, uint32_t, uint8_t*) const {
    return BLOCK;
  }
};

// Last pass: the words of a block, the first of which is element `at` of the chunk.
template <typename F, typename Lanes, typename Base>
Status decode_block(const Entry& entry, const Base& base, uint32_t at, bool stream, uint8_t* words) {
  using Word = typename F::Word;
  switch (entry.mode) {
    case FILL: {
      Word fill[64], word = 0;
      memcpy(&word, entry.tail, entry.tail_bytes);
      for (Word& each : fill) each = word;
      for (uint32_t at = 0; at < entry.n; at += 64)
        memcpy(words + at * sizeof(Word), fill, (entry.n - at < 64 ? entry.n - at : 64) * sizeof(Word));
      return OK;
    }
    case RAW: memcpy(words, entry.body, entry.n * sizeof(Word)); return OK;
    case CASCADE: decode_elements<F, Cascade, Lanes>(entry.body, entry.lists[1], entry.n, entry.top, entry.trim, stream, words); return OK;
    case WIDE: decode_elements<F, Wide, Lanes>(entry.body, entry.lists[1], entry.n, entry.top, entry.trim, stream, words); return OK;
    case SPARSE: return decode_sparse<F, Lanes>(entry.tail, entry.tail_bytes, entry.n, entry.top, entry.trim, stream, words);
    default: return base.template decode<F, Lanes>(entry, at, words);
  }
}

// Decodes a chunk of numel words and hands each block to put(words, first element, n). `where(b)` says where block b is to be decoded to,
// bit b of `stream` whether past the cache; `base` decodes the modes that need one.
template <typename F, typename Lanes, typename Where, typename Put, typename Base = NoBase>
Status each_block(const uint8_t* chunk, uint64_t bytes, uint32_t numel, uint32_t block, uint32_t stream, Where where, Put put,
                  const Base& base = {}) {
  const uint32_t blocks = (numel + block - 1) / block;
  uint64_t body = table_bytes<F>(blocks), tail = body;
  if (body > bytes) return BLOCK;
  Entry entries[kChunkBlocks];
  for (uint32_t b = 0; b < blocks; ++b) {
    Entry& entry = entries[b];
    const uint32_t packed = load_word<uint16_t>(chunk + blocks + 2 * b);
    entry.mode = packed >> kTailBits;
    entry.tail_bytes = packed & (kTailMax - 1);
    entry.top = chunk[b];
    entry.trim = F::has_trim ? chunk[3 * blocks + b] : 0;
    entry.n = b + 1 < blocks ? block : numel - b * block;
    if (entry.mode > Base::last_mode || entry.trim > F::M || (!F::E && entry.mode > RAW && entry.mode < CHANGE)) return BLOCK;
    entry.body = chunk + tail;  // the tails begin where the bodies end
    tail += body_bytes<F>(entry.mode, entry.n, entry.trim);
  }
  // Bit strings are read eight bytes at a time. A read that would pass the end of the chunk goes to a copy.
  uint8_t end[kTailMax + 32];
  uint64_t end_at = bytes;
  for (uint32_t b = 0; b < blocks; ++b) {
    Entry& entry = entries[b];
    if (tail + entry.tail_bytes > bytes) return BLOCK;
    if (tail < end_at && tail + entry.tail_bytes + 16 > bytes) {
      end_at = tail;
      memcpy(end, chunk + tail, bytes - tail);
      memset(end + (bytes - tail), 0, 16);
    }
    entry.tail = tail < end_at ? chunk + tail : end + (tail - end_at);
    tail += entry.tail_bytes;
    const Status status = read_tail<F>(entry);
    if (status) return status;
  }
  if ((tail + 15) / 16 * 16 != bytes) return BLOCK;
  // Tier by tier, not block by block: cpu/encode.h has the reason.
  const auto tier = [&](auto code, auto index) __attribute__((always_inline)) {
    using Code = decltype(code);
    for (uint32_t b = 0; b < blocks; ++b)
      if (entries[b].mode == Code::mode)
        decode_tier<Code, index.value, Lanes>(entries[b].tiers[index.value - 1], entries[b].top, entries[b].lists[(index.value + 1) % 2],
                                              entries[b].lists[index.value % 2]);
  };
  tier(Cascade(), Index<3>());
  tier(Cascade(), Index<2>());
  tier(Cascade(), Index<1>());
  tier(Wide(), Index<3>());
  tier(Wide(), Index<2>());
  tier(Wide(), Index<1>());
  for (uint32_t b = 0; b < blocks; ++b) {
    // The next chunk begins at the end of this one, and its passes read it out of order: prefetch it.
    for (uint64_t at = b * bytes / blocks; at < (b + 1) * bytes / blocks; at += 64) prefetch(chunk + bytes + at);
    uint8_t* words = where(b);
    const Status status = decode_block<F, Lanes>(entries[b], base, b * block, stream >> b & 1, words);
    if (status) return status;
    put(words, b * block, entries[b].n);
  }
  return OK;
}

// Decodes each block of a chunk to its place in `blocks`; `stream` has a bit for each block whose words need not stay in the cache.
template <typename F, typename Lanes>
int32_t decode_chunk(const uint8_t* chunk, uint64_t bytes, uint32_t numel, uint32_t block, uint32_t stream, uint8_t* const* blocks) {
  const uint32_t block_bytes = block * uint32_t(sizeof(typename F::Word));
  for (uint32_t b = 0; b * block < numel; ++b)
    if (reinterpret_cast<uintptr_t>(blocks[b]) % 64) stream &= ~(1u << b);
  const auto where = [&](uint32_t b) {
    uint8_t* const to = blocks[b];
    if (!(stream >> b & 1))
      for (uint32_t at = 0; at < block_bytes; at += 64) prefetch_to_write(to + kAhead + at);
    return to;
  };
  return each_block<F, Lanes>(chunk, bytes, numel, block, stream, where, [](const uint8_t*, uint32_t, uint32_t) {});
}

}  // namespace
}  // namespace zipccl
