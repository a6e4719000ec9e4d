// Encodes a block of an exponent payload with a warp (FORMAT.md sections 2 and 3).
#pragma once
#include "cuda/words.cuh"

namespace zipccl {
namespace {

struct Form {  // table entry of a block
  uint32_t mode, top, trim, body, tail;
};

// A constexpr table as an immediate of instructions: shifted left by k it is negative if bit `plane` of the code of k is clear.
// Codes of k past the table are escapes, which have all bits.
ZIPCCL_FN constexpr uint32_t clear_bits(const Tier& tier, uint32_t plane) {
  uint32_t bits = 0;
  for (uint32_t k = 0; k < 16; ++k) bits |= uint32_t(~tier.code_of_k[k] >> plane & 1) << (31 - k);
  return bits;
}
ZIPCCL_FN constexpr bool names_a_run(const Tier& tier) {
  for (uint32_t code = 0; code + 1 < 1u << tier.bits; ++code)
    if (tier.k_of_code[code] != tier.k_of_code[0] + code) return false;
  return true;
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

// Tier 1 of m exponents to `planes`; exponents(row) are a lane's in a row. Returns this lane's escapes, a byte of bits for each row.
template <typename Code, typename Exponents, typename Extent>
ZIPCCL_DEVICE uint32_t encode_tier1(Exponents exponents, Extent extent, uint32_t top, uint8_t* planes) {
  constexpr Tier tier = Code::tier[0];
  static_assert(names_a_run(tier), "codes are differences from the first");
  constexpr uint32_t bits = tier.bits, first = tier.k_of_code[0];
  const uint32_t top4 = ((top + kAbove - first) & 255) * kEachByte;
  uint32_t escapes = 0;
#pragma unroll Extent::unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t length = extent.length(row), valid = low_ones(length);
    const Bytes8 e = exponents(row);
    uint32_t codes[2], over[2], escaped = valid;
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      codes[half] = __vsub4(top4, e.half[half]);
      // Bit 7 of each byte: a difference of 2^bits or more, which escapes; 2^bits - 1 is the escape's own code.
      over[half] = ((codes[half] & 0x7f7f7f7fu) + (128 - (1u << bits)) * kEachByte) | codes[half];
    }
#pragma unroll
    for (uint32_t p = 0; p < bits; ++p) {
      const uint32_t low = (codes[0] << (7 - p) | over[0]) & 0x80808080u, high = (codes[1] << (7 - p) | over[1]) & 0x80808080u;
      const uint32_t plane = __dp4a(high, 0x80402010u, __dp4a(low, 0x08040201u, 0u)) >> 7 & valid;
      escaped &= plane;
      if (length) planes[p * plane_bytes(extent.n) + row * kLanes + lane_id()] = uint8_t(plane);
    }
    escapes |= escaped << 8 * row;
  }
  return escapes;
}

// The bytes(row) that are marked in `marks` to `list`, in order; they may come from there. Returns how many.
template <typename Extent, typename Bytes>
ZIPCCL_DEVICE uint32_t list_marked(Bytes bytes, uint32_t marks, uint8_t* list) {
  const Places places(marks);
#pragma unroll Extent::unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const Bytes8 x = bytes(row);
    if (!Extent::whole) __syncwarp();
    uint8_t* to = list + places.of(row);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      if (marks >> (8 * row + i) & 1) *to++ = uint8_t(x.byte(i));
    if (!Extent::whole) __syncwarp();
  }
  __syncwarp();
  return places.count;
}

