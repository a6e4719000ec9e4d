// Octets: eight words in a lane's registers, their exponents and the rest as bytes, four to a register.
#pragma once
#include "common/rounding.cuh"
#include "cuda/warp.cuh"

namespace zipccl {
namespace {

// FloatBits' functions for four 16-bit words at a time, which come and go as their low bytes and their high bytes.
template <typename F>
struct Packed {
  static constexpr uint32_t M = F::M;
  static ZIPCCL_DEVICE uint32_t exponents(uint32_t low, uint32_t high) {
    if constexpr (M < 8) {
      return blend((256 - (1u << (8 - M))) * kEachByte, high << (8 - M), low >> M);
    } else {
      return high >> (M - 8) & F::exponent_mask * kEachByte;
    }
  }
  // Byte `byte` of the sign and mantissa.
  static ZIPCCL_DEVICE uint32_t part(uint32_t low, uint32_t high, uint32_t byte) {
    if constexpr (M < 8) {
      static_assert(M == 7, "a byte");
      return blend(0x7f7f7f7fu, low, high);
    } else {
      return byte == 0 ? low : (high & ((1u << (M - 8)) - 1) * kEachByte) | (high >> (15 - M) & (1u << (M - 8)) * kEachByte);
    }
  }
  static ZIPCCL_DEVICE uint32_t join_low(uint32_t part0, uint32_t e) {
    return M < 8 ? blend(((1u << M) - 1) * kEachByte, part0, e << M) : part0;
  }
  static ZIPCCL_DEVICE uint32_t join_high(uint32_t part0, uint32_t part1, uint32_t e) {
    if constexpr (M < 8) {
      return blend(0x80808080u, part0, e >> (8 - M));
    } else {
      const uint32_t mantissa = ((1u << (M - 8)) - 1) * kEachByte;
      return (part1 & mantissa) | (e << (M - 8) & 0x7f7f7f7fu & ~mantissa) | (part1 << (15 - M) & 0x80808080u);
    }
  }
};
// Two 16-bit words at a time, in a register: their signs and mantissas, more than a byte each, after a trim, and back.
template <typename F>
struct PackedTrim {
  static constexpr uint32_t each = 0x00010001u, sign = each << (F::E + F::M), mantissa = each * ((1u << F::M) - 1);
  static ZIPCCL_DEVICE uint32_t part(uint32_t two, uint32_t trim) {
    return ((two & sign) >> F::E | (two & mantissa)) >> trim & each * (0xffffu >> trim);
  }
  static ZIPCCL_DEVICE uint32_t join(uint32_t part, uint32_t e, uint32_t trim) {
    const uint32_t both = part << trim;  // the parts have no bits that pass the sign
    return (both << F::E & sign) | (both & mantissa) | e << F::M;
  }
};

// Statistics of the words of a block for an encoder (FORMAT.md section 3).
struct Survey {
  uint32_t smallest, largest;  // magnitudes, of one or two words each
  uint32_t exponent_sum;
  uint32_t any;  // all words or'ed
};

template <typename F, typename Word = typename F::Word>
struct Octet;

// What octets of all words have; an octet hides what it does faster.
template <typename F>
struct AnyOctet {
  using Word = typename F::Word;
  static constexpr uint32_t kBytes = 8 * sizeof(Word), kAligned = kBytes < 16 ? kBytes : 16;
  ZIPCCL_DEVICE Octet<F>& own() { return static_cast<Octet<F>&>(*this); }
  ZIPCCL_DEVICE const Octet<F>& own() const { return static_cast<const Octet<F>&>(*this); }

