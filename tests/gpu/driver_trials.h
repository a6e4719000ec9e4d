// The trials of the driver on frames: cases from the file, and runs of kernels on them.
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
  uint32_t element_log2, unused;  // an element of the tensor has 1 << element_log2 words
  uint64_t numel, hash[2];        // words
};
static_assert(sizeof(Head) == 104, "golden_cases.HEAD");

struct Case : Head {
  std::vector<Bytes> blob;
  // Of a frame: its words, the frame, and the base of a delta frame.
  const Bytes& words() const { return blob[0]; }
  const Bytes& frame() const { return blob[1]; }
  const Bytes& base() const { return blob[2]; }
  // Of a sum: the sum rounded, the sum in floats, the frames of the summands, and their words.
  const Bytes& rounded() const { return blob[0]; }
  const Bytes& floats() const { return blob[1]; }
  size_t summands() const { return (blob.size() - 2) / 2; }
  const Bytes& frame_of(size_t k) const { return blob[2 + k]; }
  const Bytes& words_of(size_t k) const { return blob[2 + summands() + k]; }
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
    const bool whole = each.kind == kSum ? each.blob.size() >= 4 && each.blob.size() % 2 == 0
                                         : each.blob.size() == (each.code == kDelta ? 3u : 2u);
    if (!whole) stop(std::string(each.name) + " lacks a part");
  }
  fclose(file);
  return cases;
}

// ------------------------------------------------------------------------------------------------------------------- jobs and launches

constexpr uint64_t kUntouched = ~0ull;  // a status before a failure

// The status of a failure; the rank is 0xffff in calls without ranks.
uint64_t failure(uint64_t rank, uint64_t frame, uint64_t chunk, uint32_t code) { return rank << 48 | frame << 32 | chunk << 8 | code; }
std::string other_status(uint64_t found, uint64_t wanted) {
  if (found == wanted) return "";
  char text[80];
  snprintf(text, sizeof text, "the status is %016llx, wanted is %016llx", (unsigned long long)found, (unsigned long long)wanted);
  return text;
}
std::string of_split(uint32_t split) { return split ? ", chunks in " + std::to_string(1 << split) + " parts" : ""; }

const char* type_name(uint32_t dtype) {
  static const std::map<uint32_t, const char*> names = {{1, "bf16"}, {2, "fp16"}, {3, "fp32"}, {13, "e4m3"}, {14, "e5m2"}};
  const auto found = names.find(dtype);
  return found == names.end() ? "u8" : found->second;
}
const char* type_name(const Case& one) { return one.code == kDelta && one.itemsize == 1 ? "u8" : type_name(one.dtype); }
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

  void add(const Case& one, const Held& words, const Held& base, const Held& slot, bool raw = false) {
    zipccl::EncodeJob& job = jobs.job[jobs.count++];
    job.raw = raw;
    job.words = words->at(), job.base = base ? base->at() : nullptr;
    job.header = slot->at(), job.payload = slot->at() + zipccl::kHeaderBytes;
    job.capacity = slot->bytes() - zipccl::kHeaderBytes;
    job.numel = one.numel, job.first_item = items;
    items += items_of(one);
    held.insert(held.end(), {words, base, slot});
  }
  void launch(const Case& like, uint32_t split, Stream stream) {
    const uint64_t parts = items << split;
    work = filled(16 + 8 * (items + (split ? parts : 0)), 0, stream), overflows = filled(4, 0, stream);
    jobs.block = like.block, jobs.dtype = like.dtype, jobs.split = split, jobs.element_log2 = like.element_log2;
    jobs.ticket = work->as<uint32_t>(), jobs.places = work->as<uint64_t>() + 2, jobs.overflows = overflows->as<uint32_t>();
    jobs.sizes = split ? jobs.places + items : nullptr;
    const std::string kernel = std::string("zipccl_encode_") + type_name(like) + "_" + kCodes[like.code];
    start(kernel, parts, 1, shared_of<zipccl::EncodeShared>(like.itemsize), &jobs, stream);
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
  // The frames of one rank, or those of `ranks` ranks without jobs.skip.
  void launch(const Case& like, uint32_t split, Stream stream, uint32_t ranks = 0) {
    status = filled(8, 0xff, stream);
    jobs.block = like.block, jobs.dtype = like.dtype, jobs.split = split, jobs.status = status->as<uint64_t>();
    jobs.element_log2 = like.element_log2;
    if (!ranks) jobs.skip = zipccl::kNone;
    const std::string kernel = std::string("zipccl_decode_") + type_name(like) + of_code(like);
    start(kernel, items << split, ranks ? ranks - 1 : 1, shared_of<zipccl::DecodeShared>(like.itemsize), &jobs, stream);
  }
  std::string refused() const { return other_status(status->value<uint64_t>(), kUntouched); }
};

