// The trials of the driver on several tensors: sums, hashes, and gathers over ranks.
#pragma once
#include "driver_trials.h"

namespace {

size_t pad16(size_t bytes) { return (bytes + 15) / 16 * 16; }
void put(Bytes& to, size_t at, const Bytes& from) { std::copy(from.begin(), from.end(), to.begin() + ptrdiff_t(at)); }

// ---------------------------------------------------------------------------------------------------------------------------------- sums

enum Summands { kListed, kRegular, kPlain, kBad };  // frames anywhere; frames at a regular distance; plain words; frames, the last is bad
constexpr const char* kSummands[] = {"frames", "regular frames", "plain words", "a bad frame"};

// How summands are added. `own`: one of them is plain words, in the place of the sums if these are words.
struct Adding {
  Summands summands;
  bool fp32, own;
  size_t shift;
  uint32_t split;

  std::string name() const {
    return std::string("sum of ") + kSummands[summands] + (fp32 ? " in fp32" : "") + (own ? ", own words" : "") + " at +" +
           std::to_string(shift) + of_split(split);
  }
};

Trial sum_up(const Case& one, const Adding& way, Stream stream) {
  auto held = std::make_shared<std::vector<Held>>();
  auto job = std::make_shared<zipccl::SumJob>();
  const uint32_t count = uint32_t(one.summands()), own_at = way.own ? count / 2 : zipccl::kNone, bad = count - 1;
  Bytes wanted = way.fp32 ? one.floats() : one.rounded();
  const Held sums = buffer(wanted.size(), way.shift, stream), status = filled(8, 0xff, stream);
  *job = {};
  job->count = count, job->own_at = own_at;
  if (way.own) {
    if (!way.fp32) upload(sums->at(), one.words_of(own_at).data(), sums->bytes(), stream);
    const Held own = way.fp32 ? buffer(one.words_of(own_at), way.shift, stream) : sums;
    job->own = own->at();
    held->push_back(own);
  }
  std::vector<Bytes> parts;
  for (uint32_t k = 0; k < count; ++k) {
    parts.push_back(way.summands == kPlain ? one.words_of(k) : one.frame_of(k));
    if (k == own_at) parts[k].assign(parts[k].size(), 0xa7);  // not read
    if (k == bad && way.summands == kBad) parts[k][0] ^= 1;
  }
  if (way.summands == kListed || way.summands == kBad) {
    for (uint32_t k = 0; k < count; ++k) {
      if (k == own_at) continue;
      held->push_back(buffer(parts[k], 0, stream));
      job->frame[k] = held->back()->at(), job->capacity[k] = parts[k].size();
    }
  } else {
    size_t most = 0;
    for (const Bytes& part : parts) most = part.size() > most ? part.size() : most;
    job->plain = way.summands == kPlain, job->capacity[0] = most;
    job->stride = job->plain ? most + one.itemsize : pad16(most) + 16;
    Bytes slab((count - 1) * job->stride + most, 0x99);
    for (uint32_t k = 0; k < count; ++k) put(slab, k * job->stride, parts[k]);
    held->push_back(buffer(slab, job->plain ? one.itemsize : 0, stream));
    job->frame[0] = held->back()->at();
  }
  if (way.summands == kBad) wanted.assign(wanted.size(), 0xff);
  const auto launch = [=, &one] {
    job->block = one.block, job->dtype = one.dtype, job->fp32_sums = way.fp32, job->split = way.split;
    job->sums = sums->at(), job->numel = one.numel, job->status = status->as<uint64_t>();
    const size_t shared = one.itemsize == 2 ? sizeof(zipccl::SumShared<zipccl::Bf16>) : sizeof(zipccl::SumShared<zipccl::Fp32>);
    const std::string kernel = std::string("zipccl_decode_sum_") + type_name(one.dtype);
    start(kernel, chunks_of(one.numel, one.block) << way.split, 1, shared, job.get(), stream);
  };
  const auto verify = [=] {
    const uint64_t expected = way.summands == kBad ? failure(0xffff, bad, 0, zipccl::MAGIC) : kUntouched;
    (void)held;  // the summands live until here
    return either(other_status(status->value<uint64_t>(), expected), sums->differs(wanted));
  };
  return {way.name(), launch, verify};
}

// Lists have at most 48 summands, regular ones any number. Each layout is cut in another way, with each kind of sums.
std::vector<Adding> additions(const Case& one) {
  std::vector<Adding> made;
  const bool listed = one.summands() <= zipccl::kMaxFrames;
  for (const bool fp32 : {false, true}) {
    const size_t item = fp32 ? 4 : one.itemsize;
    if (listed) {
      made.insert(made.end(), {{kListed, fp32, false, 0, 0}, {kListed, fp32, false, item, 1}, {kListed, fp32, true, item, 2}});
      made.insert(made.end(), {{kBad, fp32, false, 0, 2}, {kBad, fp32, true, item, 0}});
    }
    made.insert(made.end(), {{kRegular, fp32, false, item, 2}, {kRegular, fp32, true, 0, 1}});
    made.insert(made.end(), {{kPlain, fp32, false, 0, 1}, {kPlain, fp32, true, item, 0}});
  }
  return made;
}

// -------------------------------------------------------------------------------------------------------------------------------- hashes

Trial hash_words(const Cases& cases, size_t shift, Stream stream) {
  auto held = std::make_shared<std::vector<Held>>();
  for (const Case* one : cases) held->push_back(buffer(one->words(), shift * one->itemsize, stream));
  const Held work = filled(24 * cases.size(), 0, stream), result = filled(16 * cases.size(), 0, stream);
  const auto launch = [=] {
    zipccl::HashJobs jobs = {};
    uint64_t items = 0;
    for (const Held& words : *held) {
      zipccl::HashJob& job = jobs.job[jobs.count++];
      const uint64_t blocks = (words->bytes() + 8191) / 8192;
      job.data = words->at(), job.bytes = words->bytes(), job.first_item = uint32_t(items);
      job.items = uint32_t(blocks < 1 ? 1 : blocks > 1024 ? 1024 : blocks);
      items += job.items;
    }
    jobs.work = work->as<uint64_t>(), jobs.result = result->as<uint64_t>();
    start("zipccl_hash", items, 1, 0, &jobs, stream);
  };
  const auto verify = [=] {
    std::vector<uint64_t> found(2 * cases.size());
    download(found.data(), result->at(), 16 * cases.size());
    std::string wrong;
    for (size_t i = 0; i < cases.size(); ++i) {
      if (memcmp(&found[2 * i], cases[i]->hash, 16)) wrong = either(wrong, "another hash");
      wrong = either(wrong, (*held)[i]->overwritten((*held)[i]->bytes()));
    }
    return wrong;
  };
  return {"hash of " + std::to_string(cases.size()) + " at word " + std::to_string(shift), launch, verify};
}

// ------------------------------------------------------------------------------------------------------------------------------- gathers

constexpr uint32_t kRanks = 5, kSkipped = 2, kFirstFrame = 100;
constexpr size_t kGap = 3;  // words between the shards of two ranks

// The words of a rank: those of the case, or others, whose frame is raw.
Bytes words_of(const Case& one, uint32_t rank) {
  Bytes words = one.words();
  if (rank % 2)
    for (uint8_t& byte : words) byte ^= uint8_t(rank);
  return words;
}

// Decodes the frames of all ranks but one. Nothing changes in the shards of this rank and between shards. `bad`: the last rank's frame of
// one tensor is refused, and its words become NaN.
Trial gather(const Cases& cases, uint32_t split, bool bad, Stream stream) {
  auto run = std::make_shared<Decoding>();
  auto outs = std::make_shared<std::vector<Held>>();
  auto wanted = std::make_shared<std::vector<Bytes>>();
  std::vector<size_t> places;
  size_t rank_bytes = 0, spoiled = 0;
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& one = *cases[i];
    const size_t words = zipccl::kHeaderBytes + one.words().size(), frame = one.frame().size();
    places.push_back(rank_bytes);
    rank_bytes += pad16(words > frame ? words : frame);
    if (one.numel) spoiled = i;
  }
  places.push_back(rank_bytes);
  Bytes slab(kRanks * rank_bytes, 0xee);
  for (size_t i = 0; i < cases.size(); ++i) {
    const Case& one = *cases[i];
    const size_t apart = (one.numel + kGap) * one.itemsize;
    Bytes out(kRanks * apart, 0xab), bases(kRanks * apart, 0xba);
    const Held words = buffer(out, one.itemsize, stream);
    for (uint32_t rank = 0; rank < kRanks; ++rank) {
      if (one.code == kDelta) put(bases, rank * apart, one.base());
      if (rank == kSkipped) continue;
      Bytes mine = words_of(one, rank), frame = rank % 2 ? raw_frame(one, mine) : one.frame();
      if (bad && i == spoiled && rank == kRanks - 1) frame[0] ^= 1, mine.assign(mine.size(), 0xff);
      put(slab, rank * rank_bytes + places[i], frame);
      put(out, rank * apart, mine);
    }
    run->add(one, words, one.code == kDelta ? buffer(bases, 0, stream) : nullptr, words);
    wanted->push_back(out);
    outs->push_back(words);
  }
  const Held there = buffer(slab, 0, stream);
  run->held.push_back(there);
  for (size_t i = 0; i < cases.size(); ++i) {
    zipccl::DecodeJob& job = run->jobs.job[i];
    job.header = there->at() + places[i], job.payload = job.header + zipccl::kHeaderBytes;
    job.bytes = places[i + 1] - places[i], job.stride = cases[i]->numel + kGap;
  }
  run->jobs.rank_bytes = rank_bytes, run->jobs.ranked = 1, run->jobs.skip = kSkipped, run->jobs.first_frame = kFirstFrame;
  const auto verify = [=] {
    const uint64_t expected = bad ? failure(kRanks - 1, kFirstFrame + spoiled, 0, zipccl::MAGIC) : kUntouched;
    std::string wrong = other_status(run->status->value<uint64_t>(), expected);
    for (size_t i = 0; i < cases.size(); ++i) wrong = either(wrong, (*outs)[i]->differs((*wanted)[i]));
    return wrong;
  };
  const std::string name = "gather of " + std::to_string(cases.size()) + (bad ? ", one is bad" : "") + of_split(split);
  return {name, [=] { run->launch(*cases[0], split, stream, kRanks); }, verify};
}

}  // namespace
