// Words rounded to fewer mantissa bits (FORMAT.md 2.9), and the encoder that rounds each block before it surveys it.
#pragma once
#include "common/rounding.cuh"
#include "cpu/encode.h"

namespace zipccl {
namespace {

// Bytes of this level's registers: compilers take wider vectors apart, element by element where words are compared.
#if defined(__AVX512BW__)
constexpr uint32_t kRegister = 64;
#elif defined(__AVX2__)
constexpr uint32_t kRegister = 32;
#else
constexpr uint32_t kRegister = 16;
#endif

// Rounds n words to `kept` mantissa bits, to `out`, which may be `words`.
template <typename F>
void round_words(const uint8_t* words, uint64_t n, uint32_t kept, uint8_t* out) {
  using Word = typename F::Word;
  typedef Word Words __attribute__((vector_size(kRegister)));
  constexpr uint64_t each = kRegister / sizeof(Word);
  const Rounding<F> rounding(kept);
  const auto round = [&](const uint8_t* from, uint8_t* to) __attribute__((always_inline)) {
    Words w;
    memcpy(&w, from, sizeof w);
    w = rounding(w);
    memcpy(to, &w, sizeof w);
  };
  uint64_t at = 0;
  for (; at + each <= n; at += each) round(words + at * sizeof(Word), out + at * sizeof(Word));
  if (at == n) return;
  uint8_t rest[kRegister] = {0};
  memcpy(rest, words + at * sizeof(Word), (n - at) * sizeof(Word));
  round(rest, rest);
  memcpy(out + at * sizeof(Word), rest, (n - at) * sizeof(Word));
}

// As survey (cpu/encode.h), of rounded words; and their signs and mantissas to `parts` with the trim of most blocks, that of the rounding.
// Returns whether it is this block's trim.
template <typename F, typename Lanes>
bool survey_rounded(const uint8_t* words, uint32_t n, uint32_t kept, uint8_t* exponents, uint8_t* parts, Survey& found) {
  using Word = typename F::Word;
  if (n % 64) {
    found = survey<F, Lanes>(words, n, exponents, parts);
    return false;
  }
  typename Lanes::Census groups;
  const uint32_t plane = plane_bytes(n);
  uint64_t any = 0;
  for (uint32_t at = 0; at < n; at += 64) {
    const auto group = Lanes::template load_words<Word>(words + at * sizeof(Word));
    const auto e = Lanes::narrow(F::exponent(group));
    Lanes::store(exponents + at, e);
    groups.add(e);
    auto top = Lanes::narrow(F::sign_mantissa(group) >> (F::M - 7));  // the sign and seven bits: at most six are kept
    uint64_t bits = 0;
    for (uint32_t p = kept + 1; p--; top = top << 1) store_plane(parts + p * plane, at, 64, bits = Lanes::plane(top, 7));
    any |= bits;
  }
  memset(exponents + n, 0, 64);
  found = groups.result();
  return any && found.largest != F::exponent_mask;
}

// As encode_chunk, of words rounded to `kept` mantissa bits, by the code CASCADE.
template <typename F, typename Lanes>
uint32_t encode_rounded_chunk(const uint8_t* const* places, uint32_t numel, uint32_t block, uint32_t kept, void* workspace,
                              ZipcclPart* parts, const uint8_t* soon, const uint8_t* const* next) {
  Workspace& work = *static_cast<Workspace*>(workspace);
  const uint32_t room = block * uint32_t(sizeof(typename F::Word));
  return encode_blocks<F, Cascade, Lanes>(places, numel, block, work, parts, soon, next,
                                          [&](Block& here, uint32_t b, uint8_t* body) __attribute__((always_inline)) {
                                            uint8_t* const rounded = work.rounded + b * room;
                                            round_words<F>(here.words, here.n, kept, rounded);
                                            here.words = rounded;
                                            const bool written = survey_rounded<F, Lanes>(rounded, here.n, kept, here.exponents, body,
                                                                                          here.survey);
                                            choose_form<F, Cascade, Lanes>(here, body, written ? F::M - kept : F::M + 1);
                                          });
}

}  // namespace
}  // namespace zipccl