std::string either(const std::string& first, const std::string& second) { return first.empty() ? second : first; }

Held base_of(const Case& one, size_t shift, Stream stream) { return one.code == kDelta ? buffer(one.base(), shift, stream) : nullptr; }

// The raw frame of `words` (FORMAT.md section 1).
Bytes raw_frame(const Case& one, const Bytes& words) {
  const uint64_t numel = one.numel >> one.element_log2, bytes = zipccl::kHeaderBytes + words.size();
  Bytes frame(bytes, 0);
  const uint8_t begin[] = {'Z', 'C', 'C', 'L', zipccl::kVersion, zipccl::kCodecRaw, uint8_t(one.dtype)};
  memcpy(frame.data(), begin, sizeof begin), memcpy(frame.data() + 16, &numel, 8), memcpy(frame.data() + 24, &bytes, 8);
  if (!words.empty()) memcpy(frame.data() + zipccl::kHeaderBytes, words.data(), words.size());
  return frame;
}

// How a frame is made and read: the words lie `shift` bytes after a multiple of 16; chunks are cut into 1 << split parts.
struct Way {
  size_t shift = 0;
  uint32_t split = 0;
  bool raw = false, in_place = false;

  std::string name() const {
    return " at +" + std::to_string(shift) + of_split(split) + (raw ? ", raw" : "") + (in_place ? ", in place" : "");
  }
  Bytes frame(const Case& one) const { return raw ? raw_frame(one, one.words()) : one.frame(); }
};

using Cases = std::vector<const Case*>;

std::string of_many(const Cases& cases) { return cases.size() > 1 ? " " + std::to_string(cases.size()) + " tensors" : ""; }

// Encodes each tensor into a slot of exactly the frame's size. Of many every third frame is raw.
Trial encode(const Cases& cases, const Way& way, Stream stream) {
  auto run = std::make_shared<Encoding>();
  auto slots = std::make_shared<std::vector<Held>>();
  auto frames = std::make_shared<std::vector<Bytes>>();
  for (const Case* one : cases) {
    const Way own = {way.shift, way.split, way.raw || frames->size() % 3 == 2};
    frames->push_back(own.frame(*one));
    slots->push_back(buffer(frames->back().size(), 0, stream));
    run->add(*one, buffer(one->words(), way.shift, stream), base_of(*one, way.shift, stream), slots->back(), own.raw);
  }
  const auto verify = [=] {
    std::string wrong = run->overflows->value<uint32_t>() ? "a frame did not fit" : "";
    for (size_t i = 0; i < cases.size(); ++i) wrong = either(wrong, (*slots)[i]->differs((*frames)[i]));
    return wrong;
  };
  return {"encode" + of_many(cases) + way.name(), [=] { run->launch(*cases[0], way.split, stream); }, verify};
}