  // A bit for each word that is not the other octet's.
  ZIPCCL_DEVICE uint32_t differing(const Octet<F>& other) const {
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      if (own().word(i) != other.word(i)) bits |= 1u << i;
    return bits;
  }
  ZIPCCL_DEVICE void survey(Survey& all) const {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      const uint32_t magnitude = own().word(i) & Word(~F::negative_zero);
      all.smallest = least(all.smallest, magnitude);
      all.largest = magnitude > all.largest ? magnitude : all.largest;
    }
  }
  // The magnitude in a number of a survey.
  static ZIPCCL_DEVICE uint32_t smallest_of(uint32_t one) { return one; }
  static ZIPCCL_DEVICE uint32_t largest_of(uint32_t one) { return one; }

  // The first `length` words from and to any address of a word; `pad` stands for the others.
  ZIPCCL_DEVICE void load(const Word* from, uint32_t length, Word pad) {
    if (length == 8) {
      if (reinterpret_cast<uintptr_t>(from) % kAligned) return own().load_shifted(from);
      return own().load_whole(reinterpret_cast<const uint8_t*>(from));
    }
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) own().set(i, i < length ? from[i] : pad);
  }
  ZIPCCL_DEVICE void store(Word* to, uint32_t length) const {
    if (length == 8 && reinterpret_cast<uintptr_t>(to) % kAligned == 0) return own().store_whole(reinterpret_cast<uint8_t*>(to), kBytes);
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      if (i < length) to[i] = own().word(i);
  }
};

template <typename F>
struct Octet<F, uint16_t> : AnyOctet<F> {
  uint32_t pair[4];

