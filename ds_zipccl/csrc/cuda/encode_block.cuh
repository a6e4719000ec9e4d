// Encodes a block of an exponent payload with a warp (FORMAT.md sections 2 and 3).
#pragma once
#include "cuda/bit_planes.cuh"
#include "cuda/words.cuh"

namespace zipccl {
namespace {

struct Form {  // table entry of a block
  uint32_t mode, top, trim, body, tail;
};

// Bit `plane` of the code of each k, as a table of bits.
ZIPCCL_FN constexpr uint32_t code_bits(const Tier& tier, uint32_t plane) {
  uint32_t bits = 0;
  for (uint32_t k = 0; k < 16; ++k) bits |= uint32_t(tier.code_of_k[k] >> plane & 1) << k;
  return bits;
}

// Bytes of octets to a plane of bytes.
template <typename Extent>
ZIPCCL_DEVICE void put_octet(uint8_t* plane, uint32_t row, Extent extent, const Bytes8& x) {
  uint8_t* to = plane + row * kRow + 8 * lane_id();
  const uint32_t length = extent.length(row);
  if (Extent::whole || (length == 8 && reinterpret_cast<uintptr_t>(plane) % 8 == 0)) {
    *reinterpret_cast<uint2*>(to) = make_uint2(x.half[0], x.half[1]);
  } else {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      if (i < length) to[i] = uint8_t(x.byte(i));
  }
}

// A lane's word of a bit plane; `word` is zero past the last element.
template <typename Extent>
ZIPCCL_DEVICE void put_plane_word(uint8_t* plane, Extent extent, uint32_t word) {
  if (Extent::whole) {
    reinterpret_cast<uint32_t*>(plane)[lane_id()] = word;
  } else {
    for (uint32_t i = 4 * lane_id(); i < least(4 * lane_id() + 4, plane_bytes(extent.n)); ++i, word >>= 8) plane[i] = uint8_t(word);
  }
}

// The low `count` bits of an octet's bytes to planes of m bits.
ZIPCCL_DEVICE void put_planes(const Bytes8& x, uint32_t count, uint32_t row, uint32_t m, uint32_t length, uint8_t* planes) {
  for (uint32_t p = 0; p < count; ++p) planes[p * plane_bytes(m) + row * kLanes + lane_id()] = uint8_t(plane_of(x, p) & low_ones(length));
}

// Signs and mantissas of a block's words, r bits each after the trim (FORMAT.md 2.1, point 1).
template <typename F, typename Words, typename Extent>
ZIPCCL_DEVICE void encode_parts(const Words& words, Extent extent, uint32_t trim, uint8_t* parts) {
  const uint32_t m = extent.n, r = 1 + F::M - (F::has_trim ? trim : 0);
#pragma unroll Extent::unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const Octet<F> octet = words.octet(row);
    const uint32_t length = extent.length(row);
    for (uint32_t byte = 0; byte < r / 8; ++byte) put_octet(parts + byte * m, row, extent, octet.part(byte, trim));
    if (r % 8 && length) put_planes(octet.part(r / 8, trim), r % 8, row, m, length, parts + r / 8 * m);
  }
}

// k of four exponents at a time; 15, which no tier names, for all k from 15 up.
ZIPCCL_DEVICE uint32_t capped(uint32_t above4, uint32_t e) {
  const uint32_t k = __vsub4(above4, e), over = (((k & 0x7f7f7f7fu) + 0x70707070u) | k) & 0x80808080u;
  return (k | (over - (over >> 7))) & 0x0f0f0f0fu;
}

// k of m exponents as planes; exponents(row) are a lane's in a row. The lanes exchange elements in `scratch`, of four bits each. `near`: all k
// are below 16, and top + 3 below 256.
template <typename Exponents, typename Extent>
ZIPCCL_DEVICE Nibbles planes_of_k(Exponents exponents, Extent extent, uint32_t top, bool near, uint8_t* scratch) {
  const uint32_t above4 = ((top + kAbove) & 255) * kEachByte;
#pragma unroll Extent::unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const Bytes8 e = exponents(row);
    uint32_t low = above4 - e.half[0], high = above4 - e.half[1];
    if (!near) low = capped(above4, e.half[0]), high = capped(above4, e.half[1]);
    reinterpret_cast<uint32_t*>(scratch)[row * kLanes + lane_id()] = low + 16 * high;
  }
  __syncwarp();
  const uint4 octets = reinterpret_cast<const uint4*>(scratch)[lane_id()];
  __syncwarp();  // the scratch may be written again
  Nibbles k = {{octets.x, octets.y, octets.z, octets.w}};
  k.octets_to_planes();
  return k;
}

