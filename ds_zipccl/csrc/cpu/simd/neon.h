// The steps of 64 elements in NEON, in registers of 16 bytes. cpu/simd/scalar.h says the meaning of each.
#pragma once
#include <arm_neon.h>

#include "common/bits.h"
#include "common/byte_planes.h"
#include "common/exponent_block.cuh"
#include "cpu/delta/list_steps.h"
#include "cpu/simd/shuffles.h"

namespace zipccl {
namespace {

struct NeonLanes : ListSteps {
  // Four registers; no loops over them, because compilers unroll loops too late to keep an array in registers.
  struct Bytes {
    uint8x16_t v[4];
    template <typename Each>
    static Bytes make(Each each) {
      return {{each(0), each(1), each(2), each(3)}};
    }
    static Bytes zero() { return {}; }
    Bytes operator>>(uint32_t count) const {
      return make([&](uint32_t i) { return v[i] >> uint8_t(count); });
    }
    Bytes operator<<(uint32_t count) const {
      return make([&](uint32_t i) { return v[i] << uint8_t(count); });
    }
    Bytes operator&(uint8_t mask) const {
      return make([&](uint32_t i) { return v[i] & mask; });
    }
    Bytes operator|(const Bytes& other) const {
      return make([&](uint32_t i) { return v[i] | other.v[i]; });
    }
  };
  template <typename W>
  using Vec = BytePlanes<W, Bytes>;

  static Bytes load(const uint8_t* from) {
    return Bytes::make([&](uint32_t i) { return vld1q_u8(from + 16 * i); });
  }
  template <typename Step>
  static void each_quarter(Step step) {
    step(0), step(1), step(2), step(3);
  }
  static void store(uint8_t* to, const Bytes& x) {
    each_quarter([&](uint32_t i) { vst1q_u8(to + 16 * i, x.v[i]); });
  }
  template <typename W>
  static Vec<W> load_words(const uint8_t* from) {
    Vec<W> out;
    const auto enter = [&](const auto& loaded, uint32_t i) {
      for (uint32_t p = 0; p < sizeof(W); ++p) out.plane[p].v[i] = loaded.val[p];
    };
    each_quarter([&](uint32_t i) {
      if constexpr (sizeof(W) == 1) out.plane[0].v[i] = vld1q_u8(from + 16 * i);
      if constexpr (sizeof(W) == 2) enter(vld2q_u8(from + 32 * i), i);
      if constexpr (sizeof(W) == 4) enter(vld4q_u8(from + 64 * i), i);
    });
    return out;
  }
  template <typename W>
  static void store_words(uint8_t* to, const Vec<W>& x) {
    each_quarter([&](uint32_t i) {
      const auto part = [&](uint32_t p) { return x.plane[p].v[i]; };
      if constexpr (sizeof(W) == 1) vst1q_u8(to + 16 * i, part(0));
      if constexpr (sizeof(W) == 2) vst2q_u8(to + 32 * i, (uint8x16x2_t{{part(0), part(1)}}));
      if constexpr (sizeof(W) == 4) vst4q_u8(to + 64 * i, (uint8x16x4_t{{part(0), part(1), part(2), part(3)}}));
    });
  }
  template <typename W>
  static void stream_words(uint8_t* to, const Vec<W>& x) {  // interleaving stores have no form that passes the cache
    store_words<W>(to, x);
  }
  template <typename W>
  static Bytes narrow(const Vec<W>& x) {
    return x.plane[0];
  }
  template <typename W>
  static Vec<W> widen(const Bytes& x) {
    Vec<W> out = {};
    out.plane[0] = x;
    return out;
  }

  struct Census {
    uint8x16_t least = vdupq_n_u8(255), largest = vdupq_n_u8(0);
    uint16x8_t sum = vdupq_n_u16(0);  // a step adds at most 8 * 255 to each lane
    void add(const Bytes& x) {
      each_quarter([&](uint32_t i) {
        least = vminq_u8(least, x.v[i]);
        largest = vmaxq_u8(largest, x.v[i]);
        sum = vpadalq_u8(sum, x.v[i]);
      });
    }
    Survey result() const { return {vminvq_u8(least), vmaxvq_u8(largest), vaddlvq_u16(sum)}; }
  };