// A tier after the first: the planes of the `left` exponents in `list` to the bit string `slot` from bit `at` on. Those that escape
// stay in the list; returns how many.
template <typename Code, uint32_t kTier>
ZIPCCL_DEVICE uint32_t encode_tier(uint8_t* list, uint32_t left, uint32_t top, uint8_t* slot, uint32_t at) {
  constexpr Tier tier = Code::tier[kTier];
  static_assert(tier.bits == 2, "two planes");
  static_assert(kZeroCode == 2 && tier.code_of_k[tier.k_of_code[0]] == 0, "as below");
  constexpr uint32_t clear_low = clear_bits(tier, 0), clear_high = clear_bits(tier, 1);
  const uint32_t lane = lane_id(), below = lanes_below(), own = 1u << lane, above = top + kAbove;
  const uint32_t named = (above - tier.k_of_code[0]) & 255;  // stands where the list has ended: a code of zero bits
  uint32_t escapes = 0, low_word = 0, high_word = 0, word = lane;
#pragma unroll (kTier == 1 ? 2 : 1)
  for (uint32_t i = 0; i < left; i += kLanes, --word) {
    const uint32_t e = i + lane < left ? list[i + lane] : named, k = (above - e) & 255;
    bool low_here = int32_t(__funnelshift_lc(0, clear_low, k)) >= 0;
    const bool high_here = int32_t(__funnelshift_lc(0, clear_high, k)) >= 0;
    if (kTier + 1 == kTiers && e == 0 && high_here) low_here = false;  // kZeroCode
    const uint32_t low = __ballot_sync(kEveryLane, low_here), high = __ballot_sync(kEveryLane, high_here), escaped = low & high;
    if (word == 0) low_word = low, high_word = high;
    __syncwarp();  // in place: every lane has read its exponent
    if (escaped & own) list[escapes + __popc(escaped & below)] = uint8_t(e);
    escapes += __popc(escaped);
  }
  __syncwarp();
  put_bits(slot, at + kLanes * lane, low_word);
  put_bits(slot, at + left + kLanes * lane, high_word);
  return escapes;
}

constexpr uint32_t kNoRoom = ~0u;

// The second part of `left` listed exponents to slot + at. Returns its end in the slot, or kNoRoom if that would not be before `limit`.
template <typename Code>
ZIPCCL_DEVICE uint32_t encode_tiers(uint8_t* list, uint32_t left, uint32_t top, uint8_t* slot, uint32_t at, uint32_t limit) {
  // All lanes see the zeros before the first bits are written.
  for (uint32_t i = at + lane_id(); i < least(at + (6 * left + 7) / 8, limit); i += kLanes) slot[i] = 0;
  uint32_t end = 8 * at, count;
  if ((end + 2 * left + 7) / 8 >= limit) return kNoRoom;
  count = left, left = encode_tier<Code, 1>(list, left, top, slot, end), end += 2 * count;
  if ((end + 2 * left + 7) / 8 >= limit) return kNoRoom;
  count = left, left = encode_tier<Code, 2>(list, left, top, slot, end), end += 2 * count;
  if ((end + 2 * left + 7) / 8 >= limit) return kNoRoom;
  count = left, left = encode_tier<Code, 3>(list, left, top, slot, end), end += 2 * count;
  const uint32_t bytes = (end + 7) / 8;
  if (bytes + left >= limit) return kNoRoom;
  __syncwarp();  // bits of other lanes are in the first byte's word
  for (uint32_t i = lane_id(); i < left; i += kLanes) slot[bytes + i] = list[i];
  return bytes + left;
}

// The window's top (FORMAT.md section 3).
ZIPCCL_DEVICE uint32_t window_top(uint32_t exponent_sum, uint32_t largest, uint32_t count, uint32_t bias) {
  const uint32_t some = count ? count : 1;
  return least((8 * exponent_sum + bias * count) / (8 * some), largest);
}

