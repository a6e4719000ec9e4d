// The steps of 64 elements in AVX2, in vectors of 32 bytes. cpu/simd/scalar.h says the meaning of each.
#pragma once
#include <immintrin.h>

#include "common/bits.h"
#include "common/byte_planes.h"
#include "common/exponent_block.cuh"
#include "cpu/delta/list_steps.h"
#include "cpu/simd/shuffles.h"

namespace zipccl {
namespace {

struct Avx2Lanes : ListSteps {
  struct Bytes {
    using Register = uint8_t __attribute__((vector_size(32)));
    Register v[2];
    __m256i half(uint32_t i) const { return reinterpret_cast<__m256i>(v[i]); }
    template <typename Each>
    static Bytes make(Each each) {
      Bytes out;
      out.v[0] = reinterpret_cast<Register>(each(0));
      out.v[1] = reinterpret_cast<Register>(each(1));
      return out;
    }
    static Bytes zero() { return {}; }
    Bytes operator>>(uint32_t count) const { return {{v[0] >> uint8_t(count), v[1] >> uint8_t(count)}}; }
    Bytes operator<<(uint32_t count) const { return {{v[0] << uint8_t(count), v[1] << uint8_t(count)}}; }
    Bytes operator&(uint8_t mask) const { return {{v[0] & mask, v[1] & mask}}; }
    Bytes operator|(const Bytes& other) const { return {{v[0] | other.v[0], v[1] | other.v[1]}}; }
  };
  template <typename W>
  using Vec = BytePlanes<W, Bytes>;