// The elements whose exponent is zero.
template <typename Exponents, typename Extent>
ZIPCCL_DEVICE uint32_t zero_exponents(Exponents exponents, Extent extent, uint8_t* scratch) {
#pragma unroll Extent::unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const Bytes8 e = exponents(row);
    const Bytes8 some = {{((e.half[0] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | e.half[0], ((e.half[1] & 0x7f7f7f7fu) + 0x7f7f7f7fu) | e.half[1]}};
    scratch[row * kLanes + lane_id()] = uint8_t(~plane_of(some, 7));
  }
  __syncwarp();
  return reinterpret_cast<const uint32_t*>(scratch)[lane_id()] & extent.marks();
}

// Tier 1 of m elements to `planes`. Returns the elements of this lane that escape.
template <typename Code, typename Extent>
ZIPCCL_DEVICE uint32_t encode_tier1(const Nibbles& k, Extent extent, uint8_t* planes) {
  constexpr Tier tier = Code::tier[0];
  uint32_t plane[3] = {look_up<code_bits(tier, 0)>(k), look_up<code_bits(tier, 1)>(k), ~0u};
  if constexpr (tier.bits == 3) plane[2] = look_up<code_bits(tier, 2)>(k);
#pragma unroll
  for (uint32_t p = 0; p < tier.bits; ++p) put_plane_word(planes + p * plane_bytes(extent.n), extent, plane[p] & extent.marks());
  return plane[0] & plane[1] & plane[2] & extent.marks();
}

// The bytes(row) that are marked in `marks` to `list`, in order; they may come from there.
template <typename Bytes>
ZIPCCL_DEVICE void list_marked(Bytes bytes, uint32_t marks, uint8_t* list) {
  const Places places(marks);
#pragma unroll 1
  for (uint32_t row = 0; row < kRows; ++row) {
    const Bytes8 x = bytes(row);
    __syncwarp();
    uint8_t* to = list + places.of(row);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      if (marks >> (8 * row + i) & 1) *to++ = uint8_t(x.byte(i));
    __syncwarp();
  }
}

constexpr uint32_t kNoRoom = ~0u;

// The second part of the elements that tier 1 escapes to slot + at; `zeros` marks exponents of zero, exponent(n) is that of element n.
// Returns the part's end in the slot, or kNoRoom if that would not be before `limit`.
template <typename Code, typename Exponent>
ZIPCCL_DEVICE uint32_t encode_tiers(const Nibbles& k, uint32_t escapes, uint32_t zeros, Exponent exponent, uint8_t* slot, uint32_t at,
                                    uint32_t limit) {
  constexpr Tier second = Code::tier[1], third = Code::tier[2], fourth = Code::tier[3];
  static_assert(second.bits == 2 && third.bits == 2 && fourth.bits == 2 && kZeroCode == 2, "two planes; the escape less one bit");
  const uint32_t lane = lane_id();
  uint32_t low[3] = {look_up<code_bits(second, 0)>(k), look_up<code_bits(third, 0)>(k), look_up<code_bits(fourth, 0)>(k)};
  uint32_t high[3] = {look_up<code_bits(second, 1)>(k), look_up<code_bits(third, 1)>(k), look_up<code_bits(fourth, 1)>(k)};
  low[2] &= ~(high[2] & zeros);
  uint32_t marks[kTiers] = {escapes};
#pragma unroll
  for (uint32_t tier = 0; tier < 3; ++tier) marks[tier + 1] = marks[tier] & low[tier] & high[tier];

  const uint32_t own1 = uint32_t(__popc(marks[0])), own2 = uint32_t(__popc(marks[1])), own3 = uint32_t(__popc(marks[2]));
  const uint32_t own4 = uint32_t(__popc(marks[3]));
  const uint32_t below = sum_below(own1 | own2 << 10 | own3 << 20);  // each at most 31 * 32
  const uint32_t early = __reduce_add_sync(kEveryLane, own1 | own2 << 16), late = __reduce_add_sync(kEveryLane, own3 | own4 << 16);
  const uint32_t count[3] = {early & 0xffff, early >> 16, late & 0xffff}, left = late >> 16;
  const uint32_t bytes = (2 * (count[0] + count[1] + count[2]) + 7) / 8;
  if (at + bytes + left >= limit) return kNoRoom;

  const uint32_t head = uint32_t(-at) & 3;  // bytes before a whole word
  if (lane < head) slot[at + lane] = 0;
#pragma unroll 1
  for (uint32_t i = (at + head) / 4 + lane; 4 * i < at + bytes; i += kLanes) reinterpret_cast<uint32_t*>(slot)[i] = 0;
  const Moves moves(marks[0]);
  low[0] = moves.close(low[0]), high[0] = moves.close(high[0]);
  close_few(marks[1], low[1], high[1]);
  close_few(marks[2], low[2], high[2]);
  __syncwarp();
  uint32_t bit = 8 * at;
#pragma unroll
  for (uint32_t tier = 0; tier < 3; ++tier) {
    if (marks[tier]) put_both(slot, bit + (below >> 10 * tier & 1023), count[tier], low[tier], high[tier]);
    bit += 2 * count[tier];
  }
  if (left) {
    uint8_t* to = slot + at + bytes + sum_below(own4);
    __syncwarp();  // bits of other lanes are in the first byte's word
    for (uint32_t some = marks[3]; some; some &= some - 1) *to++ = uint8_t(exponent(32 * lane + uint32_t(__ffs(int(some))) - 1));
  }
  return at + bytes + left;
}

// The window's top (FORMAT.md section 3).
ZIPCCL_DEVICE uint32_t window_top(uint32_t exponent_sum, uint32_t largest, uint32_t count, uint32_t bias) {
  const uint32_t some = count ? count : 1;
  return least((8 * exponent_sum + bias * count) / (8 * some), largest);
}

// A block whose zeros are left out (FORMAT.md 2.2): its tail to `slot`. Returns the tail's bytes, or kNoRoom.
template <typename F, typename Grid>
ZIPCCL_DEVICE uint32_t encode_sparse(const Stored<F, Grid>& words, uint32_t zeros, uint32_t top, uint32_t trim, uint8_t* slot, uint32_t limit,
                                     uint8_t* list) {
  const Part extent = words.extent;
  uint32_t negative = 0, keep = 0;
  for (uint32_t row = 0; row < kRows; ++row) {
    const Octet<F> octet = words.octet(row);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      if (zeros >> (8 * row + i) & 1 && octet.word(i)) negative |= 1u << (8 * row + i);
    keep |= (~(zeros >> 8 * row) & low_ones(extent.length(row))) << 8 * row;
  }
  const Places at(keep), zero_at(zeros);
  const uint32_t m = at.count;
  const bool signs = __any_sync(kEveryLane, negative != 0);
  const uint32_t map_at = 1, signs_at = map_at + plane_bytes(extent.n), first = signs_at + (signs ? plane_bytes(zero_at.count) : 0);
  const uint32_t r = 1 + F::M - trim, tier1 = first + parts_bytes(m, r), second = first + first_part_bytes(m, r, Cascade::tier[0].bits);
  if (second >= limit) return kNoRoom;

  for (uint32_t i = lane_id(); i < (first + 3) / 4; i += kLanes) reinterpret_cast<uint32_t*>(slot)[i] = 0;
  __syncwarp();
  if (lane_id() == 0) slot[0] = signs;
  for (uint32_t row = 0; row < kRows; ++row)
    if (extent.length(row)) slot[map_at + row * kLanes + lane_id()] = uint8_t(zeros >> 8 * row);
  __syncwarp();
  for (uint32_t row = 0; row < kRows; ++row) {
    uint32_t bit = 8 * signs_at + zero_at.of(row);
    for (uint32_t map = zeros >> 8 * row & 255; map; map &= map - 1, ++bit)
      if (negative >> 8 * row & (map & -map)) put_bits(slot, bit, 1);
  }
  __syncwarp();

  const auto part = [&](uint32_t byte) { return [&, byte](uint32_t row) { return words.octet(row).part(byte, trim); }; };
  const auto listed = [&](uint32_t row) { return *reinterpret_cast<const Bytes8*>(list + row * kRow + 8 * lane_id()); };
  for (uint32_t byte = 0; byte < r / 8; ++byte) list_marked(part(byte), keep, slot + first + byte * m);
  if (r % 8) {
    list_marked(part(r / 8), keep, list);
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t length = Part{m}.length(row);
      if (length) put_planes(listed(row), r % 8, row, m, length, slot + first + r / 8 * m);
    }
    __syncwarp();
  }
  list_marked([&](uint32_t row) { return words.octet(row).exponents(); }, keep, list);
  uint8_t* const scratch = list + kMaxBlock;
  const Nibbles k = planes_of_k(listed, Part{m}, top, false, scratch);
  const uint32_t escapes = encode_tier1<Cascade>(k, Part{m}, slot + tier1), zero = zero_exponents(listed, Part{m}, scratch);
  return encode_tiers<Cascade>(k, escapes, zero, [=](uint32_t n) { return list[n]; }, slot, second, limit);
}

