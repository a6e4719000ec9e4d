// Groups of scaled payloads on the CPU (FORMAT.md 2.10): float32 values to scales and codes and back. The thread must keep denormals
// (cpu/lossy/scaled.cpp). Loops are written so that they vectorize; every level rounds every operation alike.
#pragma once
#include "common/bits.h"
#include "common/scaling.cuh"
#include "cpu/level.h"
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace zipccl {
namespace {

// --- Hadamard transform

#if defined(__AVX512F__)
using Floats = __m512;
inline Floats swapped(Floats v, Index<1>) { return _mm512_permute_ps(v, 0xb1); }
inline Floats swapped(Floats v, Index<2>) { return _mm512_permute_ps(v, 0x4e); }
inline Floats swapped(Floats v, Index<4>) { return _mm512_shuffle_f32x4(v, v, 0xb1); }
inline Floats swapped(Floats v, Index<8>) { return _mm512_shuffle_f32x4(v, v, 0x4e); }
template <uint32_t kStride>
Floats butterfly(Floats v) {  // the second of a pair gets the first minus itself: the product with 1 or -1 is exact
  constexpr __mmask16 second = kStride == 1 ? 0xaaaa : kStride == 2 ? 0xcccc : kStride == 4 ? 0xf0f0 : 0xff00;
  return _mm512_fmadd_ps(v, _mm512_mask_blend_ps(second, _mm512_set1_ps(1), _mm512_set1_ps(-1)), swapped(v, Index<kStride>()));
}
inline Floats butterflies(Floats v) { return butterfly<8>(butterfly<4>(butterfly<2>(butterfly<1>(v)))); }
constexpr uint32_t kHeld = 16;  // vectors that the registers hold at a time
#elif defined(__AVX2__)
using Floats = __m256;
inline Floats swapped(Floats v, Index<1>) { return _mm256_permute_ps(v, 0xb1); }
inline Floats swapped(Floats v, Index<2>) { return _mm256_permute_ps(v, 0x4e); }
inline Floats swapped(Floats v, Index<4>) { return _mm256_permute2f128_ps(v, v, 1); }
template <uint32_t kStride>
Floats butterfly(Floats v) {
  constexpr int second = kStride == 1 ? 0xaa : kStride == 2 ? 0xcc : 0xf0;
  const Floats other = swapped(v, Index<kStride>());
  return _mm256_add_ps(other, _mm256_xor_ps(v, _mm256_blend_ps(_mm256_setzero_ps(), _mm256_set1_ps(-0.0f), second)));
}
inline Floats butterflies(Floats v) { return butterfly<4>(butterfly<2>(butterfly<1>(v))); }
constexpr uint32_t kHeld = 8;
#else
using Floats = float;
inline Floats butterflies(Floats v) { return v; }
constexpr uint32_t kHeld = 8;
#endif
constexpr uint32_t kFloats = sizeof(Floats) / 4;

inline Floats load_floats(const float* from) { return load_word<Floats>(reinterpret_cast<const uint8_t*>(from)); }
inline void store_floats(float* to, Floats v) { memcpy(to, &v, sizeof v); }

// The butterflies of kCount vectors by each stride between vectors, in ascending order.
template <uint32_t kCount>
__attribute__((always_inline)) inline void between(Floats* v) {
  if constexpr (kCount > 1) {
    between<kCount / 2>(v);
    between<kCount / 2>(v + kCount / 2);
    for (uint32_t i = 0; i < kCount / 2; ++i) {
      const Floats a = v[i], b = v[i + kCount / 2];
      v[i] = a + b;
      v[i + kCount / 2] = a - b;
    }
  }
}

// v = H v for kCount vectors.
template <uint32_t kCount>
void hadamard_held(float* v) {
  Floats held[kCount];
  for (uint32_t i = 0; i < kCount; ++i) held[i] = butterflies(load_floats(v + i * kFloats));
  between<kCount>(held);
  for (uint32_t i = 0; i < kCount; ++i) store_floats(v + i * kFloats, held[i]);
}

// v = H v for a group of g floats, 32 or more.
inline void hadamard(float* v, uint32_t g) {
  const uint32_t held = g < kHeld * kFloats ? g : kHeld * kFloats;
  for (uint32_t i = 0; i < g; i += held) switch (held / kFloats) {
      case 2: hadamard_held<2>(v + i); break;
      case 4: hadamard_held<4>(v + i); break;
      case 8: hadamard_held<8>(v + i); break;
      default: hadamard_held<kHeld>(v + i);
    }
  for (uint32_t stride = held; stride < g; stride *= 2)
    for (uint32_t start = 0; start < g; start += 2 * stride)
      for (uint32_t i = start; i < start + stride; i += kFloats) {
        const Floats a = load_floats(v + i), b = load_floats(v + i + stride);
        store_floats(v + i, a + b);
        store_floats(v + i + stride, a - b);
      }
}

// --- one group: 32-bit numbers and bytes

#if defined(__AVX2__)
using Ints = uint32_t __attribute__((vector_size(sizeof(Floats))));
using Signed = int32_t __attribute__((vector_size(sizeof(Floats))));
inline Ints bits_of(Floats v) { return reinterpret_cast<Ints>(v); }
inline Floats float_of(Ints x) { return reinterpret_cast<Floats>(x); }
#else
using Ints = uint32_t;
using Signed = int32_t;
inline Ints bits_of(Floats v) { return as_bits(v); }
inline Floats float_of(Ints x) { return as_float(x); }
#endif
inline Ints largest_of(Ints a, Ints b) { return a > b ? a : b; }
// For each lane whether a < b, both below 2^31: x, otherwise y.
inline Ints if_less(Ints a, uint32_t b, Ints x, Ints y) { return Signed(a) < int32_t(b) ? x : y; }

#if defined(__AVX512F__)
inline Ints load_bytes(const uint8_t* from) { return Ints(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)))); }
inline void store_bytes(uint8_t* to, Ints x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(__m512i(x))); }
#elif defined(__AVX2__)
inline Ints load_bytes(const uint8_t* from) { return Ints(_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)))); }
inline void store_bytes(uint8_t* to, Ints x) {
  const __m128i words = _mm_packus_epi32(_mm256_castsi256_si128(__m256i(x)), _mm256_extracti128_si256(__m256i(x), 1));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(words, words));
}
#else
inline Ints load_bytes(const uint8_t* from) { return *from; }
inline void store_bytes(uint8_t* to, Ints x) { *to = uint8_t(x); }
#endif