  static __m256i load32(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void store32(uint8_t* to, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x); }
  static __m128i load8(const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
  static void store8(uint8_t* to, __m128i x) { _mm_storel_epi64(reinterpret_cast<__m128i*>(to), x); }

  static Bytes load(const uint8_t* from) {
    return Bytes::make([&](uint32_t i) { return load32(from + 32 * i); });
  }
  static void store(uint8_t* to, const Bytes& x) {
    store32(to, x.half(0));
    store32(to + 32, x.half(1));
  }
  // Quarters of a register in the order 0, 2, 1, 3, and back: what vectors of 32 bytes do in halves comes out so.
  static __m256i middle_swapped(__m256i x) { return _mm256_permute4x64_epi64(x, 0xd8); }

  template <typename W>
  static Vec<W> load_words(const uint8_t* from) {
    if constexpr (sizeof(W) == 1) {
      return {{load(from)}};
    } else if constexpr (sizeof(W) == 2) {
      const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
      __m256i low[2], high[2];
      for (uint32_t i = 0; i < 2; ++i) {
        const __m256i a = _mm256_shuffle_epi8(load32(from + 64 * i), order), b = _mm256_shuffle_epi8(load32(from + 64 * i + 32), order);
        low[i] = middle_swapped(_mm256_unpacklo_epi64(a, b));
        high[i] = middle_swapped(_mm256_unpackhi_epi64(a, b));
      }
      return {{Bytes::make([&](uint32_t i) { return low[i]; }), Bytes::make([&](uint32_t i) { return high[i]; })}};
    } else {
      const __m256i order = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
      const __m256i gather = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      __m256i planes[4][2];
      for (uint32_t i = 0; i < 2; ++i) {
        __m256i x[4];  // bytes 0 of four words, bytes 1, 2, 3; in each half
        for (uint32_t j = 0; j < 4; ++j) x[j] = _mm256_shuffle_epi8(load32(from + 128 * i + 32 * j), order);
        const __m256i low0 = _mm256_unpacklo_epi32(x[0], x[1]), low1 = _mm256_unpacklo_epi32(x[2], x[3]);
        const __m256i high0 = _mm256_unpackhi_epi32(x[0], x[1]), high1 = _mm256_unpackhi_epi32(x[2], x[3]);
        planes[0][i] = _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(low0, low1), gather);
        planes[1][i] = _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(low0, low1), gather);
        planes[2][i] = _mm256_permutevar8x32_epi32(_mm256_unpacklo_epi64(high0, high1), gather);
        planes[3][i] = _mm256_permutevar8x32_epi32(_mm256_unpackhi_epi64(high0, high1), gather);
      }
      const auto plane = [&](uint32_t p) { return Bytes::make([&](uint32_t i) { return planes[p][i]; }); };
      return {{plane(0), plane(1), plane(2), plane(3)}};
    }
  }
  // The registers of 64 words, in order, to put(register, its place).
  template <typename W, typename Put>
  static void each_register(const Vec<W>& x, Put put) {
    for (uint32_t i = 0; i < 2; ++i) {
      if constexpr (sizeof(W) == 1) {
        put(x.plane[0].half(i), i);
      } else if constexpr (sizeof(W) == 2) {
        const __m256i low = middle_swapped(x.plane[0].half(i)), high = middle_swapped(x.plane[1].half(i));
        put(_mm256_unpacklo_epi8(low, high), 2 * i);
        put(_mm256_unpackhi_epi8(low, high), 2 * i + 1);
      } else {
        // Dwords so that each half gets the bytes of the words that end up in it.
        const __m256i spread = _mm256_setr_epi32(0, 2, 4, 6, 1, 3, 5, 7);
        __m256i b[4];
        for (uint32_t p = 0; p < 4; ++p) b[p] = _mm256_permutevar8x32_epi32(x.plane[p].half(i), spread);
        const __m256i low0 = _mm256_unpacklo_epi8(b[0], b[1]), low1 = _mm256_unpacklo_epi8(b[2], b[3]);
        const __m256i high0 = _mm256_unpackhi_epi8(b[0], b[1]), high1 = _mm256_unpackhi_epi8(b[2], b[3]);
        put(_mm256_unpacklo_epi16(low0, low1), 4 * i);
        put(_mm256_unpackhi_epi16(low0, low1), 4 * i + 1);
        put(_mm256_unpacklo_epi16(high0, high1), 4 * i + 2);
        put(_mm256_unpackhi_epi16(high0, high1), 4 * i + 3);
      }
    }
  }
  template <typename W>
  static void store_words(uint8_t* to, const Vec<W>& x) {
    each_register(x, [&](__m256i words, uint32_t i) { store32(to + 32 * i, words); });
  }
  template <typename W>
  static void stream_words(uint8_t* to, const Vec<W>& x) {
    each_register(x, [&](__m256i words, uint32_t i) { _mm256_stream_si256(reinterpret_cast<__m256i*>(to + 32 * i), words); });
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
    __m256i least = _mm256_set1_epi8(-1), largest = _mm256_setzero_si256(), sum = _mm256_setzero_si256();
    void add(const Bytes& x) {
      for (uint32_t i = 0; i < 2; ++i) {
        const __m256i part = x.half(i);
        least = _mm256_min_epu8(least, part);
        largest = _mm256_max_epu8(largest, part);
        sum = _mm256_add_epi64(sum, _mm256_sad_epu8(part, _mm256_setzero_si256()));
      }
    }
    static uint32_t lowest(__m256i x) {
      const __m128i half = _mm_min_epu8(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
      const __m128i pairs = _mm_min_epu8(half, _mm_srli_epi16(half, 8));  // a zero above each
      return uint32_t(_mm_cvtsi128_si32(_mm_minpos_epu16(pairs))) & 255;
    }
    Survey result() const {
      const __m128i sums = _mm_add_epi64(_mm256_castsi256_si128(sum), _mm256_extracti128_si256(sum, 1));
      const __m256i all = _mm256_set1_epi8(-1);
      return {lowest(least), 255 - lowest(_mm256_xor_si256(largest, all)), uint32_t(_mm_cvtsi128_si64(sums) + _mm_extract_epi64(sums, 1))};
    }
  };

  static uint64_t top_bits(__m256i low, __m256i high) {
    return uint32_t(_mm256_movemask_epi8(low)) | uint64_t(uint32_t(_mm256_movemask_epi8(high))) << 32;
  }
  static uint64_t plane(const Bytes& x, uint32_t bit) {
    const int up = int(7 - bit);  // to each byte's top bit; what crosses into it from its neighbour stays below
    return top_bits(_mm256_slli_epi16(x.half(0), up), _mm256_slli_epi16(x.half(1), up));
  }
  // Bits 32 half to 32 half + 31 as 32 bytes: -1 for a one.
  static __m256i spread(uint64_t bits, uint32_t half) {
    const __m256i byte = _mm256_add_epi8(_mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303),
                                         _mm256_set1_epi8(char(4 * half)));
    const __m256i bit = _mm256_set1_epi64x(int64_t(0x8040201008040201));
    return _mm256_cmpeq_epi8(_mm256_and_si256(_mm256_shuffle_epi8(_mm256_set1_epi64x(int64_t(bits)), byte), bit), bit);
  }
  static Bytes from_planes(const uint64_t* planes, uint32_t count) {
    return Bytes::make([&](uint32_t half) {
      __m256i sum = _mm256_setzero_si256();
      for (uint32_t p = count; p-- > 0;) sum = _mm256_sub_epi8(_mm256_add_epi8(sum, sum), spread(planes[p], half));
      return sum;
    });
  }
  static __m256i table(const uint8_t* entries) {
    return _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(entries)));
  }

  template <typename Code, uint32_t kTier>
  static Bytes codes(const Bytes& e, uint32_t top) {
    const Tier& tier = Code::tier[kTier];
    const __m256i escape = _mm256_set1_epi8(char(tier.escape()));
    return Bytes::make([&](uint32_t i) {
      const __m256i k = _mm256_min_epu8(_mm256_sub_epi8(_mm256_set1_epi8(char(top + kAbove)), e.half(i)), _mm256_set1_epi8(15));
      const __m256i codes = _mm256_shuffle_epi8(table(tier.code_of_k), k);
      if (kTier + 1 < kTiers) return codes;
      const __m256i zero = _mm256_cmpeq_epi8(e.half(i), _mm256_setzero_si256());
      const __m256i unnamed = _mm256_and_si256(zero, _mm256_cmpeq_epi8(codes, escape));
      return _mm256_blendv_epi8(codes, _mm256_set1_epi8(kZeroCode), unnamed);
    });
  }
  template <typename Code, uint32_t kTier>
  static Bytes exponents(const uint64_t* planes, uint32_t top) {
    const Tier& tier = Code::tier[kTier];
    const Bytes codes = from_planes(planes, tier.bits);
    return Bytes::make([&](uint32_t i) {
      const __m256i e = _mm256_sub_epi8(_mm256_set1_epi8(char(top + kAbove)), _mm256_shuffle_epi8(table(tier.k_of_code), codes.half(i)));
      if (kTier + 1 < kTiers) return e;
      return _mm256_andnot_si256(_mm256_cmpeq_epi8(codes.half(i), _mm256_set1_epi8(kZeroCode)), e);
    });
  }

  static void compress(const Bytes& x, uint64_t mask, uint8_t* to) {
    alignas(32) uint8_t bytes[64];
    store(bytes, x);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < 8; ++i, mask >>= 8) {
      store8(to, _mm_shuffle_epi8(load8(bytes + 8 * i), load8(kShuffles.pack[mask & 255])));
      to += popcount(mask & 255);
    }
  }
  static Bytes expand(const Bytes& x, uint64_t mask, const uint8_t* from) {
    alignas(32) uint8_t bytes[64];
    const uint64_t all = mask;
#pragma GCC unroll 8
    for (uint32_t i = 0; i < 8; ++i, mask >>= 8) {
      store8(bytes + 8 * i, _mm_shuffle_epi8(load8(from), load8(kShuffles.unpack[mask & 255])));
      from += popcount(mask & 255);
    }
    return Bytes::make([&](uint32_t i) { return _mm256_blendv_epi8(x.half(i), load32(bytes + 32 * i), spread(all, i)); });
  }
  static uint64_t above(const Bytes& x, uint8_t limit) {
    const __m256i at = _mm256_set1_epi8(char(limit));
    return top_bits(_mm256_cmpgt_epi8(x.half(0), at), _mm256_cmpgt_epi8(x.half(1), at));
  }
  static uint64_t gather(uint64_t x, uint64_t mask) { return _pext_u64(x, mask); }
  static uint64_t scatter(uint64_t x, uint64_t mask) { return _pdep_u64(x, mask); }

  static void hash_sums(const uint8_t* data, const uint64_t* keys, const uint64_t* others, uint32_t count, uint64_t* sums) {
    __m256i sum[2][2] = {{_mm256_setzero_si256(), _mm256_setzero_si256()}, {_mm256_setzero_si256(), _mm256_setzero_si256()}};
    const auto add = [&](uint32_t at, __m256i* sums) {
      const auto plus = [&](const uint64_t* k) {
        return _mm256_add_epi32(load32(data + 8 * at), load32(reinterpret_cast<const uint8_t*>(k + at)));
      };
      const __m256i y = plus(keys), z = plus(others);
      sums[0] = _mm256_add_epi64(sums[0], _mm256_mul_epu32(y, _mm256_srli_epi64(y, 32)));
      sums[1] = _mm256_add_epi64(sums[1], _mm256_mul_epu32(z, _mm256_srli_epi64(z, 32)));
    };
    for (uint32_t at = 0; at < count; at += 8) {
      add(at, sum[0]);
      add(at + 4, sum[1]);
    }
    for (uint32_t h = 0; h < 2; ++h) {
      const __m256i x = _mm256_add_epi64(sum[0][h], sum[1][h]);
      const __m128i half = _mm_add_epi64(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
      sums[h] = uint64_t(_mm_cvtsi128_si64(half)) + uint64_t(_mm_extract_epi64(half, 1));
    }
  }

  template <typename W>
  static uint64_t zeros(const Vec<W>& x) {
    Bytes any = x.plane[0];
    for (uint32_t i = 1; i < sizeof(W); ++i) any = any | x.plane[i];
    const __m256i zero = _mm256_setzero_si256();
    return top_bits(_mm256_cmpeq_epi8(any.half(0), zero), _mm256_cmpeq_epi8(any.half(1), zero));
  }

  // ---- LIST chunks: cpu/delta/list_steps.h

  // Bits of 64 words by of(register of 32 bytes, its place), which has all bits of the words that count.
  template <typename W, typename Of>
  static uint64_t masks(Of of) {
    if constexpr (sizeof(W) == 1) return top_bits(of(0), of(1));
    if constexpr (sizeof(W) == 2) {
      const auto half = [&](uint32_t i) { return middle_swapped(_mm256_packs_epi16(of(i), of(i + 1))); };
      return top_bits(half(0), half(2));
    } else {
      const auto eight = [&](uint32_t i) { return uint64_t(uint32_t(_mm256_movemask_ps(_mm256_castsi256_ps(of(i))))) << 8 * i; };
      uint64_t mask = 0;
      for (uint32_t i = 0; i < 8; ++i) mask |= eight(i);
      return mask;
    }
  }
  template <typename W>
  static __m256i equal(__m256i a, __m256i b) {
    if constexpr (sizeof(W) == 1) return _mm256_cmpeq_epi8(a, b);
    if constexpr (sizeof(W) == 2) return _mm256_cmpeq_epi16(a, b);
    return _mm256_cmpeq_epi32(a, b);
  }
  template <typename W>
  static uint64_t differing(const uint8_t* words, const uint8_t* base) {
    return ~masks<W>([&](uint32_t i) { return equal<W>(load32(words + 32 * i), load32(base + 32 * i)); });
  }
  template <typename W>
  static uint64_t without(const uint8_t* words, W mask) {
    const __m256i bits = sizeof(W) == 1   ? _mm256_set1_epi8(char(mask))
                         : sizeof(W) == 2 ? _mm256_set1_epi16(short(mask))
                                          : _mm256_set1_epi32(int(mask));
    return masks<W>([&](uint32_t i) { return equal<W>(_mm256_and_si256(load32(words + 32 * i), bits), _mm256_setzero_si256()); });
  }
  template <typename W>
  static uint64_t at_least(const W* words, W least) {
    return masks<W>([&](uint32_t i) {
      const __m256i w = load32(reinterpret_cast<const uint8_t*>(words) + 32 * i);
      if constexpr (sizeof(W) == 1) return equal<W>(w, _mm256_max_epu8(w, _mm256_set1_epi8(char(least))));
      if constexpr (sizeof(W) == 2) return equal<W>(w, _mm256_max_epu16(w, _mm256_set1_epi16(short(least))));
      return equal<W>(w, _mm256_max_epu32(w, _mm256_set1_epi32(int(least))));
    });
  }
  static void put_lows(BitWriter& out, const uint16_t* gaps, uint32_t m, uint32_t r) {
    const uint64_t mask = ones(r) * 0x0001000100010001ull;
    const auto* const bytes = reinterpret_cast<const uint8_t*>(gaps);
    for (uint32_t i = 0; i + 4 <= m; i += 4) out.put(_pext_u64(load_word<uint64_t>(bytes + 2 * i), mask), 4 * r);
    ListSteps::put_lows(out, gaps + (m & ~3u), m % 4, r);
  }
  static void get_lows(const uint8_t* bits, uint32_t at, uint32_t m, uint32_t r, uint16_t* lows) {
    const uint64_t mask = ones(r) * 0x0001000100010001ull;
    for (uint32_t i = 0; i < m; i += 4, at += 4 * r) {
      const uint64_t four = _pdep_u64(peek_bits(bits, at), mask);
      memcpy(lows + i, &four, 8);
    }
  }
};

}  // namespace
}  // namespace zipccl
