// Decodes a block of an exponent payload with a warp (FORMAT.md section 2). No byte is read before it is proven to lie in the chunk
// (section 4).
#pragma once
#include "cuda/words.cuh"

namespace zipccl {
namespace {

// Table entry of a block; offsets are bytes from the start of the chunk.
struct Entry {
  uint32_t body, tail;
  uint16_t tail_bytes;
  uint8_t mode, top, trim;
};

template <typename F>
struct DecodeScratch {  // of a warp
  alignas(16) uint8_t list[2][kMaxBlock];         // exponents that a tier escapes; tiers go from one list to the other
  alignas(16) typename F::Word words[kMaxBlock];  // the words of a SPARSE block that are not zero
};

// A warp reads the table of a chunk of numel words that has `bytes` bytes. Returns whether all parts lie in the chunk and fill it.
template <typename F, bool kDelta = false>
ZIPCCL_DEVICE bool read_table(const uint8_t* chunk, uint64_t bytes, uint32_t numel, uint32_t block, Entry* entries) {
  const uint32_t blocks = pieces(numel, block), lane = lane_id(), table = table_bytes<F>(blocks);
  if (table > bytes) return false;
  uint32_t mode = FILL, top = 0, trim = 0, tail_bytes = 0, body_size = 0;
  bool good = true;
  if (lane < blocks) {
    const uint32_t packed = chunk[blocks + 2 * lane] | uint32_t(chunk[blocks + 2 * lane + 1]) << 8;
    mode = packed >> kTailBits;
    tail_bytes = packed & ((1u << kTailBits) - 1);
    top = chunk[lane];
    if (F::has_trim) trim = chunk[3 * blocks + lane];
    good = mode <= (kDelta ? CHANGE : WIDE) && trim <= F::M;
    if (good) body_size = body_bytes<F>(mode, least(numel - lane * block, block), trim);
    if (mode == RAW) good = good && tail_bytes == 0;
    if (mode == FILL) good = good && (tail_bytes == 0 || tail_bytes == sizeof(typename F::Word));
  }
  const uint32_t bodies = __reduce_add_sync(kEveryLane, body_size), tails = __reduce_add_sync(kEveryLane, tail_bytes);
  const uint32_t body = table + sum_below(body_size), tail = table + bodies + sum_below(tail_bytes);
  if (lane < blocks) entries[lane] = {body, tail, uint16_t(tail_bytes), uint8_t(mode), uint8_t(top), uint8_t(trim)};
  return __all_sync(kEveryLane, good) && pad16(table + bodies + tails) == bytes;
}

// A lane's words of the two planes of a tier after the first.
struct TierWords {
  uint32_t low, high;
};

// Reads the `count` entries of a tier from bit `at` of the second part; returns how many escape.
ZIPCCL_DEVICE uint32_t read_tier(const BitString& second, uint32_t at, uint32_t count, TierWords& tier) {
  const uint32_t first = at + kLanes * lane_id();
  tier.low = second.read(first, at + count);
  tier.high = second.read(first + count, at + 2 * count);
  return __reduce_add_sync(kEveryLane, uint32_t(__popc(tier.low & tier.high)));
}

// The exponents of a tier's `count` entries to `to`: by their codes, or the next of those that the tier escapes, `escapes`. The list is
// filled up to a multiple of 32.
template <typename Code, uint32_t kTier>
ZIPCCL_DEVICE void decode_tier(const TierWords& tier, uint32_t count, uint32_t top, const uint8_t* escapes, uint8_t* to) {
  constexpr Tier table = Code::tier[kTier];
  const uint32_t lane = lane_id(), below = lanes_below(), own = 1u << lane, above = top + kAbove;
  const uint32_t e0 = above - table.k_of_code[0], e1 = above - table.k_of_code[1];
  const uint32_t e2 = kTier + 1 == kTiers && kZeroCode == 2 ? 0 : above - table.k_of_code[2];
  for (uint32_t i = 0; i < count; i += kLanes) {
    const uint32_t low = __shfl_sync(kEveryLane, tier.low, i / kLanes), high = __shfl_sync(kEveryLane, tier.high, i / kLanes);
    const uint32_t escaped = low & high;
    uint32_t e = high & own ? e2 : low & own ? e1 : e0;
    if (escaped & own) e = escapes[__popc(escaped & below)];
    to[i + lane] = uint8_t(e);
    escapes += __popc(escaped);
  }
  __syncwarp();
}

// An octet of a byte plane of `extent` bytes.
template <typename Extent>
ZIPCCL_DEVICE Bytes8 get_octet(const uint8_t* plane, uint32_t row, Extent extent) {
  const uint8_t* const from = plane + row * kRow + 8 * lane_id();
  const uint32_t length = extent.length(row);
  if (Extent::whole || (length == 8 && reinterpret_cast<uintptr_t>(from) % 8 == 0)) {
    const uint2 eight = *reinterpret_cast<const uint2*>(from);
    return {{eight.x, eight.y}};
  }
  Bytes8 x = {{0, 0}};
#pragma unroll
  for (uint32_t i = 0; i < 8; ++i)
    if (i < length) x.half[i / 4] |= uint32_t(from[i]) << 8 * (i % 4);
  return x;
}

// Decodes m coded elements (FORMAT.md 2.1) and hands every octet to put(row, octet). The first part is proven to be there; the second must
// fill its `bytes` bytes exactly, or the result is false.
template <typename F, typename Code, typename Extent, typename Put>
ZIPCCL_DEVICE bool decode_elements(const uint8_t* first, const uint8_t* second, uint32_t bytes, Extent extent, uint32_t top, uint32_t trim,
                                   uint8_t (*list)[kMaxBlock], Put put) {
  constexpr uint32_t bits = Code::tier[0].bits, part_bytes = (1 + F::M + 7) / 8;
  const uint32_t m = extent.n;
  if (!F::has_trim) trim = 0;  // the compiler then knows r
  const uint32_t r = 1 + F::M - trim;
  const uint8_t* const tier1 = first + parts_bytes(m, r);
  uint32_t codes[bits], escapes = 0;  // a byte for each row
#pragma unroll
  for (uint32_t p = 0; p < bits; ++p) codes[p] = 0;
#pragma unroll Extent::unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t length = extent.length(row);
    uint32_t escaped = low_ones(length);
#pragma unroll
    for (uint32_t p = 0; p < bits; ++p) {
      const uint32_t plane = length ? tier1[p * plane_bytes(m) + row * kLanes + lane_id()] : 0;
      codes[p] |= plane << 8 * row;
      escaped &= plane;
    }
    escapes |= escaped << 8 * row;
  }
  const Places places(escapes);

