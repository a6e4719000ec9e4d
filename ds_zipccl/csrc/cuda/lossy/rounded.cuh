// Rounded words for CUDA (FORMAT.md 2.9): the words alone, and the size that a rounded payload has without its trims. Encoder and decoder
// of rounded payloads are those of exponent payloads.
#pragma once
#include "cuda/decode.cuh"
#include "cuda/encode.cuh"

namespace zipccl {
namespace {

struct RoundJob {
  const void* words;  // at any address of a word
  void* out;          // at any address of a word; may be `words`
  uint64_t numel;
  uint32_t mantissa;
};

// Lanes take octets.
template <typename F>
ZIPCCL_DEVICE void round_words(const RoundJob& job) {
  using Word = typename F::Word;
  const Rounded<F> grid(job.mantissa);
  const uint64_t step = uint64_t(gridDim.x) * kThreads * 8;
  for (uint64_t at = (uint64_t(blockIdx.x) * kThreads + threadIdx.x) * 8; at < job.numel; at += step) {
    const uint32_t length = uint32_t(job.numel - at < 8 ? job.numel - at : 8);
    Octet<F> octet;
    octet.load(static_cast<const Word*>(job.words) + at, length, 0);
    grid.octet(octet);
    octet.store(static_cast<Word*>(job.out) + at, length);
  }
}

struct UntrimmedJob {
  const uint8_t* payload;  // a rounded payload, a multiple of 16
  const uint64_t* bytes;   // where its size is
  uint64_t* untrimmed;     // to this the size without trims is added
  uint64_t numel, capacity;
  uint32_t first_item, unused;  // its chunks, or one item for a job without words
};
struct UntrimmedJobs {
  UntrimmedJob job[kMaxJobs];
  uint32_t count, block;
};

struct UntrimmedShared {
  Entry entry[kWarps][kChunkBlocks];
};

// A warp takes a chunk. A payload that did not fit has no sizes.
template <typename F>
ZIPCCL_DEVICE void count_untrimmed(const UntrimmedJobs& jobs) {
  ZIPCCL_SHARED(UntrimmedShared, shared);
  const uint32_t item = blockIdx.x * kWarps + warp_id(), per_chunk = jobs.block * kChunkBlocks;
  const UntrimmedJob& job = jobs.job[job_of(jobs, item)];
  const uint32_t chunk = item - job.first_item, chunks = pieces(job.numel, per_chunk);
  if (chunk >= chunks || *job.bytes > job.capacity) return;
  const uint64_t first = uint64_t(chunk) * per_chunk;
  const uint32_t numel = uint32_t(job.numel - first < per_chunk ? job.numel - first : per_chunk), blocks = pieces(numel, jobs.block);
  const ChunkBytes found = find_chunk(job.payload, *job.bytes, chunk, chunks);
  Entry* const entries = shared.entry[warp_id()];
  if (!found.at || !read_table<Trimmed<F>>(found.at, found.bytes, numel, jobs.block, entries)) return;
  __syncwarp();
  uint32_t bodies = 0, tails = 0;
  for (uint32_t b = 0; b < blocks; ++b) {
    const Entry& entry = entries[b];
    const uint32_t n = least(numel - b * jobs.block, jobs.block);
    ZeroMap map = {};
    if (entry.mode == SPARSE) read_zero_map(found.at + entry.tail, entry.tail_bytes, Part{n}, map);
    const Untrimmed size = untrimmed_block<F>(entry.mode, n, entry.trim, entry.tail_bytes, map.others);
    bodies += size.body, tails += size.tail;
  }
  const uint64_t bytes = (chunk ? 0 : pad16(4 * chunks)) + table_bytes<F>(blocks) + bodies + pad16(tails);
  if (lane_id() == 0) atomicAdd(reinterpret_cast<unsigned long long*>(job.untrimmed), static_cast<unsigned long long>(bytes));
}

}  // namespace
}  // namespace zipccl