  ZIPCCL_DEVICE uint16_t word(uint32_t i) const { return uint16_t(pair[i / 2] >> 16 * (i % 2)); }
  ZIPCCL_DEVICE void set(uint32_t i, uint16_t w) {
    pair[i / 2] = i % 2 ? (pair[i / 2] & 0xffffu) | uint32_t(w) << 16 : (pair[i / 2] & 0xffff0000u) | w;
  }
  ZIPCCL_DEVICE uint32_t differing(const Octet& other) const {
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      const uint32_t x = pair[i] ^ other.pair[i];
      if (x & 0xffffu) bits |= 1u << 2 * i;
      if (x >> 16) bits |= 2u << 2 * i;
    }
    return bits;
  }
  ZIPCCL_DEVICE Bytes8 lows() const { return {{__byte_perm(pair[0], pair[1], 0x6420), __byte_perm(pair[2], pair[3], 0x6420)}}; }
  ZIPCCL_DEVICE Bytes8 highs() const { return {{__byte_perm(pair[0], pair[1], 0x7531), __byte_perm(pair[2], pair[3], 0x7531)}}; }
  ZIPCCL_DEVICE Bytes8 exponents() const {
    if constexpr (F::E == 8)  // shifted, a word's upper byte is its exponent
      return {{__byte_perm(pair[0] << 1, pair[1] << 1, 0x7531), __byte_perm(pair[2] << 1, pair[3] << 1, 0x7531)}};
    const Bytes8 low = lows(), high = highs();
    return {{Packed<F>::exponents(low.half[0], high.half[0]), Packed<F>::exponents(low.half[1], high.half[1])}};
  }
  ZIPCCL_DEVICE Bytes8 part(uint32_t byte, uint32_t trim) const {
    if constexpr (F::has_trim && F::M >= 8) {
      Octet rest;
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) rest.pair[i] = PackedTrim<F>::part(pair[i], trim);
      return byte ? rest.highs() : rest.lows();
    }
    const Bytes8 low = lows(), high = highs();
    const Bytes8 all = {{Packed<F>::part(low.half[0], high.half[0], byte), Packed<F>::part(low.half[1], high.half[1], byte)}};
    if constexpr (!F::has_trim) return all;
    const uint32_t kept = (0xffu >> trim) * kEachByte;
    return {{all.half[0] >> trim & kept, all.half[1] >> trim & kept}};
  }
  ZIPCCL_DEVICE void join(const Bytes8* parts, const Bytes8& e, uint32_t trim) {
#pragma unroll
    for (uint32_t half = 0; half < 2; ++half) {
      if constexpr (F::has_trim && F::M >= 8) {
        const uint32_t low = parts[0].half[half], high = parts[1].half[half];
        pair[2 * half] = PackedTrim<F>::join(__byte_perm(low, high, 0x5140), __byte_perm(e.half[half], 0, 0x4140), trim);
        pair[2 * half + 1] = PackedTrim<F>::join(__byte_perm(low, high, 0x7362), __byte_perm(e.half[half], 0, 0x4342), trim);
        continue;
      }
      const uint32_t part0 = parts[0].half[half] << (F::has_trim ? trim : 0);  // no byte has bits that pass into the next
      const uint32_t low = Packed<F>::join_low(part0, e.half[half]);
      const uint32_t high = Packed<F>::join_high(part0, parts[1].half[half], e.half[half]);
      pair[2 * half] = __byte_perm(low, high, 0x5140);
      pair[2 * half + 1] = __byte_perm(low, high, 0x7362);
    }
  }
  ZIPCCL_DEVICE void survey(Survey& all) const {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) {
      // Shifted, words have no sign; the lowest bit, which may be that of the neighbour, decides only between equal magnitudes.
      all.smallest = __vminu2(all.smallest, pair[i] << 1);
      all.largest = __vmaxu2(all.largest, pair[i] << 1);
    }
  }
  ZIPCCL_DEVICE uint32_t any() const {
    const uint32_t two = pair[0] | pair[1] | pair[2] | pair[3];
    return two | two >> 16;
  }
  template <typename Change>
  ZIPCCL_DEVICE void change(Change change) {
#pragma unroll
    for (uint32_t i = 0; i < 4; ++i) pair[i] = change(pair[i]);
  }
  static ZIPCCL_DEVICE uint32_t smallest_of(uint32_t two) { return least(two & 0xffffu, two >> 16) >> 1; }
  static ZIPCCL_DEVICE uint32_t largest_of(uint32_t two) { return (two >> 16 > (two & 0xffffu) ? two >> 16 : two & 0xffffu) >> 1; }

  ZIPCCL_DEVICE void load_whole(const uint8_t* from) {  // a multiple of the octet's bytes, at most 16
    const uint4 x = *reinterpret_cast<const uint4*>(from);
    pair[0] = x.x, pair[1] = x.y, pair[2] = x.z, pair[3] = x.w;
  }
  ZIPCCL_DEVICE void store_whole(uint8_t* to, uint32_t bytes) const {  // the first `bytes` bytes, a multiple of 16
    if (bytes) *reinterpret_cast<uint4*>(to) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
  }

  // All eight words from any address of a word, by whole words of memory where these hold no other bytes.
  ZIPCCL_DEVICE void load_shifted(const uint16_t* from) {
    if (reinterpret_cast<uintptr_t>(from) % 4 == 0) {
#pragma unroll
      for (uint32_t i = 0; i < 4; ++i) pair[i] = reinterpret_cast<const uint32_t*>(from)[i];
    } else {
      const uint32_t* const middle = reinterpret_cast<const uint32_t*>(from + 1);
      const uint32_t a = middle[0], b = middle[1], c = middle[2];
      pair[0] = from[0] | a << 16, pair[1] = __funnelshift_r(a, b, 16), pair[2] = __funnelshift_r(b, c, 16);
      pair[3] = c >> 16 | uint32_t(from[7]) << 16;
    }
  }
};

template <typename F>
struct Octet<F, uint32_t> : AnyOctet<F> {
  uint32_t w[8];

