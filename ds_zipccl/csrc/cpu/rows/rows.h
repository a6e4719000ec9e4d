// Scaled rows on the CPU (FORMAT.md, row frames): the factor between two rows, and the prediction of a row.
#pragma once
#include "common/bits.h"
#include "common/float_values.cuh"
#include "common/scaled_row.cuh"
#include "cpu/level.h"

namespace zipccl {
namespace {

constexpr uint32_t kLanes = 32;  // partial sums, so that every level adds in the same order

// The bits of the factor f with the least squared error of f * source against `row`, of `width` words each; 0 where it is no valid factor.
template <typename F>
uint32_t row_factor(const uint8_t* source, const uint8_t* row, uint64_t width) {
  using Word = typename F::Word;
  double products[kLanes] = {0}, squares[kLanes] = {0};
  const auto add = [&](uint64_t at, uint32_t n) __attribute__((always_inline)) {
    for (uint32_t lane = 0; lane < n; ++lane) {
      const double a = Values<F>::from(load_word<Word>(source + (at + lane) * sizeof(Word)));
      const double b = Values<F>::from(load_word<Word>(row + (at + lane) * sizeof(Word)));
      products[lane] += a * b;
      squares[lane] += a * a;
    }
  };
  uint64_t at = 0;
  for (; at + kLanes <= width; at += kLanes) add(at, kLanes);
  add(at, uint32_t(width - at));
  double product = 0, square = 0;
  for (uint32_t lane = 0; lane < kLanes; ++lane) {
    product += products[lane];
    square += squares[lane];
  }
  const uint32_t bits = as_bits(float(product / square));
  return Factor::valid(bits) ? bits : 0;
}

// Predicts `width` words from those at `source`, times the factor with these bits.
template <typename F>
void predict_row(const uint8_t* source, uint64_t width, uint32_t bits, uint8_t* out) {
  using Word = typename F::Word;
  const Factor factor(bits);
  for (uint64_t i = 0; i < width; ++i) {
    const Word word = predict<F>(load_word<Word>(source + i * sizeof(Word)), factor);
    memcpy(out + i * sizeof(Word), &word, sizeof word);
  }
}

}  // namespace
}  // namespace zipccl
