// The trials of the driver: cases from the file, and runs of kernels on them.
#pragma once
#include "driver_device.h"

namespace {

// ------------------------------------------------------------------------------------------------------------------------------- cases

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
    jobs.block = like.block, jobs.dtype = like.dtype, jobs.skip = zipccl::kNone, jobs.status = status->as<uint64_t>();
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
  const Held words = buffer(one.words(), shift, stream), work = filled(24, 0, stream), result = filled(16, 0, stream);
  const auto launch = [=] {
    zipccl::HashJobs jobs = {};
    const uint64_t blocks = (words->bytes() + 8191) / 8192;
    jobs.job[0].data = words->at(), jobs.job[0].bytes = words->bytes();
    jobs.job[0].items = uint32_t(blocks < 1 ? 1 : blocks > 1024 ? 1024 : blocks);
    jobs.work = work->as<uint64_t>(), jobs.result = result->as<uint64_t>(), jobs.count = 1;
    start("zipccl_hash", jobs.job[0].items, 0, &jobs, stream);
  };
  const auto verify = [=, &one]() -> std::string {
    uint64_t found[2];
    download(found, result->at(), sizeof found);
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
    job.block = one.block, job.dtype = one.dtype, job.fp32_sums = fp32, job.own_at = zipccl::kNone;
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

}  // namespace
