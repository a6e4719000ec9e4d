// The functions that cpu/lossy/lowrank.cpp and zfp.cpp take from a level, so that they link without the levels: they compile in seconds.
#include "cpu/lossy/lowrank.h"
#include "cpu/sum.h"

namespace {

ZipcclLevel level() {
  ZipcclLevel found = {};
  ZipcclLevel::Multiply* const multiply[] = ZIPCCL_ROWS(lowrank::multiply);
  ZipcclLevel::AddWords* const add[][2] = {ZIPCCL_ADD_WORDS(Bf16), ZIPCCL_ADD_WORDS(Fp16), ZIPCCL_ADD_WORDS(Fp32)};
  for (int type = 0; type < 3; ++type) {
    found.multiply[type] = multiply[type];
    found.add_words[type][0] = add[type][0], found.add_words[type][1] = add[type][1];
  }
  found.orthonormalize = zipccl::lowrank::orthonormalize;
  return found;
}
const ZipcclLevel kLevel = level();

}  // namespace

const ZipcclLevel& zipccl_chosen() { return kLevel; }
