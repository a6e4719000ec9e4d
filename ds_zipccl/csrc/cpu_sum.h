// Decode and add: each decoded block goes from the cache into a sum (FORMAT.md says nothing of sums; ds_zipccl/comm/reduction.py does).
#pragma once
#include "cpu_decode.h"
#include "float_values.cuh"

namespace zipccl {
namespace {

// Adds a chunk of numel words to `sum`: words of the same type, each sum rounded to it, or floats.
template <typename F, typename Lanes, typename Sum>
int32_t add_chunk(const uint8_t* chunk, uint64_t bytes, uint32_t numel, uint32_t block, uint8_t* sum) {
  using Word = typename F::Word;
  alignas(64) uint8_t words[kMaxBlock * sizeof(Word)];
  return each_block<F, Lanes>(
      chunk, bytes, numel, block, false, [&](uint32_t) { return words; },
      [&](const uint8_t* from, uint32_t first, uint32_t n) {
        uint8_t* to = sum + uint64_t(first) * sizeof(Sum);
        for (uint32_t i = 0; i < n; ++i) {
          const float value = Values<F>::from(load_word<Word>(from + i * sizeof(Word)));
          const Sum before = load_word<Sum>(to + i * sizeof(Sum));
          Sum after;
          if constexpr (sizeof(Sum) == 4) {
            after = as_bits(as_float(before) + value);
          } else {
            after = Values<F>::round(Values<F>::from(before) + value);
          }
          memcpy(to + i * sizeof(Sum), &after, sizeof after);
        }
      });
}

}  // namespace
}  // namespace zipccl
