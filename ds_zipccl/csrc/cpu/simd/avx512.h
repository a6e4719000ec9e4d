// The steps of 64 elements in AVX-512 (BW, VBMI, VBMI2). cpu/simd/scalar.h says the meaning of each.
#pragma once
#include <immintrin.h>

#include "common/bits.h"
#include "common/byte_planes.h"
#include "common/exponent_block.cuh"
#include "cpu/delta/list_steps.h"

namespace zipccl {
namespace {

// A register with of(i) in place i.
template <typename Word>
struct Constants {
  alignas(64) Word at[64 / sizeof(Word)] = {};
  template <typename Of>
  constexpr explicit Constants(Of of) {
    for (uint32_t i = 0; i < 64 / sizeof(Word); ++i) at[i] = Word(of(i));
  }
  __m512i load() const { return _mm512_load_si512(at); }
};
// Among the 128 bytes of two registers: every second or fourth; those of one between those of the other, of their first or second halves.
constexpr Constants<uint8_t> every(uint32_t step, uint32_t start) {
  return Constants<uint8_t>([=](uint32_t i) { return (start + step * i) % 128; });
}
constexpr Constants<uint8_t> zipped(uint32_t half) {
  return Constants<uint8_t>([=](uint32_t i) { return 32 * half + i / 2 + i % 2 * 64; });
}
constexpr Constants<uint8_t> kEven = every(2, 0), kOdd = every(2, 1), kFourth[4] = {every(4, 0), every(4, 1), every(4, 2), every(4, 3)};
constexpr Constants<uint8_t> kZipLow = zipped(0), kZipHigh = zipped(1);
// 16-bit words of one register between those of another, of their first halves; and 0, 1, 2, ...
constexpr Constants<uint16_t> kPairs([](uint32_t i) { return i / 2 + i % 2 * 32; }), kPlaces([](uint32_t i) { return i; });

struct Avx512Lanes : ListSteps {
  struct Bytes {
    using Register = uint8_t __attribute__((vector_size(64)));
    Register v;
    Bytes() = default;
    Bytes(__m512i x) : v(reinterpret_cast<Register>(x)) {}
    Bytes(Register x) : v(x) {}
    operator __m512i() const { return reinterpret_cast<__m512i>(v); }
    static Bytes zero() { return Register{}; }
    Bytes operator>>(uint32_t count) const { return Register(v >> uint8_t(count)); }
    Bytes operator<<(uint32_t count) const { return Register(v << uint8_t(count)); }
    Bytes operator&(uint8_t mask) const { return Register(v & mask); }
    Bytes operator|(Bytes other) const { return Register(v | other.v); }
  };
  template <typename W>
  using Vec = BytePlanes<W, Bytes>;

  static Bytes load(const uint8_t* from) { return _mm512_loadu_si512(from); }
  static void store(uint8_t* to, Bytes x) { _mm512_storeu_si512(to, x); }

