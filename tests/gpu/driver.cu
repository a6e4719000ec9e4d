// The CUDA kernels without torch: runs every kernel on the cases of a file (tests/gpu/golden_cases.py) and compares all bytes. Sanitizers
// watch this process, because it has nothing in it but the kernels. Compiled by nvcc it contains them. Compiled by a C++ compiler it runs
// the emulated kernels of a library on the CPU, so that continuous integration runs this very file.
//
//   driver CASES [--bare] [--plant TOOL] [--library EMULATION]
//
// --bare: each buffer is an allocation of exactly its size, with undefined content, for memcheck and initcheck. Otherwise guards stand
// around each buffer. --plant: makes the mistake that the named sanitizer looks for, and nothing else: a sanitizer that does not notice
// this mistake does not work on this machine. Exit status: 0 all equal, 1 a difference, 2 the driver could not do its task.
#ifndef __CUDACC__
#include "emulation.h"  // first: it defines the words that the kernels are written in
#endif

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#ifdef __CUDACC__
#include "cuda/kernels.cuh"
#else
#include "cuda/decode.cuh"
#include "cuda/encode.cuh"
#include "cuda/hash.cuh"
#include "cuda/sum.cuh"
#endif

namespace {

[[noreturn]] void stop(const std::string& why) {
  fprintf(stderr, "driver: %s\n", why.c_str());
  exit(2);
}

// ------------------------------------------------------------------------------ the device: all that differs between a GPU and the CPU

#ifdef __CUDACC__
using Stream = cudaStream_t;
void must(cudaError_t status, const char* call) {
  if (status) stop(std::string(call) + ": " + cudaGetErrorString(status));
}
#define MUST(call) must(call, #call)
void* device_memory(size_t bytes) {
  void* at = nullptr;
  MUST(cudaMalloc(&at, bytes ? bytes : 1));
  return at;
}
void device_free(void* at) { MUST(cudaFree(at)); }
void upload(void* to, const void* from, size_t bytes, Stream stream) {
  if (bytes) MUST(cudaMemcpyAsync(to, from, bytes, cudaMemcpyHostToDevice, stream));
}
void download(void* to, const void* from, size_t bytes) {
  if (bytes) MUST(cudaMemcpy(to, from, bytes, cudaMemcpyDeviceToHost));
}
void set_bytes(void* at, int value, size_t bytes, Stream stream) {
  if (bytes) MUST(cudaMemsetAsync(at, value, bytes, stream));
}
Stream new_stream() {
  Stream stream;
  MUST(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return stream;
}
void finish() { MUST(cudaDeviceSynchronize()); }
void open_device(const char*) { MUST(cudaFree(nullptr)); }
int32_t run_kernel(const char* name, uint32_t grid, uint32_t shared, const void* params, Stream stream) {
#define ZIPCCL_ENTRY(kernel, Params) {#kernel, reinterpret_cast<const void*>(kernel)},
  static const std::map<std::string, const void*> kernels = {ZIPCCL_EACH_KERNEL(ZIPCCL_ENTRY)};
  const auto found = kernels.find(name);
  if (found == kernels.end()) stop(std::string("no kernel ") + name);
  MUST(cudaFuncSetAttribute(found->second, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared)));
  void* arguments[] = {const_cast<void*>(params)};
  return cudaLaunchKernel(found->second, dim3(grid), dim3(zipccl::kThreads), arguments, shared, stream);
}
void next_order() {}
#else
}  // namespace
#include <dlfcn.h>
namespace {
using Stream = void*;
void* device_memory(size_t bytes) { return aligned_alloc(256, (bytes + 256) / 256 * 256); }
void device_free(void* at) { free(at); }
void upload(void* to, const void* from, size_t bytes, Stream) { memcpy(to, from, bytes); }
void download(void* to, const void* from, size_t bytes) { memcpy(to, from, bytes); }
void set_bytes(void* at, int value, size_t bytes, Stream) { memset(at, value, bytes); }
Stream new_stream() { return nullptr; }
void finish() {}
int32_t (*run_kernel)(const char* name, uint32_t grid, uint32_t shared, const void* params, void* stream);
void (*seed_order)(uint64_t);
void open_device(const char* library) {
  void* const handle = library ? dlopen(library, RTLD_NOW) : nullptr;
  if (!handle) stop(library ? dlerror() : "the emulation is a library: name it with --library");
  run_kernel = reinterpret_cast<decltype(run_kernel)>(dlsym(handle, "zipccl_cuda_launch"));
  seed_order = reinterpret_cast<decltype(seed_order)>(dlsym(handle, "zipccl_emulation_seed"));
  if (!run_kernel || !seed_order) stop(std::string(library) + " is not the emulation");
}
// Lets the threads of the next kernel run in another order.
void next_order() {
  static uint64_t seed = 0;
  seed_order(seed++);
}
#endif

// The only place that knows how the launchers call a kernel.
void start(const std::string& kernel, uint64_t items, size_t shared, const void* params, Stream stream) {
  next_order();
  const int32_t status = run_kernel(kernel.c_str(), uint32_t(items), uint32_t(shared), params, stream);
  if (status) stop(kernel + " was not started: status " + std::to_string(status));
}

// ------------------------------------------------------------------------------------------------------------------------------- cases

using Bytes = std::vector<uint8_t>;

enum Kind : uint32_t { kFrame, kSum };
enum Code : uint32_t { kCascade, kWide, kDelta };
constexpr const char* kCodes[] = {"cascade", "wide", "delta"};

struct Head {  // as HEAD of golden_cases.py
  char name[48];
  uint32_t kind, dtype, itemsize, block, code, blobs;
  uint64_t numel, hash[2];
};
static_assert(sizeof(Head) == 96, "golden_cases.HEAD");

struct Case : Head {
  std::vector<Bytes> blob;
  // Of a frame: its words, the frame, and the base of a delta frame.
  const Bytes& words() const { return blob[0]; }
  const Bytes& frame() const { return blob[1]; }
  const Bytes& base() const { return blob[2]; }
  // Of a sum: the sum rounded, the sum in floats, and the frames.
  const Bytes& rounded() const { return blob[0]; }
  const Bytes& floats() const { return blob[1]; }
  size_t frames() const { return blob.size() - 2; }
};

template <typename T>
T read(FILE* file) {
  T value;
  if (fread(&value, sizeof value, 1, file) != 1) stop("the file of cases ends early");
  return value;
}

std::vector<Case> read_cases(const char* path) {
  FILE* const file = fopen(path, "rb");
  if (!file) stop(std::string("cannot read ") + path);
  if (read<uint64_t>(file) != 0x31534553'4143435aull) stop("not a file of cases: it must begin with ZCCASES1");
  std::vector<Case> cases(read<uint64_t>(file));
  for (Case& each : cases) {
    static_cast<Head&>(each) = read<Head>(file);
    each.name[sizeof each.name - 1] = 0;
    each.blob.resize(each.blobs);
    for (Bytes& blob : each.blob) {
      blob.resize(read<uint64_t>(file));
      if (!blob.empty() && fread(blob.data(), blob.size(), 1, file) != 1) stop("the file of cases ends early");
    }
    if (each.blob.size() < (each.kind == kSum || each.code == kDelta ? 3u : 2u)) stop(std::string(each.name) + " lacks a part");
  }
  fclose(file);
  return cases;
}

// ------------------------------------------------------------------------------------------------------------------------------ memory

constexpr uint8_t kGuard = 0x5c;
constexpr size_t kGuardBytes = 256;
bool bare = false;

// Memory of the device: `bytes` bytes that start `shift` bytes after a multiple of 256.
class Buffer {
 public:
  Buffer(size_t bytes, size_t shift, Stream stream) : bytes_(bytes), lead_(bare ? shift : kGuardBytes + shift), stream_(stream) {
    whole_ = lead_ + bytes + (bare ? 0 : kGuardBytes);
    memory_ = static_cast<uint8_t*>(device_memory(whole_));
    if (!bare) set_bytes(memory_, kGuard, whole_, stream);
  }
  Buffer(const Bytes& content, size_t shift, Stream stream) : Buffer(content.size(), shift, stream) {
    upload(at(), content.data(), content.size(), stream);
  }
  ~Buffer() { device_free(memory_); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  uint8_t* at() const { return memory_ + lead_; }
  size_t bytes() const { return bytes_; }
  void fill(int value) { set_bytes(at(), value, bytes_, stream_); }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(at());
  }
  template <typename T>
  T value() const {
    T found;
    download(&found, at(), sizeof found);
    return found;
  }

  // Why the first bytes are not `wanted`, or a guard was overwritten; "" if all is well.
  std::string differs(const Bytes& wanted) const {
    Bytes found(wanted.size());
    download(found.data(), at(), found.size());
    for (size_t i = 0; i < found.size(); ++i) {
      if (found[i] == wanted[i]) continue;
      char text[96];
      snprintf(text, sizeof text, "byte %zu of %zu is %02x, wanted is %02x", i, found.size(), found[i], wanted[i]);
      return text;
    }
    return overwritten(bytes_);
  }
  // Why a guard was overwritten, or a byte from `used` on.
  std::string overwritten(size_t used) const {
    if (bare) return "";
    Bytes found(whole_);
    download(found.data(), memory_, whole_);
    for (size_t i = 0; i < whole_; ++i) {
      if ((i < lead_ || i >= lead_ + used) && found[i] != kGuard)
        return "byte " + std::to_string(ptrdiff_t(i) - ptrdiff_t(lead_)) + " of a buffer of " + std::to_string(used) + " bytes was written";
    }
    return "";
  }

 private:
  size_t bytes_, lead_, whole_ = 0;
  Stream stream_;
  uint8_t* memory_ = nullptr;
};
using Held = std::shared_ptr<Buffer>;

Held buffer(size_t bytes, size_t shift, Stream stream) { return std::make_shared<Buffer>(bytes, shift, stream); }
Held buffer(const Bytes& content, size_t shift, Stream stream) { return std::make_shared<Buffer>(content, shift, stream); }
Held filled(size_t bytes, int value, Stream stream) {
  Held made = buffer(bytes, 0, stream);
  made->fill(value);
  return made;
}

// ------------------------------------------------------------------------------------------------------------------- jobs and launches

constexpr uint64_t kUntouched = ~0ull;  // a status before a failure

const char* type_name(uint32_t dtype) {
  static const std::map<uint32_t, const char*> names = {{1, "bf16"}, {2, "fp16"}, {3, "fp32"}, {13, "e4m3"}, {14, "e5m2"}};
  const auto found = names.find(dtype);
  if (found == names.end()) stop("no kernels for dtype " + std::to_string(dtype));
  return found->second;
}
template <template <typename> class Shared>
size_t shared_of(uint32_t itemsize) {
  if (itemsize == 1) return sizeof(Shared<zipccl::E4m3>);
  return itemsize == 2 ? sizeof(Shared<zipccl::Bf16>) : sizeof(Shared<zipccl::Fp32>);
}
uint64_t chunks_of(uint64_t numel, uint32_t block) {
  const uint64_t words = uint64_t(block) * zipccl::kChunkBlocks;
  return (numel + words - 1) / words;
}
uint64_t items_of(const Case& one) {
  const uint64_t chunks = chunks_of(one.numel, one.block);
  return chunks ? chunks : 1;
}
std::string of_code(const Case& one) { return one.code == kDelta ? "_delta" : ""; }

// A run of a kernel: `launch` queues it on its stream, `verify` says why the result is wrong. Its buffers live as long as it does.
struct Trial {
  std::string name;
  std::function<void()> launch;
  std::function<std::string()> verify;
};

// Jobs of one launch, all of one dtype, code and block.
struct Encoding {
  zipccl::EncodeJobs jobs = {};
  std::vector<Held> held;
  uint64_t items = 0;
  Held work, overflows;

  void add(const Case& one, const Held& words, const Held& base, const Held& slot) {
    zipccl::EncodeJob& job = jobs.job[jobs.count++];
    job.words = words->at(), job.base = base ? base->at() : nullptr;
    job.header = slot->at(), job.payload = slot->at() + zipccl::kHeaderBytes;
    job.capacity = slot->bytes() - zipccl::kHeaderBytes;
    job.numel = one.numel, job.first_item = items;
    items += items_of(one);
    held.insert(held.end(), {words, base, slot});
  }
  void launch(const Case& like, Stream stream) {
    work = filled(16 + 8 * items, 0, stream), overflows = filled(4, 0, stream);
    jobs.block = like.block, jobs.dtype = like.dtype;
    jobs.ticket = work->as<uint32_t>(), jobs.places = work->as<uint64_t>() + 2, jobs.overflows = overflows->as<uint32_t>();
    const std::string kernel = std::string("zipccl_encode_") + type_name(like.dtype) + "_" + kCodes[like.code];
    start(kernel, items, shared_of<zipccl::EncodeShared>(like.itemsize), &jobs, stream);
  }
};

struct Decoding {
  zipccl::DecodeJobs jobs = {};
  std::vector<Held> held;
  uint64_t items = 0;
  Held status;

  void add(const Case& one, const Held& frame, const Held& base, const Held& words) {
    zipccl::DecodeJob& job = jobs.job[jobs.count++];
    job.header = frame->at(), job.payload = frame->at() + zipccl::kHeaderBytes, job.bytes = frame->bytes();
    job.words = words->at(), job.base = base ? base->at() : nullptr;
    job.numel = one.numel, job.first_item = items;
    items += items_of(one);
    held.insert(held.end(), {frame, base, words});
  }
  void launch(const Case& like, Stream stream) {
    status = filled(8, 0xff, stream);
    jobs.block = like.block, jobs.dtype = like.dtype, jobs.status = status->as<uint64_t>();
    const std::string kernel = std::string("zipccl_decode_") + type_name(like.dtype) + of_code(like);
    start(kernel, items, shared_of<zipccl::DecodeShared>(like.itemsize), &jobs, stream);
  }
  std::string refused() const {
    const uint64_t found = status->value<uint64_t>();
    return found == kUntouched ? "" : "the frame was refused with code " + std::to_string(found & 255);
  }
};

std::string either(const std::string& first, const std::string& second) { return first.empty() ? second : first; }

Held base_of(const Case& one, size_t shift, Stream stream) { return one.code == kDelta ? buffer(one.base(), shift, stream) : nullptr; }

// Encodes words that lie `shift` bytes after a multiple of 16 into a slot of exactly the frame's size.
Trial encode_whole(const Case& one, size_t shift, Stream stream) {
  auto run = std::make_shared<Encoding>();
  const Held slot = buffer(one.frame().size(), 0, stream);
  run->add(one, buffer(one.words(), shift, stream), base_of(one, shift, stream), slot);
  const auto verify = [=, &one] {
    return run->overflows->value<uint32_t>() ? std::string("the frame did not fit") : slot->differs(one.frame());
  };
  return {"encode at +" + std::to_string(shift), [=, &one] { run->launch(one, stream); }, verify};
}

// Encodes into a slot that is too small: the header says so, and how many bytes the frame needs.
Trial encode_short(const Case& one, size_t room, Stream stream) {
  auto run = std::make_shared<Encoding>();
  const Held slot = buffer(room, 0, stream);
  run->add(one, buffer(one.words(), 0, stream), base_of(one, 0, stream), slot);
  const auto verify = [=, &one]() -> std::string {
    uint8_t header[zipccl::kHeaderBytes];
    uint64_t size;
    download(header, slot->at(), sizeof header);
    memcpy(&size, header + 24, 8);
    if (header[7] != zipccl::kFlagOverflow || run->overflows->value<uint32_t>() != 1) return "no overflow is reported";
    if (size != one.frame().size()) return "the header has a size of " + std::to_string(size) + " bytes";
    return slot->overwritten(slot->bytes());
  };
  return {"encode into " + std::to_string(room) + " bytes", [=, &one] { run->launch(one, stream); }, verify};
}

Trial decode_whole(const Case& one, size_t shift, bool in_place, Stream stream) {
  auto run = std::make_shared<Decoding>();
  const Held base = base_of(one, shift, stream);
  const Held words = in_place ? base : buffer(one.words().size(), shift, stream);
  run->add(one, buffer(one.frame(), 0, stream), base, words);
  const auto verify = [=, &one] { return either(run->refused(), words->differs(one.words())); };
  return {"decode at +" + std::to_string(shift) + (in_place ? " in place" : ""), [=, &one] { run->launch(one, stream); }, verify};
}

// Decodes `frame`, which is damaged: the words may be anything, nothing else may be written, and a frame `cut` short must be refused.
Trial decode_damaged(const Case& one, const Bytes& frame, bool cut, Stream stream) {
  auto run = std::make_shared<Decoding>();
  const Held words = buffer(one.words().size(), 0, stream);
  run->add(one, buffer(frame, 0, stream), base_of(one, 0, stream), words);
  const auto verify = [=]() -> std::string {
    if (cut && run->refused().empty()) return "a frame without its end was taken";
    return words->overwritten(words->bytes());
  };
  return {cut ? "decode a part" : "decode a damaged frame", [=, &one] { run->launch(one, stream); }, verify};
}

Trial hash_words(const Case& one, size_t shift, Stream stream) {
  const Held words = buffer(one.words(), shift, stream), work = filled(24, 0, stream);
  const auto launch = [=] {
    zipccl::HashJob job = {};
    job.data = words->at(), job.bytes = words->bytes(), job.sums = work->as<uint64_t>(), job.ticket = work->as<uint32_t>() + 4;
    const uint64_t blocks = (words->bytes() + 8191) / 8192;
    start("zipccl_hash", blocks < 1 ? 1 : blocks > 1024 ? 1024 : blocks, 0, &job, stream);
  };
  const auto verify = [=, &one]() -> std::string {
    uint64_t found[2];
    download(found, work->at(), sizeof found);
    return memcmp(found, one.hash, sizeof found) ? "another hash" : words->overwritten(words->bytes());
  };
  return {"hash at +" + std::to_string(shift), launch, verify};
}

Trial sum_frames(const Case& one, bool fp32, size_t shift, Stream stream) {
  auto held = std::make_shared<std::vector<Held>>();
  for (size_t i = 0; i < one.frames(); ++i) held->push_back(buffer(one.blob[2 + i], 0, stream));
  const Bytes& wanted = fp32 ? one.floats() : one.rounded();
  const Held sums = buffer(wanted.size(), shift, stream), status = filled(8, 0xff, stream);
  const auto launch = [=, &one] {
    zipccl::SumJob job = {};
    for (const Held& frame : *held) {
      job.frame[job.count] = frame->at(), job.capacity[job.count] = frame->bytes();
      ++job.count;
    }
    job.block = one.block, job.dtype = one.dtype, job.fp32_sums = fp32;
    job.sums = sums->at(), job.numel = one.numel, job.status = status->as<uint64_t>();
    const size_t shared = one.itemsize == 2 ? sizeof(zipccl::SumShared<zipccl::Bf16>) : sizeof(zipccl::SumShared<zipccl::Fp32>);
    start(std::string("zipccl_decode_sum_") + type_name(one.dtype), chunks_of(one.numel, one.block), shared, &job, stream);
  };
  const auto verify = [=, &wanted]() -> std::string {
    const uint64_t found = status->value<uint64_t>();
    return found == kUntouched ? sums->differs(wanted) : "a frame was refused with code " + std::to_string(found & 255);
  };
  return {std::string(fp32 ? "sum in fp32" : "sum rounded") + " at +" + std::to_string(shift), launch, verify};
}

Trial encode_together(const std::vector<const Case*>& cases, Stream stream) {
  auto run = std::make_shared<Encoding>();
  auto slots = std::make_shared<std::vector<Held>>();
  for (const Case* one : cases) {
    slots->push_back(buffer(one->frame().size(), 0, stream));
    run->add(*one, buffer(one->words(), 0, stream), base_of(*one, 0, stream), slots->back());
  }
  const auto verify = [=] {
    std::string wrong;
    for (size_t i = 0; i < cases.size(); ++i) wrong = either(wrong, (*slots)[i]->differs(cases[i]->frame()));
    return wrong;
  };
  return {"encode " + std::to_string(cases.size()) + " tensors", [=] { run->launch(*cases[0], stream); }, verify};
}

Trial decode_together(const std::vector<const Case*>& cases, Stream stream) {
  auto run = std::make_shared<Decoding>();
  auto outs = std::make_shared<std::vector<Held>>();
  for (const Case* one : cases) {
    outs->push_back(buffer(one->words().size(), 0, stream));
    run->add(*one, buffer(one->frame(), 0, stream), base_of(*one, 0, stream), outs->back());
  }
  const auto verify = [=] {
    std::string wrong = run->refused();
    for (size_t i = 0; i < cases.size(); ++i) wrong = either(wrong, (*outs)[i]->differs(cases[i]->words()));
    return wrong;
  };
  return {"decode " + std::to_string(cases.size()) + " frames", [=] { run->launch(*cases[0], stream); }, verify};
}

// ------------------------------------------------------------------------------------------------------------------------------ the run

using MakeTrial = std::function<Trial(Stream)>;
constexpr size_t kStreams = 4, kDamages = 4;

// A frame with a few bytes changed, different for every `number`.
Bytes damaged(const Case& one, uint64_t number) {
  Bytes frame = one.frame();
  uint64_t state = (number + 1) * 0x9e3779b97f4a7c15ull + one.numel;
  for (uint32_t i = 0; i < 1 + number % 3; ++i) {
    state ^= state >> 12, state ^= state << 25, state ^= state >> 27;
    frame[(state >> 20) % frame.size()] ^= uint8_t(1 + state % 255);
  }
  return frame;
}

std::vector<MakeTrial> trials_of(const Case& one) {
  std::vector<MakeTrial> made;
  const auto add = [&](MakeTrial trial) { made.push_back(std::move(trial)); };
  if (one.kind == kSum) {
    for (const bool fp32 : {false, true})
      for (const size_t words : {0, 1}) {
        const size_t shift = words * (fp32 ? 4 : one.itemsize);
        add([=, &one](Stream stream) { return sum_frames(one, fp32, shift, stream); });
      }
    return made;
  }
  for (const size_t words : {0, 1, 5}) {
    const size_t shift = words * one.itemsize;
    add([=, &one](Stream stream) { return encode_whole(one, shift, stream); });
    add([=, &one](Stream stream) { return decode_whole(one, shift, false, stream); });
    add([=, &one](Stream stream) { return hash_words(one, shift, stream); });
  }
  const size_t size = one.frame().size();
  if (one.code == kDelta) add([=, &one](Stream stream) { return decode_whole(one, 0, true, stream); });
  for (const size_t room : {size_t(32), size - 16})
    if (room >= zipccl::kHeaderBytes && room < size) add([=, &one](Stream stream) { return encode_short(one, room, stream); });
  if (one.numel) {
    add([=, &one](Stream stream) { return decode_damaged(one, Bytes(one.frame().begin(), one.frame().end() - 16), true, stream); });
    for (uint64_t i = 0; i < kDamages; ++i)
      add([=, &one](Stream stream) { return decode_damaged(one, damaged(one, i), false, stream); });
  }
  return made;
}

// Runs the trials, each on the next stream, `kStreams` at a time. Returns what is wrong, a line for each.
std::vector<std::string> run_trials(const std::vector<MakeTrial>& trials, const std::vector<Stream>& streams) {
  std::vector<std::string> wrong;
  for (size_t first = 0; first < trials.size(); first += streams.size()) {
    std::vector<Trial> together;
    for (size_t i = first; i < trials.size() && i < first + streams.size(); ++i) together.push_back(trials[i](streams[i - first]));
    for (const Trial& trial : together) trial.launch();
    finish();
    for (const Trial& trial : together) {
      const std::string why = trial.verify();
      if (!why.empty()) wrong.push_back(trial.name + ": " + why);
    }
  }
  return wrong;
}

int report(const char* name, const char* what, size_t trials, const std::vector<std::string>& wrong) {
  printf("%-28s %-32s %3zu trials %s\n", name, what, trials, wrong.empty() ? "equal" : "WRONG");
  for (const std::string& line : wrong) printf("    %s\n", line.c_str());
  fflush(stdout);
  return wrong.empty() ? 0 : 1;
}

#ifdef __CUDACC__
// ----------------------------------------------------------------------------------------------------- the mistakes that sanitizers notice

__global__ void past_the_end(uint32_t* memory, uint32_t words) { memory[words + threadIdx.x] = 1; }
__global__ void two_warps_race(uint32_t* out) {
  __shared__ volatile uint32_t word;
  if (threadIdx.x == 0) word = out[0];
  if (threadIdx.x == 64) out[1] = word;
}
__global__ void read_undefined(const uint32_t* memory, uint32_t* out) { out[threadIdx.x] = memory[threadIdx.x]; }
__global__ void half_a_barrier(uint32_t* out) {
  if (threadIdx.x < 48) {
    __syncthreads();
    out[threadIdx.x] = 1;
  }
}

int plant(const std::string& tool) {
  uint32_t* const memory = static_cast<uint32_t*>(device_memory(1024));
  uint32_t* const undefined = static_cast<uint32_t*>(device_memory(1024));
  set_bytes(memory, 0, 1024, nullptr);
  if (tool == "memcheck") {
    past_the_end<<<1, 32>>>(memory, 256);
  } else if (tool == "racecheck") {
    two_warps_race<<<1, 96>>>(memory);
  } else if (tool == "initcheck") {
    read_undefined<<<1, 32>>>(undefined, memory);
  } else if (tool == "synccheck") {
    half_a_barrier<<<1, 96>>>(memory);
  } else {
    stop("--plant: no mistake is known for " + tool);
  }
  MUST(cudaGetLastError());
  finish();
  printf("planted for %s\n", tool.c_str());
  return 0;
}
#else
int plant(const std::string& tool) { stop("--plant " + tool + " is for a GPU"); }
#endif

}  // namespace

int main(int count, char** words) {
  const char *path = nullptr, *library = nullptr;
  std::string planted;
  for (int i = 1; i < count; ++i) {
    const std::string word = words[i];
    if (word == "--bare") {
      bare = true;
    } else if (word == "--library" && i + 1 < count) {
      library = words[++i];
    } else if (word == "--plant" && i + 1 < count) {
      planted = words[++i];
    } else if (word[0] != '-' && !path) {
      path = words[i];
    } else {
      stop("usage: driver CASES [--bare] [--plant TOOL] [--library EMULATION]");
    }
  }
  open_device(library);
  if (!planted.empty()) return plant(planted);
  if (!path) stop("name the file of cases; tests/gpu/golden_cases.py writes it");
  const std::vector<Case> cases = read_cases(path);
  std::vector<Stream> streams;
  for (size_t i = 0; i < kStreams; ++i) streams.push_back(new_stream());
  int wrong = 0;
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, std::vector<const Case*>> alike;
  for (const Case& one : cases) {
    const std::vector<MakeTrial> trials = trials_of(one);
    const std::string what = std::string(type_name(one.dtype)) + " " + (one.kind == kSum ? "sum" : kCodes[one.code]) + " block " +
                             std::to_string(one.block) + " numel " + std::to_string(one.numel);
    wrong += report(one.name, what.c_str(), trials.size(), run_trials(trials, streams));
    if (one.kind == kFrame) alike[{one.dtype, one.code, one.block}].push_back(&one);
  }
  std::vector<MakeTrial> many;
  for (const auto& each : alike) {
    std::vector<const Case*> group = each.second;
    if (group.size() > zipccl::kMaxJobs) group.resize(zipccl::kMaxJobs);
    many.push_back([=](Stream stream) { return encode_together(group, stream); });
    many.push_back([=](Stream stream) { return decode_together(group, stream); });
  }
  wrong += report("launches of many jobs", "", many.size(), run_trials(many, streams));
  if (wrong) {
    printf("%d of %zu cases differ\n", wrong, cases.size());
  } else {
    printf("equal: %zu cases\n", cases.size());
  }
  return wrong ? 1 : 0;
}
