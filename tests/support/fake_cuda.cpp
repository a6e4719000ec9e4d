// A CUDA driver, and a library with the interface of csrc/cuda/launch.cu, that note each call and refuse a wrong one. No kernel runs.
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <map>
#include <set>
#include <string>
#include <vector>

namespace {

enum { kInvalidValue = 1, kInvalidContext = 201, kInvalidHandle = 400, kNotFound = 500 };

struct Function {
  std::string name;
  int32_t device, shared = 48 << 10;
};
struct Module {
  std::set<std::string> names;
  int32_t device;
};

std::string said;
std::map<std::string, uint32_t> sizes;
std::vector<Function*> functions;
int32_t current_device, failing_launches;
thread_local int32_t context = -1;  // the device, -1: none

void say(const char* format, ...) {
  char line[512];
  va_list values;
  va_start(values, format);
  vsnprintf(line, sizeof line, format, values);
  va_end(values);
  said += std::string(line) + "\n";
}
Function* function_of(const void* handle) {
  for (Function* function : functions)
    if (function == handle) return function;
  return nullptr;
}
int32_t launch(Function* function, int32_t device, uint32_t x, uint32_t y, uint32_t threads, uint32_t shared, const void* params,
               const void* stream) {
  if (!function || function->device != device) return kInvalidHandle;
  if (int32_t(shared) > function->shared || failing_launches) return kInvalidValue;
  uint64_t sum = 0;
  for (uint32_t i = 0; i < sizes[function->name]; ++i) sum += static_cast<const uint8_t*>(params)[i];
  say("launch %s device %d grid %u %u threads %u shared %u stream %lu sum %lu", function->name.c_str(), device, x, y, threads, shared,
      (unsigned long)stream, (unsigned long)sum);
  return 0;
}

}  // namespace

extern "C" {

const char* fake_said() { return said.c_str(); }
void fake_size(const char* name, uint32_t bytes) { sizes[name] = bytes; }
void fake_device(int32_t device) { current_device = device; }
void fake_use(int32_t device) { context = device; }
void fake_fail(int32_t launches) { failing_launches = launches; }
void fake_reset() {
  said.clear(), sizes.clear(), functions.clear();
  current_device = failing_launches = 0;
  context = -1;
}

// The driver. A thread has no context until it uses a device; a module's image lists the names of its functions.
int32_t cuInit(uint32_t) { return 0; }
int32_t cuDriverGetVersion(int32_t* version) {
  *version = 13000;
  return 0;
}
int32_t cuModuleLoadData(void** module, const char* image) {
  if (context < 0) return kInvalidContext;
  auto* const loaded = new Module{{}, context};
  for (const char* at = image; *at;) {
    const size_t length = strcspn(at, " ");
    loaded->names.insert(std::string(at, length));
    at += length + (at[length] == ' ');
  }
  *module = loaded;
  say("load %zu functions on %d", loaded->names.size(), loaded->device);
  return 0;
}
int32_t cuModuleGetFunction(void** function, void* from, const char* name) {
  Module* const module = static_cast<Module*>(from);
  if (!module->names.count(name)) return kNotFound;
  functions.push_back(new Function{name, module->device});
  *function = functions.back();
  return 0;
}
int32_t cuFuncSetAttribute(void* handle, int32_t attribute, int32_t value) {
  if (attribute != 8 && attribute != 9) return kInvalidValue;
  if (attribute == 8) function_of(handle)->shared = value;
  say(attribute == 8 ? "allow %s %d" : "carve %s %d", function_of(handle)->name.c_str(), value);
  return 0;
}
int32_t cuLaunchKernel(void* handle, uint32_t x, uint32_t y, uint32_t z, uint32_t threads, uint32_t ty, uint32_t tz, uint32_t shared,
                       void* stream, void** params, void** extra) {
  if (context < 0) return kInvalidContext;
  if (z * ty * tz != 1 || extra) return kInvalidValue;
  return launch(function_of(handle), context, x, y, threads, shared, *params, stream);
}
int32_t cuGetErrorName(int32_t status, const char** name) {
  *name = status == kInvalidValue ? "CUDA_ERROR_INVALID_VALUE" : status == kNotFound ? "CUDA_ERROR_NOT_FOUND" : "CUDA_ERROR_UNKNOWN";
  return 0;
}
int32_t cuGetErrorString(int32_t status, const char** text) {
  *text = status == kInvalidValue ? "invalid argument" : status == kNotFound ? "named symbol not found" : "unknown error";
  return 0;
}

// The library. Entries are names; a function exists on a device once it is loaded there.
const void* zipccl_cuda_kernel(const char* name) { return sizes.count(name) ? sizes.find(name)->first.c_str() : nullptr; }
int32_t zipccl_cuda_device(int32_t* device) {
  *device = current_device;
  return 0;
}
int32_t zipccl_cuda_load(const void* entry, uint32_t shared) {
  functions.push_back(new Function{static_cast<const char*>(entry), current_device, int32_t(shared)});
  say("allow %s %u", static_cast<const char*>(entry), shared);
  return 0;
}
int32_t zipccl_cuda_start(const void* entry, uint32_t x, uint32_t y, uint32_t threads, uint32_t shared, const void* params,
                          void* stream) {
  for (Function* function : functions)
    if (function->device == current_device && function->name == static_cast<const char*>(entry))
      return launch(function, current_device, x, y, threads, shared, params, stream);
  return kInvalidHandle;
}
const char* zipccl_cuda_error(int32_t status) { return status == kInvalidValue ? "invalid argument" : "some error"; }
}