  static uint8x16_t weights() { return vreinterpretq_u8_u64(vdupq_n_u64(0x8040201008040201ull)); }  // 1 << i % 8 in lane i
  // A bit for each byte, which is 0 or 255.
  static uint64_t mask_of(const Bytes& flags) {
    const auto bits = [&](uint32_t i) { return vandq_u8(flags.v[i], weights()); };
    const uint8x16_t fours = vpaddq_u8(vpaddq_u8(bits(0), bits(1)), vpaddq_u8(bits(2), bits(3)));
    return vgetq_lane_u64(vreinterpretq_u64_u8(vpaddq_u8(fours, fours)), 0);
  }
  // Bytes 2i and 2i + 1 of eight, each eight times.
  static uint8x16_t repeated(uint64_t eight, uint32_t i) {
    const uint8x16_t places = vcombine_u8(vdup_n_u8(uint8_t(2 * i)), vdup_n_u8(uint8_t(2 * i + 1)));
    return vqtbl1q_u8(vreinterpretq_u8_u64(vdupq_n_u64(eight)), places);
  }
  // The inverse of mask_of.
  static Bytes spread(uint64_t mask) {
    return Bytes::make([&](uint32_t i) { return vtstq_u8(repeated(mask, i), weights()); });
  }
  static uint64_t plane(const Bytes& x, uint32_t bit) {
    return mask_of(Bytes::make([&](uint32_t i) { return vtstq_u8(x.v[i], vdupq_n_u8(uint8_t(1u << bit))); }));
  }
  static Bytes from_planes(const uint64_t* planes, uint32_t count) {
    Bytes out = Bytes::zero();
    for (uint32_t p = 0; p < count; ++p) {
      const Bytes ones = spread(planes[p]);
      out = Bytes::make([&](uint32_t i) { return vbslq_u8(vdupq_n_u8(uint8_t(1u << p)), ones.v[i], out.v[i]); });
    }
    return out;
  }

  template <typename Code, uint32_t kTier>
  static Bytes codes(const Bytes& e, uint32_t top) {
    const Tier& tier = Code::tier[kTier];
    const uint8x16_t table = vld1q_u8(tier.code_of_k), first = vdupq_n_u8(uint8_t(top + kAbove));
    return Bytes::make([&](uint32_t i) {
      const uint8x16_t codes = vqtbl1q_u8(table, vminq_u8(vsubq_u8(first, e.v[i]), vdupq_n_u8(15)));
      if (kTier + 1 < kTiers) return codes;
      const uint8x16_t unnamed = vandq_u8(vceqzq_u8(e.v[i]), vceqq_u8(codes, vdupq_n_u8(uint8_t(tier.escape()))));
      return vbslq_u8(unnamed, vdupq_n_u8(kZeroCode), codes);
    });
  }
  template <typename Code, uint32_t kTier>
  static Bytes exponents(const uint64_t* planes, uint32_t top) {
    const Tier& tier = Code::tier[kTier];
    const Bytes codes = from_planes(planes, tier.bits);
    const uint8x16_t table = vld1q_u8(tier.k_of_code), first = vdupq_n_u8(uint8_t(top + kAbove));
    return Bytes::make([&](uint32_t i) {
      const uint8x16_t e = vsubq_u8(first, vqtbl1q_u8(table, codes.v[i]));
      if (kTier + 1 < kTiers) return e;
      return vbicq_u8(e, vceqq_u8(codes.v[i], vdupq_n_u8(kZeroCode)));
    });
  }

  // For each byte of a mask, as a byte, the ones in the bytes before.
  static uint64_t ones_before(uint64_t mask) {
    return vget_lane_u64(vreinterpret_u64_u8(vcnt_u8(vcreate_u8(mask))), 0) * 0x0101010101010101ull << 8;
  }
  // Entries of bytes 2i and 2i + 1 of a mask; and as places in a register of which each has a half. 128 and more: none.
  static uint8x16_t entries(const uint8_t (&table)[256][8], uint64_t mask, uint32_t i) {
    return vcombine_u8(vld1_u8(table[mask >> 16 * i & 255]), vld1_u8(table[mask >> (16 * i + 8) & 255]));
  }
  static uint8x16_t in_halves(uint8x16_t places) { return vaddq_u8(places, vcombine_u8(vdup_n_u8(0), vdup_n_u8(8))); }
  static void compress(const Bytes& x, uint64_t mask, uint8_t* to) {
    const uint64_t before = ones_before(mask);
    each_quarter([&](uint32_t i) {
      const uint8x16_t packed = vqtbl1q_u8(x.v[i], in_halves(entries(kShuffles.pack, mask, i)));
      vst1_u8(to + (before >> 16 * i & 255), vget_low_u8(packed));
      vst1_u8(to + (before >> (16 * i + 8) & 255), vget_high_u8(packed));
    });
  }
  static Bytes expand(const Bytes& x, uint64_t mask, const uint8_t* from) {
    const uint64_t before = ones_before(mask);
    return Bytes::make([&](uint32_t i) {
      const uint8x8_t low = vld1_u8(from + (before >> 16 * i & 255)), high = vld1_u8(from + (before >> (16 * i + 8) & 255));
      return vqtbx1q_u8(x.v[i], vcombine_u8(low, high), in_halves(entries(kShuffles.unpack, mask, i)));
    });
  }
  static uint64_t above(const Bytes& x, uint8_t limit) {
    return mask_of(Bytes::make([&](uint32_t i) { return vcgtq_u8(x.v[i], vdupq_n_u8(limit)); }));
  }
  // NEON moves no bits by a mask: they go as bytes. Often all of them stay in place.
  static uint64_t gather(uint64_t x, uint64_t mask) {
    if (!~mask) return x;
    const Bytes bits = spread(x);
    const auto packed = [&](uint32_t i) { return vqtbl1q_u8(bits.v[i], in_halves(entries(kShuffles.pack, mask, i))); };
    const uint64_t of_bytes = mask_of(Bytes::make(packed)), before = ones_before(mask);
    uint64_t out = 0;
#pragma GCC unroll 8
    for (uint32_t i = 0; i < 64; i += 8) out |= (of_bytes >> i & 255) << (before >> i & 63);
    return out;
  }
  static uint64_t scatter(uint64_t x, uint64_t mask) {
    if (!~mask) return x;
    const Bytes bits = spread(x);
    const uint8x16x4_t all = {{bits.v[0], bits.v[1], bits.v[2], bits.v[3]}};
    const uint64_t before = ones_before(mask);
    const auto at = [&](uint32_t i) { return vaddq_u8(entries(kShuffles.unpack, mask, i), repeated(before, i)); };
    return mask_of(Bytes::make([&](uint32_t i) { return vqtbl4q_u8(all, at(i)); }));
  }