  template <typename W>
  static Vec<W> load_words(const uint8_t* from) {
    if constexpr (sizeof(W) == 1) {
      return {{load(from)}};
    } else if constexpr (sizeof(W) == 2) {
      const __m512i a = load(from), b = load(from + 64);
      return {{_mm512_permutex2var_epi8(a, kEven.load(), b), _mm512_permutex2var_epi8(a, kOdd.load(), b)}};
    } else {
      const __m512i a = load(from), b = load(from + 64), c = load(from + 128), d = load(from + 192);
      const auto plane = [&](uint32_t i) -> Bytes {
        const __m512i low = _mm512_permutex2var_epi8(a, kFourth[i].load(), b);  // each has its bytes twice
        const __m512i high = _mm512_permutex2var_epi8(c, kFourth[i].load(), d);
        return _mm512_inserti64x4(low, _mm512_castsi512_si256(high), 1);
      };
      return {{plane(0), plane(1), plane(2), plane(3)}};
    }
  }
  // The registers of 64 words, in order, to put(register, its place).
  template <typename W, typename Put>
  static void each_register(const Vec<W>& x, Put put) {
    if constexpr (sizeof(W) == 1) {
      put(x.plane[0], 0);
    } else if constexpr (sizeof(W) == 2) {
      put(_mm512_permutex2var_epi8(x.plane[0], kZipLow.load(), x.plane[1]), 0);
      put(_mm512_permutex2var_epi8(x.plane[0], kZipHigh.load(), x.plane[1]), 1);
    } else {
      const __m512i low0 = _mm512_permutex2var_epi8(x.plane[0], kZipLow.load(), x.plane[1]);
      const __m512i high0 = _mm512_permutex2var_epi8(x.plane[0], kZipHigh.load(), x.plane[1]);
      const __m512i low1 = _mm512_permutex2var_epi8(x.plane[2], kZipLow.load(), x.plane[3]);
      const __m512i high1 = _mm512_permutex2var_epi8(x.plane[2], kZipHigh.load(), x.plane[3]);
      const __m512i first = kPairs.load();
      const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
      put(_mm512_permutex2var_epi16(low0, first, low1), 0);
      put(_mm512_permutex2var_epi16(low0, second, low1), 1);
      put(_mm512_permutex2var_epi16(high0, first, high1), 2);
      put(_mm512_permutex2var_epi16(high0, second, high1), 3);
    }
  }
  template <typename W>
  static void store_words(uint8_t* to, const Vec<W>& x) {
    each_register(x, [&](__m512i words, uint32_t i) { _mm512_storeu_si512(to + 64 * i, words); });
  }
  template <typename W>
  static void stream_words(uint8_t* to, const Vec<W>& x) {
    each_register(x, [&](__m512i words, uint32_t i) { _mm512_stream_si512(reinterpret_cast<__m512i*>(to + 64 * i), words); });
  }
  template <typename W>
  static Bytes narrow(const Vec<W>& x) {
    return x.plane[0];
  }
  template <typename W>
  static Vec<W> widen(Bytes x) {
    Vec<W> out = {};
    out.plane[0] = x;
    return out;
  }

  struct Census {
    __m512i least = _mm512_set1_epi8(-1), largest = _mm512_setzero_si512(), sum = _mm512_setzero_si512();
    void add(Bytes x) {
      least = _mm512_min_epu8(least, x);
      largest = _mm512_max_epu8(largest, x);
      sum = _mm512_add_epi64(sum, _mm512_sad_epu8(x, _mm512_setzero_si512()));
    }
    static uint32_t lowest(__m512i x) {
      const __m256i half = _mm256_min_epu8(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
      const __m128i quarter = _mm_min_epu8(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
      const __m128i pairs = _mm_min_epu8(quarter, _mm_srli_epi16(quarter, 8));  // a zero above each
      return uint32_t(_mm_cvtsi128_si32(_mm_minpos_epu16(pairs))) & 255;
    }
    Survey result() const {
      const __m512i all = _mm512_set1_epi8(-1);
      return {lowest(least), 255 - lowest(_mm512_xor_si512(largest, all)), uint32_t(_mm512_reduce_add_epi64(sum))};
    }
  };

  static uint64_t plane(Bytes x, uint32_t bit) { return _mm512_test_epi8_mask(x, _mm512_set1_epi8(char(1 << bit))); }
  static Bytes from_planes(const uint64_t* planes, uint32_t count) {
    __m512i x = _mm512_maskz_set1_epi8(planes[0], 1);
    for (uint32_t p = 1; p < count; ++p) x = _mm512_mask_add_epi8(x, planes[p], x, _mm512_set1_epi8(char(1 << p)));
    return x;
  }
  static __m512i table(const uint8_t* entries) {
    return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(entries)));
  }

