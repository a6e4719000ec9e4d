// The additions that cpu/lossy/zfp.cpp takes from a level, so that it links without the levels: it compiles in a second.
#include <string.h>

#include "common/float_values.cuh"
#include "cpu/level.h"

namespace {

using namespace zipccl;

template <typename F, typename Sum>
void add(const uint8_t* words, uint64_t n, uint8_t* sums) {
  for (uint64_t i = 0; i < n; ++i) {
    typename F::Word word;
    Sum sum;
    memcpy(&word, words + i * sizeof word, sizeof word);
    memcpy(&sum, sums + i * sizeof sum, sizeof sum);
    if (sizeof sum == 4) {
      sum = Sum(as_bits(as_float(uint32_t(sum)) + Values<F>::from(word)));
    } else {
      sum = Sum(Values<F>::round(Values<F>::from(typename F::Word(sum)) + Values<F>::from(word)));
    }
    memcpy(sums + i * sizeof sum, &sum, sizeof sum);
  }
}

ZipcclLevel additions() {
  ZipcclLevel level = {};
  level.add_words[ZIPCCL_BF16][0] = add<Bf16, uint16_t>, level.add_words[ZIPCCL_BF16][1] = add<Bf16, uint32_t>;
  level.add_words[ZIPCCL_FP16][0] = add<Fp16, uint16_t>, level.add_words[ZIPCCL_FP16][1] = add<Fp16, uint32_t>;
  level.add_words[ZIPCCL_FP32][0] = level.add_words[ZIPCCL_FP32][1] = add<Fp32, uint32_t>;
  return level;
}
const ZipcclLevel kAdditions = additions();

}  // namespace

const ZipcclLevel& zipccl_chosen() { return kAdditions; }