// Encodes into a slot that is too small: the header says so, and how many bytes the frame needs.
Trial encode_short(const Case& one, size_t room, const Way& way, Stream stream) {
  auto run = std::make_shared<Encoding>();
  const Held slot = buffer(room, 0, stream);
  run->add(one, buffer(one.words(), 0, stream), base_of(one, 0, stream), slot, way.raw);
  const size_t wanted = way.frame(one).size();
  const auto verify = [=]() -> std::string {
    uint8_t header[zipccl::kHeaderBytes];
    uint64_t size;
    download(header, slot->at(), sizeof header);
    memcpy(&size, header + 24, 8);
    if (header[7] != zipccl::kFlagOverflow || run->overflows->value<uint32_t>() != 1) return "no overflow is reported";
    if (size != wanted) return "the header has a size of " + std::to_string(size) + " bytes";
    return slot->overwritten(slot->bytes());
  };
  return {"encode into " + std::to_string(room) + " bytes" + way.name(), [=, &one] { run->launch(one, way.split, stream); }, verify};
}

Trial decode(const Cases& cases, const Way& way, Stream stream) {
  auto run = std::make_shared<Decoding>();
  auto outs = std::make_shared<std::vector<Held>>();
  for (const Case* one : cases) {
    const Way own = {way.shift, way.split, way.raw || outs->size() % 3 == 2};
    const Held base = base_of(*one, way.shift, stream);
    outs->push_back(way.in_place ? base : buffer(one->words().size(), way.shift, stream));
    run->add(*one, buffer(own.frame(*one), 0, stream), base, outs->back());
  }
  const auto verify = [=] {
    std::string wrong = run->refused();
    for (size_t i = 0; i < cases.size(); ++i) wrong = either(wrong, (*outs)[i]->differs(cases[i]->words()));
    return wrong;
  };
  return {"decode" + of_many(cases) + way.name(), [=] { run->launch(*cases[0], way.split, stream); }, verify};
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
  return {cut ? "decode a part" : "decode a damaged frame", [=, &one] { run->launch(one, 0, stream); }, verify};
}

// Whether the last chunk of a frame has bytes that can be wrong: a SAME chunk has none.
bool ends_with_bytes(const Case& one) {
  uint32_t place;
  memcpy(&place, one.frame().data() + zipccl::kHeaderBytes + 4 * (chunks_of(one.numel, one.block) - 1), 4);
  return one.code != kDelta || zipccl::kHeaderBytes + 16 * size_t(place & ~zipccl::kListBit) < one.frame().size();
}

// Decodes a frame whose last chunk has an impossible table or number of levels: the words of this chunk become NaN, all others are right.
Trial decode_bad_chunk(const Case& one, const Way& way, Stream stream) {
  auto run = std::make_shared<Decoding>();
  const uint64_t chunk = chunks_of(one.numel, one.block) - 1, first = chunk * one.block * zipccl::kChunkBlocks;
  const uint64_t blocks = (one.numel - first + one.block - 1) / one.block;
  Bytes frame = one.frame(), wanted = one.words();
  uint32_t place;
  memcpy(&place, frame.data() + zipccl::kHeaderBytes + 4 * chunk, 4);
  const bool list = one.code == kDelta && (place & zipccl::kListBit);
  if (list) place &= ~zipccl::kListBit;
  memset(frame.data() + zipccl::kHeaderBytes + 16 * size_t(place) + (list ? 0 : blocks), 0xff, list ? 1 : 2 * blocks);
  std::fill(wanted.begin() + ptrdiff_t(first * one.itemsize), wanted.end(), 0xff);
  const Held words = buffer(wanted.size(), way.shift, stream);
  run->add(one, buffer(frame, 0, stream), base_of(one, way.shift, stream), words);
  const auto verify = [=] {
    const std::string status = other_status(run->status->value<uint64_t>(), failure(0xffff, 0, chunk, zipccl::BLOCK));
    return either(status, words->differs(wanted));
  };
  return {"decode a bad chunk" + way.name(), [=, &one] { run->launch(one, way.split, stream); }, verify};
}

}  // namespace