  ZIPCCL_DEVICE uint32_t word(uint32_t i) const { return w[i]; }
  ZIPCCL_DEVICE void set(uint32_t i, uint32_t word) { w[i] = word; }
  ZIPCCL_DEVICE Bytes8 exponents() const {
    return {{pack4(F::exponent(w[0]), F::exponent(w[1]), F::exponent(w[2]), F::exponent(w[3])),
             pack4(F::exponent(w[4]), F::exponent(w[5]), F::exponent(w[6]), F::exponent(w[7]))}};
  }
  ZIPCCL_DEVICE Bytes8 part(uint32_t byte, uint32_t trim) const {
    const uint32_t shift = trim + 8 * byte;
    uint32_t v[8];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) v[i] = F::sign_mantissa(w[i]) >> shift;
    return {{pack4(v[0], v[1], v[2], v[3]), pack4(v[4], v[5], v[6], v[7])}};
  }
  ZIPCCL_DEVICE void join(const Bytes8* parts, const Bytes8& e, uint32_t trim) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      w[i] = F::join((parts[0].byte(i) | parts[1].byte(i) << 8 | parts[2].byte(i) << 16) << trim, e.byte(i));
  }
  ZIPCCL_DEVICE uint32_t any() const {
    uint32_t bits = 0;
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) bits |= w[i];
    return bits;
  }
  template <typename Change>
  ZIPCCL_DEVICE void change(Change change) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) w[i] = change(w[i]);
  }

  ZIPCCL_DEVICE void load_whole(const uint8_t* from) {
    const uint4 x = reinterpret_cast<const uint4*>(from)[0], y = reinterpret_cast<const uint4*>(from)[1];
    w[0] = x.x, w[1] = x.y, w[2] = x.z, w[3] = x.w, w[4] = y.x, w[5] = y.y, w[6] = y.z, w[7] = y.w;
  }
  ZIPCCL_DEVICE void store_whole(uint8_t* to, uint32_t bytes) const {
    if (bytes) reinterpret_cast<uint4*>(to)[0] = make_uint4(w[0], w[1], w[2], w[3]);
    if (bytes > 16) reinterpret_cast<uint4*>(to)[1] = make_uint4(w[4], w[5], w[6], w[7]);
  }

  // All eight words from any address of a word.
  ZIPCCL_DEVICE void load_shifted(const uint32_t* from) {
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) w[i] = from[i];
  }
};

template <typename F>
struct Octet<F, uint8_t> : AnyOctet<F> {
  static constexpr uint32_t kSign = 0x80808080u, kMantissa = ((1u << F::M) - 1) * kEachByte;
  uint32_t quad[2];

  ZIPCCL_DEVICE uint8_t word(uint32_t i) const { return uint8_t(quad[i / 4] >> 8 * (i % 4)); }
  ZIPCCL_DEVICE void set(uint32_t i, uint8_t w) {
    quad[i / 4] = (quad[i / 4] & ~(255u << 8 * (i % 4))) | uint32_t(w) << 8 * (i % 4);
  }
  ZIPCCL_DEVICE Bytes8 exponents() const {
    return {{quad[0] >> F::M & F::exponent_mask * kEachByte, quad[1] >> F::M & F::exponent_mask * kEachByte}};
  }
  ZIPCCL_DEVICE Bytes8 part(uint32_t, uint32_t) const {
    return {{((quad[0] & kSign) >> F::E) | (quad[0] & kMantissa), ((quad[1] & kSign) >> F::E) | (quad[1] & kMantissa)}};
  }
  ZIPCCL_DEVICE void join(const Bytes8* parts, const Bytes8& e, uint32_t) {
#pragma unroll
    for (uint32_t i = 0; i < 2; ++i)
      quad[i] = (parts[0].half[i] << F::E & kSign) | (e.half[i] << F::M & ~kSign & ~kMantissa) | (parts[0].half[i] & kMantissa);
  }

  ZIPCCL_DEVICE void load_whole(const uint8_t* from) {
    const uint2 x = *reinterpret_cast<const uint2*>(from);
    quad[0] = x.x, quad[1] = x.y;
  }
  ZIPCCL_DEVICE void store_whole(uint8_t* to, uint32_t bytes) const {
    if (bytes) *reinterpret_cast<uint2*>(to) = make_uint2(quad[0], quad[1]);
  }

