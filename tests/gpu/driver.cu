// The CUDA kernels without torch: runs every kernel on the cases of a file (tests/gpu/golden_cases.py) and compares all bytes. Sanitizers
// watch this process, because it has nothing in it but the kernels. Compiled by nvcc it contains them. Compiled by a C++ compiler it runs
// the emulated kernels of a library on the CPU, so that continuous integration runs this very file.
//
//   driver CASES [--bare] [--plant TOOL] [--library EMULATION]
//
// --bare: each buffer is an allocation of exactly its size, with undefined content, for memcheck and initcheck. Otherwise buffers share
// one allocation, and guards stand around each. --plant: makes the mistake that the named sanitizer looks for, and nothing else: a sanitizer that does not notice
// this mistake does not work on this machine. Exit status: 0 all equal, 1 a difference, 2 the driver could not do its task.
#include "driver_many.h"

namespace {

// ------------------------------------------------------------------------------------------------------------------------------ the run

using MakeTrial = std::function<Trial(Stream)>;
constexpr size_t kStreams = 4, kDamages = 4;
constexpr uint64_t kGathered = 1 << 20;  // words of tensors that are gathered are fewer: ranks multiply them

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
    for (const Adding& way : additions(one)) add([=, &one](Stream stream) { return sum_up(one, way, stream); });
    return made;
  }
  const size_t word = one.itemsize;
  for (const Way& way : {Way{0, 0}, Way{word, 0}, Way{5 * word, 0}, Way{0, 1}, Way{word, 2}, Way{0, 0, true}, Way{word, 1, true}}) {
    add([=, &one](Stream stream) { return encode({&one}, way, stream); });
    add([=, &one](Stream stream) { return decode({&one}, way, stream); });
  }
  for (const size_t words : {0, 1, 5}) add([=, &one](Stream stream) { return hash_words({&one}, words, stream); });
  const size_t size = one.frame().size();
  if (one.code == kDelta)
    for (const uint32_t split : {0, 2}) add([=, &one](Stream stream) { return decode({&one}, {0, split, false, true}, stream); });
  if (size > zipccl::kHeaderBytes) {
    add([=, &one](Stream stream) { return encode_short(one, zipccl::kHeaderBytes, {0, 0}, stream); });
    add([=, &one](Stream stream) { return encode_short(one, size - 16, {0, 1}, stream); });
  }
  if (one.numel) {
    add([=, &one](Stream stream) { return encode_short(one, zipccl::kHeaderBytes, {0, 2, true}, stream); });
    if (ends_with_bytes(one)) {
      add([=, &one](Stream stream) { return decode_bad_chunk(one, {0, 0}, stream); });
      add([=, &one](Stream stream) { return decode_bad_chunk(one, {word, 2}, stream); });
    }
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
__global__ void a_lane_outside_of_the_mask(uint32_t* out) {
  if (threadIdx.x <= 16) {
    __syncwarp(0xffff);
    out[threadIdx.x] = 1;
  }
}

int plant(const std::string& tool) {
  uint32_t* const memory = static_cast<uint32_t*>(device_memory(1024));
  uint32_t* const undefined = static_cast<uint32_t*>(device_memory(1024));
  set_bytes(memory, 0, 1024, nullptr);
  if (tool == "memcheck") {
    past_the_end<<<1, 32>>>(undefined, 256);  // the last allocation: behind the first one may lie the second
  } else if (tool == "racecheck") {
    two_warps_race<<<1, 96>>>(memory);
  } else if (tool == "initcheck") {
    read_undefined<<<1, 32>>>(undefined, memory);
  } else if (tool == "synccheck") {
    a_lane_outside_of_the_mask<<<1, 32>>>(memory);
  } else {
    stop("--plant: no mistake is known for " + tool);
  }
  MUST(cudaGetLastError());
  finish();
  printf("planted for %s\n", tool.c_str());
  return 0;
}
#else
int plant(const std::string&) { return 0; }  // a dry run has a stand-in for the sanitizers, which finds it
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
  std::map<std::tuple<uint32_t, uint32_t, uint32_t>, Cases> alike;
  for (const Case& one : cases) {
    const std::vector<MakeTrial> trials = trials_of(one);
    const std::string what = std::string(type_name(one.dtype)) + " " + (one.kind == kSum ? "sum" : kCodes[one.code]) + " block " +
                             std::to_string(one.block) + " numel " + std::to_string(one.numel);
    wrong += report(one.name, what.c_str(), trials.size(), run_trials(trials, streams));
    if (one.kind == kFrame) alike[{one.dtype, one.code, one.block}].push_back(&one);
  }
  std::vector<MakeTrial> many;
  for (const auto& each : alike) {
    Cases group = each.second, small;
    if (group.size() > zipccl::kMaxJobs) group.resize(zipccl::kMaxJobs);
    for (const uint32_t split : {0, 2}) {
      many.push_back([=](Stream stream) { return encode(group, {0, split}, stream); });
      many.push_back([=](Stream stream) { return decode(group, {0, split}, stream); });
    }
    many.push_back([=](Stream stream) { return hash_words(group, 1, stream); });
    for (const Case* one : group)
      if (one->numel < kGathered) small.push_back(one);
    if (small.empty()) continue;
    for (const uint32_t split : {0, 1, 2}) many.push_back([=](Stream stream) { return gather(small, split, false, stream); });
    many.push_back([=](Stream stream) { return gather(small, 1, true, stream); });
  }
  wrong += report("launches of many jobs", "hashes and gathers too", many.size(), run_trials(many, streams));
  if (wrong) {
    printf("%d of %zu cases differ\n", wrong, cases.size());
  } else {
    printf("equal: %zu cases\n", cases.size());
  }
  return wrong ? 1 : 0;
}
