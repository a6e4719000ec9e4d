// Decodes a block of an exponent payload with a warp (FORMAT.md section 2). No byte is read before it is proven to lie in the chunk
// (section 4).
#pragma once
#include "cuda/bit_planes.cuh"
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
  alignas(16) uint8_t list[2][kMaxBlock];         // exponents that no tier names, at their elements; the exponents that lanes exchange
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
    good = mode <= (kDelta ? CHANGE : WIDE) && trim <= F::M && (F::E != 0 || mode < CASCADE || mode == CHANGE);
    if (good) body_size = body_bytes<F>(mode, least(numel - lane * block, block), trim);
    if (mode == RAW) good = good && tail_bytes == 0;
    if (mode == FILL) good = good && (tail_bytes == 0 || tail_bytes == sizeof(typename F::Word));
  }
  const uint32_t bodies = __reduce_add_sync(kEveryLane, body_size), tails = __reduce_add_sync(kEveryLane, tail_bytes);
  const uint32_t body = table + sum_below(body_size), tail = table + bodies + sum_below(tail_bytes);
  if (lane < blocks) entries[lane] = {body, tail, uint16_t(tail_bytes), uint8_t(mode), uint8_t(top), uint8_t(trim)};
  return __all_sync(kEveryLane, good) && pad16(table + bodies + tails) == bytes;
}

// The bits of k that a tier's codes name, as a table for its planes and the tiers below: bit 4 high + 2 low + below.
template <uint32_t kTier>
ZIPCCL_FN constexpr uint32_t names(const Tier& tier, uint32_t bit) {
  uint32_t table = 1u << 7;  // the escape: as the tiers below say
  for (uint32_t code = 0; code < 3; ++code) {
    const uint32_t k = kTier + 1 == kTiers && code == kZeroCode ? 15 : tier.k_of_code[code];
    if (k >> bit & 1) table |= 3u << 2 * code;
  }
  return table;
}
// The same for three planes: bit `code`.
ZIPCCL_FN constexpr uint32_t names3(const Tier& tier, uint32_t bit) {
  uint32_t table = 0;
  for (uint32_t code = 0; code < 7; ++code) table |= uint32_t(tier.k_of_code[code] >> bit & 1) << code;
  return table;
}

// The elements of a lane in the tiers: those that have an entry, and the bits of their codes.
struct Codes {
  uint32_t first[3];                // planes of tier 1
  uint32_t marks[kTiers];           // that a tier escapes
  uint32_t low[kTiers - 1], high[kTiers - 1];  // of the tiers after the first
};

// Bit `bit` of the elements' k. It is 15 for exponents that are not named by their k.
template <typename Code, uint32_t kBit>
ZIPCCL_DEVICE uint32_t bit_of_k(const Codes& codes) {
  uint32_t bits = ~0u;
  bits = look_up3<names<3>(Code::tier[3], kBit)>(codes.high[2], codes.low[2], bits);
  bits = look_up3<names<2>(Code::tier[2], kBit)>(codes.high[1], codes.low[1], bits);
  bits = look_up3<names<1>(Code::tier[1], kBit)>(codes.high[0], codes.low[0], bits);
  if constexpr (Code::tier[0].bits == 2) {
    return look_up3<names<0>(Code::tier[0], kBit)>(codes.first[1], codes.first[0], bits);
  } else {
    const uint32_t named = look_up3<names3(Code::tier[0], kBit)>(codes.first[2], codes.first[1], codes.first[0]);
    return (bits & codes.marks[0]) | (named & ~codes.marks[0]);
  }
}