// A block whose zeros are left out (FORMAT.md 2.2): its tail to `slot`. Returns the tail's bytes, or kNoRoom.
template <typename F>
ZIPCCL_DEVICE uint32_t encode_sparse(const Stored<F>& words, uint32_t zeros, uint32_t top, uint32_t trim, uint8_t* slot, uint32_t limit,
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
  for (uint32_t byte = 0; byte < r / 8; ++byte) list_marked<Part>(part(byte), keep, slot + first + byte * m);
  if (r % 8) {
    list_marked<Part>(part(r / 8), keep, list);
    for (uint32_t row = 0; row < kRows; ++row) {
      const uint32_t length = Part{m}.length(row);
      if (length) put_planes(listed(row), r % 8, row, m, length, slot + first + r / 8 * m);
    }
    __syncwarp();
  }
  list_marked<Part>([&](uint32_t row) { return words.octet(row).exponents(); }, keep, list);
  const uint32_t escapes = encode_tier1<Cascade>(listed, Part{m}, top, slot + tier1);
  const uint32_t left = list_marked<Part>(listed, escapes, list);
  return encode_tiers<Cascade>(list, left, top, slot, second, limit);
}

constexpr uint32_t kLater = CHANGE + 1;  // no mode: the code for whole blocks leaves the block to the code for partial blocks

// Returns a block's form; writes its body and tail to `slot`. n is at least one. Zeros and equal words are rare and need registers: the
// code for partial blocks takes them.
template <typename F, typename Code, typename Extent>
ZIPCCL_DEVICE Form encode_block(const typename F::Word* from, Extent extent, uint8_t* slot, uint8_t* list) {
  using Word = typename F::Word;
  const uint32_t n = extent.n, raw = body_bytes<F>(RAW, n, 0);
  const Form as_raw = {RAW, 0, 0, raw, 0};
  const Word head = Extent::whole ? Word(0) : from[0];
  const typename WordsOf<F, Extent>::Type words{from, extent, head};
  const auto exponents = [&](uint32_t row) { return words.octet(row).exponents(); };

  Survey all = {kEveryLane, 0, 0, 0};
#pragma unroll Extent::unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    words.octet(row).survey(all);
    const Bytes8 e = exponents(row);
    all.exponent_sum = __dp4a(e.half[1], kEachByte, __dp4a(e.half[0], kEachByte, all.exponent_sum));
  }
  const uint32_t smallest = __reduce_min_sync(kEveryLane, Octet<F>::smallest_of(all.smallest));
  const uint32_t largest = __reduce_max_sync(kEveryLane, Octet<F>::largest_of(all.largest));
  const uint32_t sum = __reduce_add_sync(kEveryLane, all.exponent_sum) - (kMaxBlock - n) * uint32_t(F::exponent(head));

  uint32_t zeros = 0, zero_count = 0;
  if constexpr (Extent::whole) {
    if (smallest == 0 || smallest == largest) return {kLater, 0, 0, 0, 0};
  } else {
    if (smallest == largest) {
      bool same = true;
      for (uint32_t row = 0; row < kRows; ++row) {
        const Octet<F> octet = words.octet(row);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) same &= octet.word(i) == head;
      }
      if (__all_sync(kEveryLane, same)) {
        if (lane_id() == 0) *reinterpret_cast<Word*>(slot) = head;
        return {FILL, 0, 0, 0, head ? uint32_t(sizeof(Word)) : 0};
      }
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
  uint32_t escapes = encode_tier1<Code>(exponents, extent, top, tier1);
  if (Code::mode == CASCADE && 8 * __reduce_add_sync(kEveryLane, uint32_t(__popc(escapes))) > 3 * n) {
    mode = WIDE, body = body_bytes<F>(mode, n, trim);
    if (body >= raw) return as_raw;
    top = window_top(sum, largest_exponent, n - zero_count, kFallbackBias);
    escapes = encode_tier1<Wide>(exponents, extent, top, tier1);
  }
  const uint32_t first = first_part_bytes(n, r, mode == WIDE ? Wide::tier[0].bits : Cascade::tier[0].bits);
  if (first + lane_id() < body) slot[first + lane_id()] = 0;
  const uint32_t left = list_marked<Extent>(exponents, escapes, list);
  const uint32_t end = mode == WIDE ? encode_tiers<Wide>(list, left, top, slot, body, raw)
                                    : encode_tiers<Cascade>(list, left, top, slot, body, raw);
  return end == kNoRoom ? as_raw : Form{mode, top, trim, body, end - body};
}

}  // namespace
}  // namespace zipccl