  template <typename Code, uint32_t kTier>
  static Bytes codes(Bytes e, uint32_t top) {
    const Tier& tier = Code::tier[kTier];
    const __m512i k = _mm512_min_epu8(_mm512_sub_epi8(_mm512_set1_epi8(char(top + kAbove)), e), _mm512_set1_epi8(15));
    const __m512i codes = _mm512_shuffle_epi8(table(tier.code_of_k), k);
    if (kTier + 1 < kTiers) return codes;
    const __mmask64 escaped = _mm512_cmpeq_epi8_mask(codes, _mm512_set1_epi8(char(tier.escape())));
    return _mm512_mask_mov_epi8(codes, _mm512_mask_testn_epi8_mask(escaped, e, e), _mm512_set1_epi8(kZeroCode));
  }
  template <typename Code, uint32_t kTier>
  static Bytes exponents(const uint64_t* planes, uint32_t top) {
    const Tier& tier = Code::tier[kTier];
    const __m512i codes = from_planes(planes, tier.bits);
    const __m512i e = _mm512_sub_epi8(_mm512_set1_epi8(char(top + kAbove)), _mm512_shuffle_epi8(table(tier.k_of_code), codes));
    if (kTier + 1 < kTiers) return e;
    return _mm512_maskz_mov_epi8(_mm512_cmpneq_epi8_mask(codes, _mm512_set1_epi8(kZeroCode)), e);
  }

  // In registers: the forms that write or read memory themselves are microcode on Zen 4, and compilers like to make them.
  static void compress(Bytes x, uint64_t mask, uint8_t* to) {
    __m512i packed = _mm512_maskz_compress_epi8(mask, x);
    asm("" : "+v"(packed));
    store(to, packed);
  }
  static Bytes expand(Bytes x, uint64_t mask, const uint8_t* from) {
    __m512i packed = load(from);
    asm("" : "+v"(packed));
    return _mm512_mask_expand_epi8(x, mask, packed);
  }

  static uint64_t above(Bytes x, uint8_t limit) { return _mm512_cmpgt_epu8_mask(x, _mm512_set1_epi8(char(limit))); }
  static uint64_t gather(uint64_t x, uint64_t mask) { return _pext_u64(x, mask); }
  static uint64_t scatter(uint64_t x, uint64_t mask) { return _pdep_u64(x, mask); }

  static void hash_sums(const uint8_t* data, const uint64_t* keys, const uint64_t* others, uint32_t count, uint64_t* sums) {
    __m512i sum[2][2] = {{_mm512_setzero_si512(), _mm512_setzero_si512()}, {_mm512_setzero_si512(), _mm512_setzero_si512()}};
    const auto add = [&](uint32_t at, __m512i* sums) {
      const __m512i x = _mm512_loadu_si512(data + 8 * at), k = _mm512_load_si512(keys + at), other = _mm512_load_si512(others + at);
      const __m512i y = _mm512_add_epi32(x, k), z = _mm512_add_epi32(x, other);
      sums[0] = _mm512_add_epi64(sums[0], _mm512_mul_epu32(y, _mm512_srli_epi64(y, 32)));
      sums[1] = _mm512_add_epi64(sums[1], _mm512_mul_epu32(z, _mm512_srli_epi64(z, 32)));
    };
    for (uint32_t at = 0; at < count; at += 16) {
      add(at, sum[0]);
      add(at + 8, sum[1]);
    }
    for (uint32_t h = 0; h < 2; ++h) {
      const __m512i x = _mm512_add_epi64(sum[0][h], sum[1][h]);
      alignas(64) uint64_t parts[8];  // GCC's _mm512_reduce_add_epi64 adds signed numbers, whose overflow is undefined
      _mm512_store_si512(parts, x);
      sums[h] = 0;
      for (const uint64_t part : parts) sums[h] += part;
    }
  }

  template <typename W>
  static uint64_t zeros(const Vec<W>& x) {
    Bytes any = x.plane[0];
    for (uint32_t i = 1; i < sizeof(W); ++i) any = any | x.plane[i];
    return _mm512_testn_epi8_mask(any, any);
  }

  // ---- LIST chunks: cpu/delta/list_steps.h

