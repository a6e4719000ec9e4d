// Payload decoder for CUDA: a block of threads takes a chunk, its warps the blocks.
#pragma once
#include "cuda/delta.cuh"
#include "cuda/frame.cuh"

namespace zipccl {
namespace {

// Where a chunk of a payload lies, if its offsets are possible.
struct ChunkBytes {
  const uint8_t* at;  // null: they are not
  uint64_t bytes;
};
ZIPCCL_DEVICE ChunkBytes find_chunk(const uint8_t* payload, uint64_t bytes, uint32_t chunk, uint32_t chunks) {
  const uint32_t begin = pad16(4 * chunks);
  if (begin > bytes) return {nullptr, 0};
  const uint32_t* const index = reinterpret_cast<const uint32_t*>(payload);
  const uint64_t start = uint64_t(index[chunk]) * 16, end = chunk + 1 < chunks ? uint64_t(index[chunk + 1]) * 16 : bytes;
  if (start < begin || start > end || end > bytes || (chunk == 0 && start != begin)) return {nullptr, 0};
  return {payload + start, end - start};
}

// The status keeps the failure of the first job, and of its first chunk: job << 48 | chunk << 8 | status.
ZIPCCL_DEVICE void report(uint64_t* status, uint64_t job, uint64_t chunk, int32_t what) {
  atomicMin_system(reinterpret_cast<unsigned long long*>(status), static_cast<unsigned long long>(job << 48 | chunk << 8 | uint32_t(what)));
}

constexpr uint32_t kMaxDecodeJobs = 48;  // as kMaxJobs

struct DecodeJob {
  const uint8_t* payload;  // a multiple of 16
  const uint8_t* header;   // 32 bytes before it: a whole flat frame in `bytes` bytes of slot; or null: a payload of `bytes` bytes
  uint64_t bytes;
  void* words;             // at any address of a word
  const void* base;        // of a delta payload, at any address of a word; may be `words`
  uint64_t numel, first_item;
};

struct DecodeJobs {
  DecodeJob job[kMaxDecodeJobs];
  uint32_t count, block, dtype;
  uint64_t* status;              // all ones, unless a frame fails; may be host memory
};

// Copies the part of a raw frame that belongs to a work item.
ZIPCCL_DEVICE void copy_raw(const uint8_t* from, uint8_t* to, uint64_t bytes) {
  const bool aligned = (reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0;
  const uint64_t vectors = aligned ? bytes / 16 : 0;
  for (uint64_t i = threadIdx.x; i < vectors; i += kThreads) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
  for (uint64_t i = 16 * vectors + threadIdx.x; i < bytes; i += kThreads) to[i] = from[i];
}

template <typename F>
struct DecodeShared {
  DecodeScratch<F> scratch[kWarps];
  Entry entry[kChunkBlocks];
  const uint8_t* chunk;
  typename F::Word* words;
  const typename F::Word* base;
  uint32_t numel, good;
};

// A warp decodes its blocks, the whole ones or the partial ones. Returns whether they are good.
template <typename F, bool kWhole, bool kDelta = false>
ZIPCCL_DEVICE bool decode_blocks(DecodeShared<F>& shared, uint32_t block) {
  using Word = typename F::Word;
  const bool aligned = reinterpret_cast<uintptr_t>(shared.words) % 16 == 0;
  for (uint32_t b = warp_id(); b * block < shared.numel; b += kWarps) {
    const Entry& entry = shared.entry[b];
    Word* const words = shared.words + b * block;
    const uint32_t n = least(shared.numel - b * block, block);
    if ((aligned && is_whole(entry, n)) != kWhole) continue;
    bool good;
    if constexpr (kWhole) {
      const auto put = [=](uint32_t row, const Octet<F>& octet) {
        octet.store_whole(reinterpret_cast<uint8_t*>(words + row * kRow + 8 * lane_id()), 8 * sizeof(Word));
      };
      good = decode_whole<F>(shared.chunk, entry, shared.scratch[warp_id()], put);
    } else if (kDelta && entry.mode == CHANGE) {
      good = decode_change<F>(shared.chunk + entry.tail, entry.tail_bytes, shared.base + b * block, n, entry.top,
                              shared.scratch[warp_id()], words);
    } else {
      good = decode_part<F>(shared.chunk, entry, n, shared.scratch[warp_id()], words);
    }
    __syncwarp();  // the lists have been read
    if (!good) return false;
  }
  return true;
}

// One work item: a chunk of a job, or as many words of a raw frame; or a job without words.
template <typename F, bool kDelta = false>
ZIPCCL_DEVICE void decode(const DecodeJobs& jobs) {
  using Word = typename F::Word;
  ZIPCCL_SHARED(DecodeShared<F>, shared);
  const uint32_t item = blockIdx.x;
  uint32_t number = 0;
  while (number + 1 < jobs.count && jobs.job[number + 1].first_item <= item) ++number;
  const DecodeJob& job = jobs.job[number];
  const uint32_t block = jobs.block, per_chunk = block * kChunkBlocks;
  const uint32_t chunk = item - uint32_t(job.first_item), chunks = pieces(job.numel, per_chunk);
  const uint64_t first = uint64_t(chunk) * per_chunk;
  const uint32_t numel = uint32_t(job.numel - first < per_chunk ? job.numel - first : per_chunk);
  Word* const words = static_cast<Word*>(job.words) + first;
  uint64_t bytes = job.bytes;
  int32_t status = OK;
  bool raw = false;
  if (job.header) {
    const uint32_t codec = kDelta ? kCodecDelta : kCodecExponent;
    const Opened opened = read_header(job.header, job.bytes, codec, jobs.dtype, block, job.numel, sizeof(Word));
    status = opened.status, bytes = opened.payload_bytes, raw = !opened.coded;
  }
  if (status || chunk >= chunks) {  // the first item speaks for the frame
    if (!status && bytes) status = INDEX;
    if (status && chunk == 0 && threadIdx.x == 0) report(jobs.status, number, 0, status);
    return;
  }
  if (raw) {
    copy_raw(job.payload + first * sizeof(Word), reinterpret_cast<uint8_t*>(words), numel * sizeof(Word));
    return;
  }
  const ChunkBytes found = find_chunk(job.payload, bytes, chunk, chunks);
  if (warp_id() == 0) {
    status = INDEX;
    if (found.at) status = read_table<F, kDelta>(found.at, found.bytes, numel, block, shared.entry) ? OK : BLOCK;
    if (threadIdx.x == 0) {
      shared.chunk = found.at, shared.words = words, shared.numel = numel, shared.good = status == OK;
      shared.base = static_cast<const Word*>(job.base) + (kDelta ? first : 0);
      if (status) report(jobs.status, number, chunk, status);
    }
  }
  __syncthreads();
  if (!shared.good) return;
  // Rare blocks need more registers; they have a loop of their own.
  const bool good = decode_blocks<F, true>(shared, jobs.block) && decode_blocks<F, false, kDelta>(shared, jobs.block);
  if (!good && lane_id() == 0) report(jobs.status, number, chunk, BLOCK);
}

}  // namespace
}  // namespace zipccl
