// The steps of 64 elements in portable C++, which the other levels must equal.
#pragma once
#include "common/bits.h"
#include "common/exponent_block.cuh"
#include "cpu/delta/list_steps.h"

namespace zipccl {
namespace {

struct ScalarLanes : ListSteps {
  // 64 words; shifts and masks apply to each.
  template <typename W>
  struct Vec {
    W w[64];
    Vec operator>>(uint32_t count) const { return map([=](W x) { return W(x >> count); }); }
    Vec operator<<(uint32_t count) const { return map([=](W x) { return W(x << count); }); }
    Vec operator&(W mask) const { return map([=](W x) { return W(x & mask); }); }
    Vec operator|(const Vec& other) const {
      Vec out;
      for (uint32_t i = 0; i < 64; ++i) out.w[i] = w[i] | other.w[i];
      return out;
    }
    template <typename Each>
    Vec map(Each each) const {
      Vec out;
      for (uint32_t i = 0; i < 64; ++i) out.w[i] = each(w[i]);
      return out;
    }
  };
  using Bytes = Vec<uint8_t>;

  static Bytes load(const uint8_t* from) { return load_words<uint8_t>(from); }
  static void store(uint8_t* to, const Bytes& x) { store_words(to, x); }
  template <typename W>
  static Vec<W> load_words(const uint8_t* from) {
    Vec<W> x;
    memcpy(&x, from, sizeof x);
    return x;
  }
  template <typename W>
  static void store_words(uint8_t* to, const Vec<W>& x) {
    memcpy(to, &x, sizeof x);
  }
  // As store_words, past the cache where the level can; `to` is a multiple of 64.
  template <typename W>
  static void stream_words(uint8_t* to, const Vec<W>& x) {
    store_words(to, x);
  }
  // The low byte of each word; and bytes as words.
  template <typename W>
  static Bytes narrow(const Vec<W>& x) {
    Bytes out;
    for (uint32_t i = 0; i < 64; ++i) out.w[i] = uint8_t(x.w[i]);
    return out;
  }
  template <typename W>
  static Vec<W> widen(const Bytes& x) {
    Vec<W> out;
    for (uint32_t i = 0; i < 64; ++i) out.w[i] = x.w[i];
    return out;
  }

  // Surveys at most 16 groups of bytes.
  struct Census {
    Survey all = {255, 0, 0};
    void add(const Bytes& x) {
      for (uint32_t i = 0; i < 64; ++i) {
        const uint32_t e = x.w[i];
        all.least = e < all.least ? e : all.least;
        all.largest = e > all.largest ? e : all.largest;
        all.sum += e;
      }
    }
    Survey result() const { return all; }
  };

  // Bit `bit` of each byte as a plane: the low bits of eight bytes come together in the top byte of a product.
  static uint64_t plane(const Bytes& x, uint32_t bit) {
    uint64_t plane = 0;
    for (uint32_t i = 0; i < 8; ++i) {
      const uint64_t eight = load_word<uint64_t>(x.w + 8 * i) >> bit & 0x0101010101010101ull;
      plane |= (eight * 0x0102040810204080ull >> 56) << 8 * i;
    }
    return plane;
  }
  // The inverse for `count` planes: bit p of byte i is bit i of planes[p].
  static Bytes from_planes(const uint64_t* planes, uint32_t count) {
    Bytes out;
    for (uint32_t i = 0; i < 8; ++i) {
      uint64_t eight = 0;
      for (uint32_t p = 0; p < count; ++p) {
        const uint64_t picked = (planes[p] >> 8 * i & 0xff) * 0x0101010101010101ull & 0x8040201008040201ull;
        eight |= ((picked + 0x7f7f7f7f7f7f7f7full) >> 7 & 0x0101010101010101ull) << p;
      }
      memcpy(out.w + 8 * i, &eight, 8);
    }
    return out;
  }

  // Codes of exponents in a tier.
  template <typename Code, uint32_t kTier>
  static Bytes codes(const Bytes& exponent, uint32_t top) {
    constexpr Tier tier = Code::tier[kTier];
    return exponent.map([=](uint8_t e) {
      const uint8_t k = uint8_t(top + kAbove - e), code = tier.code_of_k[k < 15 ? k : 15];
      return kTier + 1 == kTiers && !e && code == tier.escape() ? uint8_t(kZeroCode) : code;
    });
  }
  // Exponents from the planes of their codes in a tier; those that escape come out undefined.
  template <typename Code, uint32_t kTier>
  static Bytes exponents(const uint64_t* planes, uint32_t top) {
    constexpr Tier tier = Code::tier[kTier];
    return from_planes(planes, tier.bits).map([=](uint8_t code) {
      return kTier + 1 == kTiers && code == kZeroCode ? uint8_t(0) : uint8_t(top + kAbove - tier.k_of_code[code]);
    });
  }

  // Writes the bytes at the ones of mask to `to`, close together; all 64 bytes there may change.
  static void compress(const Bytes& x, uint64_t mask, uint8_t* to) {
    for (; mask; mask &= mask - 1) *to++ = x.w[__builtin_ctzll(mask)];
  }
  // The inverse: the next bytes of `from` (64 are readable) at the ones of mask, x elsewhere.
  static Bytes expand(Bytes x, uint64_t mask, const uint8_t* from) {
    for (; mask; mask &= mask - 1) x.w[__builtin_ctzll(mask)] = *from++;
    return x;
  }
  // Which bytes, all below 128, are above `limit`.
  static uint64_t above(const Bytes& x, uint8_t limit) {
    return plane(x.map([=](uint8_t byte) { return uint8_t(byte > limit); }), 0);
  }
  // The bits of x at the ones of mask, close together; and the inverse, for as many low bits of x as mask has ones.
  static uint64_t gather(uint64_t x, uint64_t mask) {
    uint64_t out = 0;
    for (uint32_t i = 0; mask; mask &= mask - 1, ++i) out |= (x >> __builtin_ctzll(mask) & 1) << i;
    return out;
  }
  static uint64_t scatter(uint64_t x, uint64_t mask) {
    uint64_t out = 0;
    for (; mask; mask &= mask - 1, x >>= 1) out |= (mask & (0 - mask)) & (0 - (x & 1));
    return out;
  }
  // Sums of the products of the halves of `count` u64 (a multiple of 16) after adding keys to them, once for each set of keys.
  static void hash_sums(const uint8_t* data, const uint64_t* keys, const uint64_t* others, uint32_t count, uint64_t* sums) {
    sums[0] = sums[1] = 0;
    for (uint32_t i = 0; i < count; ++i) {
      const uint64_t x = load_word<uint64_t>(data + 8 * i), k = keys[i], other = others[i];
      sums[0] += uint64_t(uint32_t(x + k)) * uint32_t((x >> 32) + (k >> 32));
      sums[1] += uint64_t(uint32_t(x + other)) * uint32_t((x >> 32) + (other >> 32));
    }
  }
  // Which words are zero.
  template <typename W>
  static uint64_t zeros(const Vec<W>& x) {
    return plane(narrow(x.map([](W w) { return W(w == 0); })), 0);
  }
};

}  // namespace
}  // namespace zipccl