  TierWords tiers[kTiers - 1];
  const BitString bit_string(second);
  const uint32_t count1 = places.count;
  if (2 * count1 > 8 * bytes) return false;
  const uint32_t count2 = read_tier(bit_string, 0, count1, tiers[0]);
  if (2 * (count1 + count2) > 8 * bytes) return false;
  const uint32_t count3 = read_tier(bit_string, 2 * count1, count2, tiers[1]);
  if (2 * (count1 + count2 + count3) > 8 * bytes) return false;
  const uint32_t left = read_tier(bit_string, 2 * (count1 + count2), count3, tiers[2]);
  const uint32_t tier_bytes = (2 * (count1 + count2 + count3) + 7) / 8;
  if (tier_bytes + left != bytes) return false;
  decode_tier<Code, 3>(tiers[2], count3, top, second + tier_bytes, list[0]);
  decode_tier<Code, 2>(tiers[1], count2, top, list[0], list[1]);
  decode_tier<Code, 1>(tiers[0], count1, top, list[1], list[0]);

  const uint32_t top4 = ((top + kAbove - Code::tier[0].k_of_code[0]) & 255) * kEachByte;
#pragma unroll Extent::unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    Bytes8 code = {{0, 0}};
#pragma unroll
    for (uint32_t p = 0; p < bits; ++p) {
      const Bytes8 plane = spread(codes[p] >> 8 * row & 255);
      code.half[0] |= plane.half[0] << p, code.half[1] |= plane.half[1] << p;
    }
    Bytes8 e = {{__vsub4(top4, code.half[0]), __vsub4(top4, code.half[1])}};
    const uint8_t* escaped = list[0] + places.of(row);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      if (escapes >> (8 * row + i) & 1) e.half[i / 4] = __byte_perm(e.half[i / 4], *escaped++, 0x3210 + (4 - i % 4) * (1 << 4 * (i % 4)));

    Bytes8 parts[part_bytes > 1 ? part_bytes : 2] = {};
#pragma unroll
    for (uint32_t byte = 0; byte < part_bytes; ++byte) {
      if (byte < r / 8) parts[byte] = get_octet(first + byte * m, row, extent);
      if (byte == r / 8 && extent.length(row)) {
        for (uint32_t p = 0; p < r % 8; ++p) {
          const Bytes8 plane = spread(first[r / 8 * m + p * plane_bytes(m) + row * kLanes + lane_id()]);
          parts[byte].half[0] |= plane.half[0] << p, parts[byte].half[1] |= plane.half[1] << p;
        }
      }
    }
    if (F::E < 8) e.half[0] &= F::exponent_mask * kEachByte, e.half[1] &= F::exponent_mask * kEachByte;
    Octet<F> octet;
    octet.join(parts, e, trim);
    put(row, octet);
  }
  return true;
}

