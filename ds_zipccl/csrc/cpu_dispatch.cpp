// The C interface of the CPU codec. The level is chosen once, by what the CPU has; tests may force a lower one.
#include <stdlib.h>
#include <string.h>

#include "cpu_level.h"

namespace {

const ZipcclLevel* const kLevels[] = {
#if defined(__x86_64__)
    &zipccl_avx2,
#endif
    &zipccl_scalar};

bool supported(const ZipcclLevel* level) {
#if defined(__x86_64__)
  if (level == &zipccl_avx2) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2");
#endif
  return level == &zipccl_scalar;
}

const ZipcclLevel* best() {
  for (const ZipcclLevel* level : kLevels)
    if (supported(level)) return level;
  return &zipccl_scalar;
}

const ZipcclLevel* chosen = best();

}  // namespace

// Name of the level in use.
extern "C" const char* zipccl_level() { return chosen->name; }

// Uses the named level from now on, or the best one for "auto". Returns 0, or 1 where it does not exist or the CPU lacks it.
extern "C" int32_t zipccl_force_level(const char* name) {
  if (!strcmp(name, "auto")) {
    chosen = best();
    return 0;
  }
  for (const ZipcclLevel* level : kLevels)
    if (!strcmp(level->name, name) && supported(level)) {
      chosen = level;
      return 0;
    }
  return 1;
}

// Encodes numel words of `dtype` (1 to 3) to `out`, which must hold codecs.exponent.payload_bound() bytes. Returns the payload's bytes.
extern "C" uint64_t zipccl_encode(const void* words, uint64_t numel, int32_t dtype, uint32_t block, void* out) {
  return chosen->encode[dtype](static_cast<const uint8_t*>(words), numel, block, static_cast<uint8_t*>(out));
}

// Decodes a payload of `bytes` bytes to numel words of `dtype` (1 to 3). Returns 0 or a FrameErrorCode; the words are then undefined.
extern "C" int32_t zipccl_decode(const void* payload, uint64_t bytes, void* words, uint64_t numel, int32_t dtype, uint32_t block) {
  return chosen->decode[dtype](static_cast<const uint8_t*>(payload), bytes, numel, block, static_cast<uint8_t*>(words));
}
