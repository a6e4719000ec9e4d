// Decode and add: each decoded block goes from the cache into a sum. ds_zipccl/comm/reduction_order.py has the rules of sums.
#pragma once
#include "cpu/decode.h"
#include "common/float_values.cuh"

namespace zipccl {
namespace {

// Adds n words to as many sums: words of the same type, each sum rounded to it, or floats. Both may lie at any address.
template <typename F, typename Sum>
void add_words(const uint8_t* words, uint64_t n, uint8_t* sums) {
  using Word = typename F::Word;
  for (uint64_t i = 0; i < n; ++i) {
    const float value = Values<F>::from(load_word<Word>(words + i * sizeof(Word)));
    const Sum before = load_word<Sum>(sums + i * sizeof(Sum));
    Sum after;
    if constexpr (sizeof(Sum) == 4) {
      after = as_bits(as_float(before) + value);
    } else {
      after = Values<F>::round(Values<F>::from(before) + value);
    }
    memcpy(sums + i * sizeof(Sum), &after, sizeof after);
  }
}

// Adds a chunk of numel words to `sum`, as add_words does.
template <typename F, typename Lanes, typename Sum>
int32_t add_chunk(const uint8_t* chunk, uint64_t bytes, uint32_t numel, uint32_t block, uint8_t* sum) {
  using Word = typename F::Word;
  alignas(64) uint8_t words[kMaxBlock * sizeof(Word)];
  return each_block<F, Lanes>(
      chunk, bytes, numel, block, false, [&](uint32_t) { return words; },
      [&](const uint8_t* from, uint32_t first, uint32_t n) {
        add_words<F, Sum>(from, n, sum + uint64_t(first) * sizeof(Sum));
      });
}

}  // namespace
}  // namespace zipccl