// The zero map of a SPARSE block (FORMAT.md 2.2): this lane's zeros, a byte of bits for each row, and where things are in the tail.
struct ZeroMap {
  uint32_t zeros, others, signs_at, first;  // signs_at is 0 where there are no signs
};
ZIPCCL_DEVICE bool read_zero_map(const uint8_t* tail, uint32_t bytes, Part extent, ZeroMap& map) {
  const uint32_t plane = plane_bytes(extent.n);
  if (bytes < 1 + plane || tail[0] > 1) return false;
  map.zeros = 0;
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t valid = low_ones(extent.length(row));
    if (valid) map.zeros |= (tail[1 + row * kLanes + lane_id()] & valid) << 8 * row;
  }
  const uint32_t zeros = __reduce_add_sync(kEveryLane, uint32_t(__popc(map.zeros)));
  map.others = extent.n - zeros;
  map.signs_at = tail[0] ? 1 + plane : 0;
  map.first = 1 + plane + (tail[0] ? plane_bytes(zeros) : 0);
  return true;
}

// The words that are not zero, `others` close together, and the zeros between them to n words. They may be the same memory.
template <typename F>
ZIPCCL_DEVICE void put_zeros(const ZeroMap& map, const uint8_t* tail, Part extent, const typename F::Word* others, typename F::Word* to) {
  using Word = typename F::Word;
  uint32_t keep = 0;
  for (uint32_t row = 0; row < kRows; ++row) keep |= (~(map.zeros >> 8 * row) & low_ones(extent.length(row))) << 8 * row;
  const Places at(keep), zero_at(map.zeros);
  // From the last row on: words of earlier rows are not written over before they have been read.
  for (uint32_t row = kRows; row-- > 0;) {
    const Word* other = others + at.of(row);
    uint32_t sign = 8 * map.signs_at + zero_at.of(row);
    Octet<F> octet;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      Word word = 0;
      if (keep >> (8 * row + i) & 1) word = *other++;
      if (map.zeros >> (8 * row + i) & 1) {
        if (map.signs_at && tail[sign / 8] >> sign % 8 & 1) word = F::negative_zero;
        ++sign;
      }
      octet.set(i, word);
    }
    __syncwarp();
    octet.store(to + row * kRow + 8 * lane_id(), extent.length(row));
  }
}

// Decodes a block of n words of a chunk whose table is good to any address of a word, which may be those of the scratch. Returns whether
// the block is good.
template <typename F>
ZIPCCL_DEVICE bool decode_part(const uint8_t* chunk, const Entry& entry, uint32_t n, DecodeScratch<F>& scratch, typename F::Word* to) {
  using Word = typename F::Word;
  const uint32_t mode = entry.mode;
  const uint8_t *const tail = chunk + entry.tail, *first = chunk + entry.body, *second = tail;
  if (mode == FILL || mode == RAW) {
    Word fill = 0;
    if (mode == FILL)
      for (uint32_t i = 0; i < entry.tail_bytes; ++i) fill |= Word(Word(tail[i]) << 8 * i);
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t at = row * kRow + 8 * lane_id(), length = Part{n}.length(row);
      Octet<F> octet;
      octet.load(reinterpret_cast<const Word*>(first) + at, mode == RAW ? length : 0, fill);
      octet.store(to + at, length);
    }
    return true;
  }
  Part extent{n};
  Word* words = to;
  ZeroMap map = {};
  if (mode == SPARSE) {
    if (!read_zero_map(tail, entry.tail_bytes, Part{n}, map)) return false;
    extent.n = map.others, words = scratch.words;
    first = tail + map.first, second = first + first_part_bytes(map.others, 1 + F::M - entry.trim, Cascade::tier[0].bits);
    if (second > tail + entry.tail_bytes) return false;
  }
  const uint32_t bytes = uint32_t(tail + entry.tail_bytes - second);
  const auto put = [=](uint32_t row, const Octet<F>& octet) { octet.store(words + row * kRow + 8 * lane_id(), extent.length(row)); };
  if (mode == WIDE) return decode_elements<F, Wide>(first, second, bytes, extent, entry.top, entry.trim, scratch.list, put);
  if (!decode_elements<F, Cascade>(first, second, bytes, extent, entry.top, entry.trim, scratch.list, put)) return false;
  __syncwarp();
  if (mode == SPARSE) put_zeros<F>(map, tail, Part{n}, words, to);
  return true;
}

// Whether a block of n words is one that decode_whole() takes.
ZIPCCL_DEVICE bool is_whole(const Entry& entry, uint32_t n) { return n == Whole::n && (entry.mode == CASCADE || entry.mode == WIDE); }

template <typename F, typename Put>
ZIPCCL_DEVICE bool decode_whole(const uint8_t* chunk, const Entry& entry, DecodeScratch<F>& scratch, Put put) {
  const uint8_t *const body = chunk + entry.body, *const tail = chunk + entry.tail;
  if (entry.mode == CASCADE)
    return decode_elements<F, Cascade>(body, tail, entry.tail_bytes, Whole(), entry.top, entry.trim, scratch.list, put);
  return decode_elements<F, Wide>(body, tail, entry.tail_bytes, Whole(), entry.top, entry.trim, scratch.list, put);
}

}  // namespace
}  // namespace zipccl