inline uint32_t largest_lane(Ints x) {
  uint32_t lanes[kFloats], most = 0;
  memcpy(lanes, &x, sizeof lanes);
  for (const uint32_t lane : lanes) most = lane > most ? lane : most;
  return most;
}

// The largest magnitude of g values, as the bits of a float.
inline uint32_t largest_magnitude(const float* v, uint32_t g) {
  Ints most = {};
  for (uint32_t i = 0; i < g; i += kFloats) most = largest_of(most, bits_of(load_floats(v + i)) & kMagnitude);
  return largest_lane(most);
}

// float8_e4m3fn codes of g values times 2^-(scale - 127).
inline void put_e4m3(const float* v, uint32_t g, uint32_t scale, uint8_t* codes) {
  const float factor = as_float((254 - scale) << 23), shift = 16384.0f;  // its last bit is worth 2^-9, the least code
  for (uint32_t i = 0; i < g; i += kFloats) {
    const Ints bits = bits_of(load_floats(v + i) * factor), size = bits & kMagnitude;
    const Ints normal = ((size + 0x7ffffu + (size >> 20 & 1u)) >> 20) - 960u;
    const Ints subnormal = bits_of(float_of(size) + shift) - as_bits(shift);
    store_bytes(codes + i, if_less(size, 121u << 23, subnormal, normal) | (bits >> 24 & 128u));
  }
}