// A lane's word of a bit plane; zeros past the last element.
template <typename Extent>
ZIPCCL_DEVICE uint32_t get_plane_word(const uint8_t* plane, Extent extent) {
  if (Extent::whole) return reinterpret_cast<const uint32_t*>(plane)[lane_id()];
  return BitString(plane).read(kLanes * lane_id(), extent.n);
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
  Codes codes;
  codes.marks[0] = ~0u;
#pragma unroll
  for (uint32_t p = 0; p < bits; ++p) {
    codes.first[p] = get_plane_word(tier1 + p * plane_bytes(m), extent);
    codes.marks[0] &= codes.first[p];
  }
  // The second part: no bit is read before the count of its tier's entries is known to fit.
  const BitString string(second);
  uint32_t at = 0, left = 0, below = 0;
#pragma unroll
  for (uint32_t tier = 0; tier < kTiers; ++tier) {
    const uint32_t marks = codes.marks[tier], own = uint32_t(__popc(marks));
    left = __reduce_add_sync(kEveryLane, own);
    if (tier + 1 == kTiers) break;
    if (at + 2 * left > 8 * bytes) return false;
    uint32_t low = 0, high = 0;
    if (left) {
      below = at + sum_below(own);
      low = string.peek(below, own), high = string.peek(below + left, own);
      if (tier == 0) {
        const Moves moves(marks);
        low = moves.open(low), high = moves.open(high);
      } else {
        open_few(marks, low, high);
      }
    }
    codes.low[tier] = low, codes.high[tier] = high;
    codes.marks[tier + 1] = marks & low & high;
    at += 2 * left;
  }
  const uint32_t tier_bytes = (at + 7) / 8;
  if (tier_bytes + left != bytes) return false;

  // Exponents that no tier names, and those that are zero, go to the list.
  const uint32_t zeros = codes.marks[2] & codes.high[2] & ~codes.low[2];
  const uint32_t listed = __ballot_sync(kEveryLane, (codes.marks[3] | zeros) != 0);
  if (listed) {
    const uint8_t* from = second + tier_bytes + sum_below(uint32_t(__popc(codes.marks[3])));
    for (uint32_t some = codes.marks[3] | zeros; some; some &= some - 1)
      list[0][32 * lane_id() + uint32_t(__ffs(int(some))) - 1] = zeros & some & -some ? 0 : *from++;
  }
  Nibbles k = {{bit_of_k<Code, 0>(codes), bit_of_k<Code, 1>(codes), bit_of_k<Code, 2>(codes), bit_of_k<Code, 3>(codes)}};
  k.planes_to_octets();
  reinterpret_cast<uint4*>(list[1])[lane_id()] = make_uint4(k.word[0], k.word[1], k.word[2], k.word[3]);
  __syncwarp();

  const uint32_t above4 = ((top + kAbove) & 255) * kEachByte;
#pragma unroll Extent::unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t octet_of_k = reinterpret_cast<const uint32_t*>(list[1])[row * kLanes + lane_id()];
    // No byte of the differences borrows from the next.
    Bytes8 e = {{(above4 | 0x80808080u) - (octet_of_k & 0x0f0f0f0fu), (above4 | 0x80808080u) - (octet_of_k >> 4 & 0x0f0f0f0fu)}};
    if (F::E == 8) e.half[0] ^= ~above4 & 0x80808080u, e.half[1] ^= ~above4 & 0x80808080u;
    if (listed & 255u << 8 * row) {
      const uint32_t pairs = octet_of_k & octet_of_k >> 1;
      for (uint32_t some = pairs & pairs >> 2 & 0x11111111u; some; some &= some - 1) {
        const uint32_t place = uint32_t(__ffs(int(some))) - 1, byte = place & 24;  // of a half byte; its element is that of half `place & 4`
        const uint32_t exponent = list[0][row * kRow + 8 * lane_id() + byte / 8 + (place & 4)];
        const uint32_t keep = ~(255u << byte);
        if (place & 4) e.half[1] = (e.half[1] & keep) | exponent << byte;
        else e.half[0] = (e.half[0] & keep) | exponent << byte;
      }
    }

    Bytes8 parts[part_bytes > 1 ? part_bytes : 2];
    Bytes8 rest = {{0, 0}};  // the bits past the last whole byte
    if (extent.length(row)) {
      for (uint32_t p = 0; p < r % 8; ++p) {
        const Bytes8 plane = spread(first[r / 8 * m + p * plane_bytes(m) + row * kLanes + lane_id()]);
        rest.half[0] |= plane.half[0] << p, rest.half[1] |= plane.half[1] << p;
      }
    }
    // Every part is assigned, whatever r is: an index that depends on r would put the parts in local memory.
#pragma unroll
    for (uint32_t byte = 0; byte < (part_bytes > 1 ? part_bytes : 2); ++byte) {
      Bytes8 whole = {{0, 0}};
      if (byte < r / 8) whole = get_octet(first + byte * m, row, extent);
      parts[byte].half[0] = byte == r / 8 ? rest.half[0] : whole.half[0];
      parts[byte].half[1] = byte == r / 8 ? rest.half[1] : whole.half[1];
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
  if constexpr (F::E != 0) {
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
  return false;
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