// A block of equal words.
template <typename Word>
ZIPCCL_DEVICE Form encode_fill(Word word, uint8_t* slot) {
  if (lane_id() == 0) *reinterpret_cast<Word*>(slot) = word;
  return {FILL, 0, 0, 0, word ? uint32_t(sizeof(Word)) : 0};
}

constexpr uint32_t kLater = CHANGE + 1;  // no mode: the code for whole blocks leaves the block to the code for partial blocks

// Returns a block's form; writes its body and tail to `slot`. n is at least one. Zeros, equal words and, in rounding, the largest exponents
// are rare and need registers: the code for partial blocks takes them.
template <typename F, typename Code, typename Extent, typename Grid>
ZIPCCL_DEVICE Form encode_block(const typename F::Word* from, Extent extent, const Grid& grid, uint8_t* slot, uint8_t* list) {
  using Word = typename F::Word;
  const uint32_t n = extent.n, raw = body_bytes<F>(RAW, n, 0);
  const Form as_raw = {RAW, 0, 0, raw, 0};
  const Word head = Extent::whole ? Word(0) : grid.word(from[0]);
  typename WordsOf<F, Extent, Grid>::Type words{from, extent, head, grid};
  const auto exponents = [&](uint32_t row) { return words.octet(row).exponents(); };

  Survey all = {kEveryLane, 0, 0, 0};
#pragma unroll Extent::unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    words.octet(row).survey(all);
    words.settle(row, grid);
    if constexpr (F::has_trim) all.any |= words.octet(row).any();
    const Bytes8 e = exponents(row);
    all.exponent_sum = __dp4a(e.half[1], kEachByte, __dp4a(e.half[0], kEachByte, all.exponent_sum));
  }
  // Rounding keeps the order of magnitudes.
  const uint32_t smallest = grid.word(Word(__reduce_min_sync(kEveryLane, Octet<F>::smallest_of(all.smallest))));
  const uint32_t largest_found = __reduce_max_sync(kEveryLane, Octet<F>::largest_of(all.largest)), largest = grid.word(Word(largest_found));
  const uint32_t sum = __reduce_add_sync(kEveryLane, all.exponent_sum) - (kMaxBlock - n) * uint32_t(F::exponent(head));

  uint32_t zeros = 0, zero_count = 0;
  if constexpr (Extent::whole) {
    if (smallest == 0 || smallest == largest || !grid.is_usual(F::exponent(Word(largest_found)))) return {kLater, 0, 0, 0, 0};
  } else {
    if (smallest == largest) {
      bool same = true;
      for (uint32_t row = 0; row < kRows; ++row) {
        const Octet<F> octet = words.octet(row);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) same &= octet.word(i) == head;
      }
      if (__all_sync(kEveryLane, same)) return encode_fill(head, slot);
    }
    if (smallest == 0) {
      for (uint32_t row = 0; row < kRows; ++row) {
        const Octet<F> octet = words.octet(row);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i)
          if (i < extent.length(row) && !(octet.word(i) & Word(~F::negative_zero))) zeros |= 1u << (8 * row + i);
      }
      zero_count = __reduce_add_sync(kEveryLane, uint32_t(__popc(zeros)));
    }
  }
  const bool sparse = 16 * zero_count >= n;
  const uint32_t largest_exponent = F::exponent(Word(largest));
  uint32_t top = window_top(sum, largest_exponent, n - zero_count, sparse ? Cascade::top_bias : Code::top_bias), trim = 0;
  if (F::has_trim) {
    const uint32_t any = __reduce_or_sync(kEveryLane, all.any);
    trim = least(any ? uint32_t(__ffs(int(any))) - 1 : 0, F::M);
  }
  if constexpr (!Extent::whole) {
    if (sparse) {
      const uint32_t tail = encode_sparse<F>(words, zeros, top, trim, slot, raw, list);
      return tail == kNoRoom ? as_raw : Form{SPARSE, top, trim, 0, tail};
    }
  }

  const uint32_t r = 1 + F::M - (F::has_trim ? trim : 0);
  uint8_t* const tier1 = slot + parts_bytes(n, r);
  uint32_t mode = Code::mode, body = body_bytes<F>(mode, n, trim);
  if (body >= raw) return as_raw;
  encode_parts<F>(words, extent, trim, slot);
  // The exponents of a whole block are usually all near the top; then k needs no cap. Where top + 3 is past a byte, k of the exponents
  // borrows from the next byte: capped() takes care of it.
  const uint32_t smallest_exponent = F::exponent(Word(smallest));
  const auto all_near = [=](uint32_t window) {
    return Extent::whole && largest_exponent <= window + kAbove && window + kAbove < least(smallest_exponent + 16, 256);
  };
  Nibbles k = planes_of_k(exponents, extent, top, all_near(top), list);
  uint32_t escapes = encode_tier1<Code>(k, extent, tier1);
  if (Code::mode == CASCADE && 8 * __reduce_add_sync(kEveryLane, uint32_t(__popc(escapes))) > 3 * n) {
    mode = WIDE, body = body_bytes<F>(mode, n, trim);
    if (body >= raw) return as_raw;
    top = window_top(sum, largest_exponent, n - zero_count, kFallbackBias);
    k = planes_of_k(exponents, extent, top, all_near(top), list);
    escapes = encode_tier1<Wide>(k, extent, tier1);
  }
  const uint32_t first = first_part_bytes(n, r, mode == WIDE ? Wide::tier[0].bits : Cascade::tier[0].bits);
  if (!Extent::whole && first + lane_id() < body) slot[first + lane_id()] = 0;
  const uint32_t zero = smallest_exponent == 0 ? zero_exponents(exponents, extent, list) : 0;
  const auto exponent = [=](uint32_t i) { return F::exponent(grid.word(from[i])); };
  const uint32_t end = mode == WIDE ? encode_tiers<Wide>(k, escapes, zero, exponent, slot, body, raw)
                                    : encode_tiers<Cascade>(k, escapes, zero, exponent, slot, body, raw);
  return end == kNoRoom ? as_raw : Form{mode, top, trim, body, end - body};
}

}  // namespace
}  // namespace zipccl