// Values of codes; returns whether all are numbers.
inline bool get_e4m3(const uint8_t* codes, uint32_t g, uint32_t scale, float* v) {
  constexpr uint32_t bias = 120u << 23, least = 121u << 23;
  const float factor = as_float(scale << 23);
  Ints most = {};
  for (uint32_t i = 0; i < g; i += kFloats) {
    const Ints code = load_bytes(codes + i), size = code & 127u, high = size << 20;
    const Ints subnormal = bits_of(float_of(high + least) - as_float(least));
    const Ints bits = if_less(size, 8, subnormal, high + bias) | (code & 128u) << 24;
    most = largest_of(most, size);
    store_floats(v + i, float_of(bits) * factor);
  }
  return largest_lane(most) < 127;
}

template <typename Lanes>
void put_integers(const float* v, uint32_t g, const ZipcclScaling& s, uint32_t scale, uint8_t* codes) {
  const float factor = as_float(scale << 16), shift = 12582912.0f;  // 1.5 * 2^23: its last bit is worth 1
  const int32_t m = (1 << (s.bits - 1)) - 1;
  alignas(64) uint8_t numbers[kMaxGroup];
  for (uint32_t i = 0; i < g; ++i) {
    const int32_t q = int32_t(as_bits(v[i] / factor + shift)) - int32_t(as_bits(shift));
    numbers[i] = uint8_t((q < -m ? -m : q > m ? m : q) + m);
  }
  const uint32_t plane = g / 8;
  each_group(g, [&](uint32_t at, uint32_t n) {
    const auto group = Lanes::load(numbers + at);
    for (uint32_t p = 0; p < s.bits; ++p) store_plane(codes + p * plane, at, n, Lanes::plane(group, p) & ones(n));
  });
}

template <typename Lanes>
bool get_integers(const uint8_t* codes, uint32_t g, const ZipcclScaling& s, uint32_t scale, float* v) {
  const float factor = as_float(scale << 16);
  const int32_t m = (1 << (s.bits - 1)) - 1;
  const uint32_t plane = g / 8;
  alignas(64) uint8_t numbers[kMaxGroup];
  uint64_t above = 0;  // of 2m all bits but the lowest are set
  each_group(g, [&](uint32_t at, uint32_t n) {
    uint64_t planes[8], all = ~0ull;
    for (uint32_t p = 0; p < s.bits; ++p) all &= planes[p] = load_plane(codes + p * plane, at, n);
    above |= all;
    Lanes::store(numbers + at, Lanes::from_planes(planes, s.bits));
  });
  for (uint32_t i = 0; i < g; ++i) v[i] = float(int32_t(numbers[i]) - m) * factor;
  return !above;
}

// The values of n words, padded with zeros to a group, transformed.
template <typename F>
void read_group(const uint8_t* words, uint32_t n, const ZipcclScaling& s, float* v) {
  using Word = typename F::Word;
  for (uint32_t i = 0; i < n; ++i) v[i] = Values<F>::from(load_word<Word>(words + i * sizeof(Word)));
  for (uint32_t i = n; i < 1u << s.log2; ++i) v[i] = 0;
  if (s.hadamard) hadamard(v, 1u << s.log2);
}

// The scale and, unless it is zero or kStays, the codes of a group of n words.
template <typename F, typename Lanes>
uint32_t encode_group(const uint8_t* words, uint32_t n, const ZipcclScaling& s, uint8_t* codes) {
  alignas(64) float v[kMaxGroup];
  const uint32_t g = 1u << s.log2;
  read_group<F>(words, n, s, v);
  const uint32_t scale = scale_of(largest_magnitude(v, g), s);
  if (!scale || scale == kStays) return scale;
  if (s.integers) {
    put_integers<Lanes>(v, g, s, scale, codes);
  } else {
    put_e4m3(v, g, scale, codes);
  }
  return scale;
}