  // The registers of 64 words, lowest first: bits of each by of(register, its place), put together.
  template <typename W, typename Of>
  static uint64_t masks(Of of) {
    uint64_t mask = 0;
#pragma GCC unroll 4
    for (uint32_t i = 0; i < sizeof(W); ++i) mask |= uint64_t(of(i)) << (64 / sizeof(W) % 64 * i);
    return mask;
  }
  template <typename W>
  static uint64_t differing(const uint8_t* words, const uint8_t* base) {
    return masks<W>([&](uint32_t i) -> uint64_t {
      const __m512i w = _mm512_loadu_si512(words + 64 * i), b = _mm512_loadu_si512(base + 64 * i);
      if constexpr (sizeof(W) == 1) return _mm512_cmpneq_epi8_mask(w, b);
      if constexpr (sizeof(W) == 2) return _mm512_cmpneq_epi16_mask(w, b);
      return _mm512_cmpneq_epi32_mask(w, b);
    });
  }
  template <typename W>
  static uint64_t without(const uint8_t* words, W mask) {
    return masks<W>([&](uint32_t i) -> uint64_t {
      const __m512i w = _mm512_loadu_si512(words + 64 * i);
      if constexpr (sizeof(W) == 1) return _mm512_testn_epi8_mask(w, _mm512_set1_epi8(char(mask)));
      if constexpr (sizeof(W) == 2) return _mm512_testn_epi16_mask(w, _mm512_set1_epi16(short(mask)));
      return _mm512_testn_epi32_mask(w, _mm512_set1_epi32(int(mask)));
    });
  }
  template <typename W>
  static uint64_t at_least(const W* words, W least) {
    return masks<W>([&](uint32_t i) -> uint64_t {
      const __m512i w = _mm512_loadu_si512(reinterpret_cast<const uint8_t*>(words) + 64 * i);
      if constexpr (sizeof(W) == 1) return _mm512_cmpge_epu8_mask(w, _mm512_set1_epi8(char(least)));
      if constexpr (sizeof(W) == 2) return _mm512_cmpge_epu16_mask(w, _mm512_set1_epi16(short(least)));
      return _mm512_cmpge_epu32_mask(w, _mm512_set1_epi32(int(least)));
    });
  }
  static void places(uint64_t mask, uint16_t first, uint16_t* to) {
    const __m512i low = _mm512_add_epi16(kPlaces.load(), _mm512_set1_epi16(short(first)));
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(32));
    __m512i packed[2] = {_mm512_maskz_compress_epi16(uint32_t(mask), low), _mm512_maskz_compress_epi16(uint32_t(mask >> 32), high)};
    asm("" : "+v"(packed[0]), "+v"(packed[1]));
    _mm512_storeu_si512(to, packed[0]);
    _mm512_storeu_si512(to + popcount(uint32_t(mask)), packed[1]);
  }
  template <typename W>
  static void pick(const uint8_t* words, uint64_t mask, W* to) {
    constexpr uint32_t each = 64 / sizeof(W);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < sizeof(W); ++i) {
      const uint64_t here = mask >> (each % 64 * i) & ones(each);
      const __m512i x = _mm512_loadu_si512(words + 64 * i);
      __m512i packed;
      if constexpr (sizeof(W) == 1) packed = _mm512_maskz_compress_epi8(here, x);
      if constexpr (sizeof(W) == 2) packed = _mm512_maskz_compress_epi16(__mmask32(here), x);
      if constexpr (sizeof(W) == 4) packed = _mm512_maskz_compress_epi32(__mmask16(here), x);
      asm("" : "+v"(packed));
      _mm512_storeu_si512(to, packed);
      to += popcount(here);
    }
  }
  static void put_lows(BitWriter& out, const uint16_t* gaps, uint32_t m, uint32_t r) {
    const uint64_t mask = ones(r) * 0x0001000100010001ull;
    const auto* const bytes = reinterpret_cast<const uint8_t*>(gaps);
    for (uint32_t i = 0; i + 4 <= m; i += 4) out.put(_pext_u64(load_word<uint64_t>(bytes + 2 * i), mask), 4 * r);
    ListSteps::put_lows(out, gaps + (m & ~3u), m % 4, r);
  }
  // A number of bits, value and length, for each gap; neighbours are put together until eight bytes hold four.
  static void put_unary(BitWriter& out, const uint16_t* gaps, uint32_t m, uint32_t r) {
    const __m128i by = _mm_cvtsi32_si128(int(r));
    const __m512i one = _mm512_set1_epi16(1), low32 = _mm512_set1_epi32(0xffff), low64 = _mm512_set1_epi64(0xffffffff);
    uint32_t i = 0;
    for (; i + 32 <= m; i += 32) {
      const __m512i rest = _mm512_srl_epi16(_mm512_loadu_si512(gaps + i), by);
      if (_mm512_cmpgt_epu16_mask(rest, _mm512_set1_epi16(15))) {
        ListSteps::put_unary(out, gaps + i, 32, r);
        continue;
      }
      __m512i value = _mm512_sllv_epi16(one, rest), length = _mm512_add_epi16(rest, one);
      __m512i first = _mm512_and_si512(length, low32);
      value = _mm512_or_si512(_mm512_and_si512(value, low32), _mm512_sllv_epi32(_mm512_srli_epi32(value, 16), first));
      length = _mm512_add_epi32(first, _mm512_srli_epi32(length, 16));
      first = _mm512_and_si512(length, low64);
      value = _mm512_or_si512(_mm512_and_si512(value, low64), _mm512_sllv_epi64(_mm512_srli_epi64(value, 32), first));
      length = _mm512_add_epi64(first, _mm512_srli_epi64(length, 32));
      alignas(64) uint64_t values[8], lengths[8];
      _mm512_store_si512(values, value);
      _mm512_store_si512(lengths, length);
#pragma GCC unroll 8
      for (uint32_t j = 0; j < 8; ++j) out.put(values[j], uint32_t(lengths[j]));
    }
    ListSteps::put_unary(out, gaps + i, m - i, r);
  }
  static void get_lows(const uint8_t* bits, uint32_t at, uint32_t m, uint32_t r, uint16_t* lows) {
    const uint64_t mask = ones(r) * 0x0001000100010001ull;
    for (uint32_t i = 0; i < m; i += 4, at += 4 * r) {
      const uint64_t four = _pdep_u64(peek_bits(bits, at), mask);
      memcpy(lows + i, &four, 8);
    }
  }
  static uint32_t add_gaps(const uint16_t* at, const uint16_t* lows, uint32_t m, uint32_t r, uint16_t* to) {
    const __m128i by = _mm_cvtsi32_si128(int(r));
    const __m512i last = _mm512_set1_epi16(31);
    __m512i before = _mm512_setzero_si512(), index = kPlaces.load(), sums = _mm512_setzero_si512();
    for (uint32_t i = 0; i < m; i += 32) {
      const __mmask32 here = __mmask32(ones(m - i < 32 ? m - i : 32));
      __m512i low = _mm512_maskz_loadu_epi16(here, lows + i);
      sums = _mm512_add_epi32(sums, _mm512_madd_epi16(low, _mm512_set1_epi16(1)));
#pragma GCC unroll 5
      for (uint32_t step = 1; step < 32; step *= 2) {
        const __m512i from = _mm512_sub_epi16(kPlaces.load(), _mm512_set1_epi16(short(step)));
        low = _mm512_add_epi16(low, _mm512_maskz_permutexvar_epi16(__mmask32(~0u << step), from, low));
      }
      low = _mm512_add_epi16(low, before);
      before = _mm512_permutexvar_epi16(last, low);
      const __m512i zeros = _mm512_sub_epi16(_mm512_maskz_loadu_epi16(here, at + i), index);
      _mm512_storeu_si512(to + i, _mm512_add_epi16(_mm512_add_epi16(index, _mm512_sll_epi16(zeros, by)), low));
      index = _mm512_add_epi16(index, _mm512_set1_epi16(32));
    }
    return m - 1 + ((at[m - 1] - (m - 1)) << r) + uint32_t(_mm512_reduce_add_epi32(sums));
  }
};

}  // namespace
}  // namespace zipccl
