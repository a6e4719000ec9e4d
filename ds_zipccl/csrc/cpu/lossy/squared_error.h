// Sums of squares for the error of a lossy codec, in fp64.
#pragma once
#include "cpu/sum.h"

namespace zipccl {
namespace {

// Adds the squares of values - words to sums[0], and those of words to sums[1], over the n words that are finite.
template <typename F>
void add_squared_error(const uint8_t* words, const uint8_t* values, uint64_t n, double* sums) {
  using Word = typename F::Word;
  constexpr uint32_t lanes = 16;
  double of_error[lanes] = {}, of_words[lanes] = {};  // apart, so that a compiler may use vectors
  const auto step = [&](uint64_t i, uint32_t lane) __attribute__((always_inline)) {
    const float word = Values<F>::from(load_word<Word>(words + i * sizeof(Word)));
    const float value = Values<F>::from(load_word<Word>(values + i * sizeof(Word)));
    const bool finite = (as_bits(word) & 0x7f800000) != 0x7f800000;
    const double wide = double(word), error = double(value) - wide;
    of_error[lane] += finite ? error * error : 0.0;
    of_words[lane] += finite ? wide * wide : 0.0;
  };
  uint64_t i = 0;
  for (; i + lanes <= n; i += lanes)
    for (uint32_t lane = 0; lane < lanes; ++lane) step(i + lane, lane);
  for (uint32_t lane = 0; i < n; ++i, ++lane) step(i, lane);
  for (uint32_t lane = 0; lane < lanes; ++lane) {
    sums[0] += of_error[lane];
    sums[1] += of_words[lane];
  }
}

}  // namespace
}  // namespace zipccl