  // All eight words from any address, by whole words of memory where these hold no other bytes.
  ZIPCCL_DEVICE void load_shifted(const uint8_t* from) {
    const uint32_t phase = uint32_t(reinterpret_cast<uintptr_t>(from)) & 3, head = (0 - phase) & 3;  // bytes before the first whole word
    const uint32_t* const middle = reinterpret_cast<const uint32_t*>(from + head);
    if (head == 0) {
      quad[0] = middle[0], quad[1] = middle[1];
      return;
    }
    uint32_t before = 0, after = 0;  // one to three bytes each, at the ends of their words
    for (uint32_t i = 0; i < head; ++i) before |= uint32_t(from[i]) << 8 * (phase + i);
    for (uint32_t i = 0; i < phase; ++i) after |= uint32_t(from[head + 4 + i]) << 8 * i;
    quad[0] = __funnelshift_r(before, middle[0], 8 * phase), quad[1] = __funnelshift_r(middle[0], after, 8 * phase);
  }
};

// The values of an encoder's words: as they are, or rounded. usual() is octet() where the largest exponent is_usual().
struct AsTheyAre {
  template <typename F>
  ZIPCCL_DEVICE void octet(Octet<F>&) const {}
  template <typename F>
  ZIPCCL_DEVICE void usual(Octet<F>&) const {}
  ZIPCCL_DEVICE bool is_usual(uint32_t) const { return true; }
  template <typename Word>
  ZIPCCL_DEVICE Word word(Word word) const { return word; }
};
template <typename F>
struct Rounded {
  Rounding<F, uint32_t> rounding;  // of one or two words
  ZIPCCL_DEVICE explicit Rounded(uint32_t kept) : rounding(kept) {}
  ZIPCCL_DEVICE void octet(Octet<F>& octet) const { octet.change(rounding); }
  ZIPCCL_DEVICE void usual(Octet<F>& octet) const {
    octet.change([this](uint32_t words) { return rounding.nearest(words); });
  }
  ZIPCCL_DEVICE bool is_usual(uint32_t exponent) const { return exponent + 1 < F::exponent_mask; }
  ZIPCCL_DEVICE typename F::Word word(typename F::Word word) const { return typename F::Word(rounding(uint32_t(word))); }
};

// The words of a whole block, in registers.
template <typename F, typename Grid>
struct Rows {
  Octet<F> octets[kRows];
  ZIPCCL_DEVICE Rows(const typename F::Word* words, Whole, typename F::Word, const Grid&) {
    const typename F::Word* const own = words + 8 * lane_id();
    if (reinterpret_cast<uintptr_t>(words) % 16 == 0) {
#pragma unroll
      for (uint32_t row = 0; row < kRows; ++row) octets[row].load_whole(reinterpret_cast<const uint8_t*>(own + row * kRow));
    } else {
#pragma unroll
      for (uint32_t row = 0; row < kRows; ++row) octets[row].load_shifted(own + row * kRow);
    }
  }
  // Gives a row its values, if they are usual.
  ZIPCCL_DEVICE void settle(uint32_t row, const Grid& grid) { grid.usual(octets[row]); }
  ZIPCCL_DEVICE const Octet<F>& octet(uint32_t row) const { return octets[row]; }
};

// The words of a part of a block, in memory: read where they are asked for. `pad` stands where a row has no more.
template <typename F, typename Grid>
struct Stored {
  const typename F::Word* words;
  Part extent;
  typename F::Word pad;
  Grid grid;
  ZIPCCL_DEVICE void settle(uint32_t, const Grid&) const {}
  ZIPCCL_DEVICE Octet<F> octet(uint32_t row) const {
    Octet<F> octet;
    octet.load(words + row * kRow + 8 * lane_id(), extent.length(row), pad);
    grid.octet(octet);
    return octet;
  }
};

template <typename F, typename Extent, typename Grid>
struct WordsOf {
  using Type = Stored<F, Grid>;
};
template <typename F, typename Grid>
struct WordsOf<F, Whole, Grid> {
  using Type = Rows<F, Grid>;
};

}  // namespace
}  // namespace zipccl