  static void hash_sums(const uint8_t* data, const uint64_t* keys, const uint64_t* others, uint32_t count, uint64_t* sums) {
    const auto halves = [](const void* from) { return vld2q_u32(static_cast<const uint32_t*>(from)); };  // of four u64: low, high
    uint64x2_t sum[2][2] = {};
    const auto add = [](uint32x4x2_t x, uint32x4x2_t k, uint64x2_t* sums) {
      const uint32x4_t low = vaddq_u32(x.val[0], k.val[0]), high = vaddq_u32(x.val[1], k.val[1]);
      sums[0] = vmlal_u32(sums[0], vget_low_u32(low), vget_low_u32(high));
      sums[1] = vmlal_high_u32(sums[1], low, high);
    };
    for (uint32_t at = 0; at < count; at += 4) {
      const uint32x4x2_t x = halves(data + 8 * at);
      add(x, halves(keys + at), sum[0]);
      add(x, halves(others + at), sum[1]);
    }
    for (uint32_t h = 0; h < 2; ++h) sums[h] = vaddvq_u64(vaddq_u64(sum[h][0], sum[h][1]));
  }

  template <typename W>
  static uint64_t zeros(const Vec<W>& x) {
    Bytes any = x.plane[0];
    for (uint32_t p = 1; p < sizeof(W); ++p) any = any | x.plane[p];
    return mask_of(Bytes::make([&](uint32_t i) { return vceqzq_u8(any.v[i]); }));
  }

  // ---- LIST chunks: cpu/delta/list_steps.h

  template <typename W>
  struct Register {
    typedef W Words __attribute__((vector_size(16)));
    static Words load(const void* from, uint32_t i) { return load_word<Words>(static_cast<const uint8_t*>(from) + 16 * i); }
  };
  // Bits of 64 words by of(place of a register), whose words have all bits where they count, and none elsewhere.
  template <typename W, typename Of>
  static uint64_t masks(Of of) {
    const auto bytes = [&](uint32_t i) { return reinterpret_cast<uint8x16_t>(of(i)); };
    return mask_of(Bytes::make([&](uint32_t i) {
      const auto pair = [&](uint32_t j) { return vuzp1q_u8(bytes(j), bytes(j + 1)); };
      if constexpr (sizeof(W) == 1) return bytes(i);
      if constexpr (sizeof(W) == 2) return pair(2 * i);
      if constexpr (sizeof(W) == 4) return vuzp1q_u8(pair(4 * i), pair(4 * i + 2));
    }));
  }
  template <typename W>
  static uint64_t differing(const uint8_t* words, const uint8_t* base) {
    return masks<W>([&](uint32_t i) { return Register<W>::load(words, i) != Register<W>::load(base, i); });
  }
  template <typename W>
  static uint64_t without(const uint8_t* words, W mask) {
    return masks<W>([&](uint32_t i) { return (Register<W>::load(words, i) & mask) == 0; });
  }
  template <typename W>
  static uint64_t at_least(const W* words, W least) {
    return masks<W>([&](uint32_t i) { return Register<W>::load(words, i) >= least; });
  }
};

}  // namespace
}  // namespace zipccl
