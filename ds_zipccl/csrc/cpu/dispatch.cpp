// The level in use: chosen once, by the instructions of the CPU; tests may force a lower level.
#include <string.h>

#include "cpu/interface.h"
#include "cpu/level.h"

namespace {

const ZipcclLevel* const kLevels[] = {
#if defined(__x86_64__)
    &zipccl_avx512, &zipccl_avx2,
#elif defined(__aarch64__)
    &zipccl_neon,
#endif
    &zipccl_scalar};

bool supported(const ZipcclLevel* level) {
#if defined(__x86_64__)
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("popcnt");
  if (level == &zipccl_avx2) return avx2;
  if (level == &zipccl_avx512)
    return avx2 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("avx512vbmi2");
#elif defined(__aarch64__)
  if (level == &zipccl_neon) return true;  // each has NEON
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

const ZipcclLevel& zipccl_chosen() { return *chosen; }

const char* zipccl_level() { return chosen->name; }

int32_t zipccl_force_level(const char* name) {
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