// A float rounded to a word; beyond the range of float16 its largest finite number. The limits of scales keep values finite.
template <typename F>
typename F::Word round_finite(float f) {
  const typename F::Word word = Values<F>::round(f);
  return F::E == 5 && (word & 0x7fff) == 0x7c00 ? typename F::Word(word - 1) : word;
}

// The first n words of a group with this scale, which is not zero. Returns whether all codes are numbers.
template <typename F, typename Lanes>
bool decode_group(uint32_t scale, const uint8_t* codes, uint32_t n, const ZipcclScaling& s, uint8_t* words) {
  using Word = typename F::Word;
  alignas(64) float v[kMaxGroup];
  const uint32_t g = 1u << s.log2;
  const bool good = s.integers ? get_integers<Lanes>(codes, g, s, scale, v) : get_e4m3(codes, g, scale, v);
  if (s.hadamard) hadamard(v, g);
  const float factor = as_float((127 - (s.hadamard ? s.log2 : 0)) << 23);
  for (uint32_t i = 0; i < n; ++i) {
    const Word word = round_finite<F>(v[i] * factor);
    memcpy(words + i * sizeof(Word), &word, sizeof word);
  }
  return good;
}

// --- groups in a row: the functions of a level

template <typename F, typename Lanes>
uint64_t encode_scaled(const uint8_t* words, uint64_t numel, const ZipcclScaling& s, uint8_t* scales, uint8_t* codes) {
  const uint64_t g = 1u << s.log2, size = g * s.bits / 8;
  uint64_t coded = 0;
  for (uint64_t at = 0; at < numel; at += g) {
    const uint32_t n = uint32_t(numel - at < g ? numel - at : g);
    const uint32_t scale = encode_group<F, Lanes>(words + at * sizeof(typename F::Word), n, s, codes + coded * size);
    if (scale == kStays) return kGroupStays;
    coded += scale != 0;
    const uint16_t stored = uint16_t(scale);
    memcpy(scales, &stored, s.integers ? 2 : 1);
    scales += s.integers ? 2 : 1;
  }
  return coded;
}

template <typename F, typename Lanes>
int32_t decode_scaled(const uint8_t* scales, const uint8_t* codes, uint64_t numel, const ZipcclScaling& s, uint8_t* words) {
  const uint64_t g = 1u << s.log2, size = g * s.bits / 8;
  bool good = true;
  for (uint64_t at = 0; at < numel; at += g) {
    const uint32_t n = uint32_t(numel - at < g ? numel - at : g);
    const uint32_t scale = s.integers ? load_word<uint16_t>(scales) : *scales;
    uint8_t* const to = words + at * sizeof(typename F::Word);
    scales += s.integers ? 2 : 1;
    if (!scale) {
      memset(to, 0, n * sizeof(typename F::Word));
      continue;
    }
    good &= decode_group<F, Lanes>(scale, codes, n, s, to);
    codes += size;
  }
  return good ? OK : BLOCK;
}

template <typename F, typename Lanes>
void project_scaled(const uint8_t* words, uint64_t numel, const ZipcclScaling& s, uint8_t* out) {
  const uint64_t g = 1u << s.log2;
  alignas(64) uint8_t codes[kMaxGroup];
  for (uint64_t at = 0; at < numel; at += g) {
    const uint32_t n = uint32_t(numel - at < g ? numel - at : g);
    const uint64_t byte = at * sizeof(typename F::Word), bytes = n * sizeof(typename F::Word);
    const uint32_t scale = encode_group<F, Lanes>(words + byte, n, s, codes);
    if (scale == kStays) {
      memmove(out + byte, words + byte, bytes);
    } else if (scale) {
      decode_group<F, Lanes>(scale, codes, n, s, out + byte);
    } else {
      memset(out + byte, 0, bytes);
    }
  }
}

}  // namespace
}  // namespace zipccl
