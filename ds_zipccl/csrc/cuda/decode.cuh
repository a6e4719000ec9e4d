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

// A frame of each rank. The grid's rows are the ranks whose frames are decoded; all addresses are those of rank 0.
struct DecodeJob {
  const uint8_t* payload;  // a multiple of 16
  const uint8_t* header;   // 32 bytes before it: a whole flat frame in `bytes` bytes of slot; or null: a payload of `bytes` bytes
  uint64_t bytes;
  void* words;             // at any address of a word
  const void* base;        // of a delta payload, at any address of a word; may be `words`
  uint64_t numel;
  uint64_t stride;         // words, and words of the base, from a rank to the next one
  uint32_t first_item, unused;
};

struct DecodeJobs {
  DecodeJob job[kMaxJobs];
  uint64_t rank_bytes;     // from a rank's frames to those of the next rank, a multiple of 16
  uint64_t* status;        // all ones, unless a frame fails; may be host memory
  uint32_t count, block, dtype;
  uint32_t first_frame;    // number of the first job among the frames of the call
  uint32_t ranked;         // or there are no ranks: the grid has one row
  uint32_t skip;           // the rank whose frames are not decoded, or kNone
};

template <typename F>
struct DecodeShared {
  DecodeScratch<F> scratch[kWarps];
  Entry entry[kChunkBlocks];
  const uint8_t* chunk;
  typename F::Word* words;
  const typename F::Word* base;
  uint64_t place;  // of this item, for the status
  uint32_t numel, good;
};

// A warp decodes its blocks, the whole ones or the partial ones; a bad block is reported, and becomes NaN.
template <typename F, bool kWhole, bool kDelta = false>
ZIPCCL_DEVICE void decode_blocks(DecodeShared<F>& shared, uint32_t block, uint64_t* status) {
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
    if (!good) {
      if (lane_id() == 0) report(status, shared.place, BLOCK);
      refuse(words, n, lane_id(), kLanes);
    }
  }
}

// One work item: a chunk of a frame, or as many words of a raw frame; or a frame without words. Words that a bad frame does not give become
// NaN.
template <typename F, bool kDelta = false>
ZIPCCL_DEVICE void decode(const DecodeJobs& jobs) {
  using Word = typename F::Word;
  ZIPCCL_SHARED(DecodeShared<F>, shared);
  const uint32_t item = blockIdx.x, number = job_of(jobs, item);
  const uint32_t rank = blockIdx.y + (blockIdx.y >= jobs.skip ? 1 : 0);
  const DecodeJob& job = jobs.job[number];
  const uint32_t block = jobs.block, per_chunk = block * kChunkBlocks;
  const uint32_t chunk = item - job.first_item, chunks = pieces(job.numel, per_chunk);
  const uint64_t first = uint64_t(chunk) * per_chunk;
  const uint32_t numel = uint32_t(job.numel - first < per_chunk ? job.numel - first : per_chunk);
  const uint8_t* const payload = job.payload + rank * jobs.rank_bytes;
  Word* const words = static_cast<Word*>(job.words) + rank * job.stride + first;
  const uint64_t place = place_of(jobs.ranked ? rank : kNone, jobs.first_frame + number, chunk);
  uint64_t bytes = job.bytes;
  int32_t status = OK;
  bool raw = false;
  if (job.header) {
    const uint32_t codec = kDelta ? kCodecDelta : kCodecExponent;
    const Opened opened = read_header(job.header + rank * jobs.rank_bytes, job.bytes, codec, jobs.dtype, block, job.numel, sizeof(Word));
    status = opened.status, bytes = opened.payload_bytes, raw = !opened.coded;
  }
  if (status || chunk >= chunks) {  // the first item speaks for the frame
    if (!status && bytes) status = INDEX;
    if (status && chunk == 0 && threadIdx.x == 0) report(jobs.status, place, status);
    if (chunk < chunks) refuse(words, numel, threadIdx.x, kThreads);
    return;
  }
  if (raw) {
    copy_raw(payload + first * sizeof(Word), reinterpret_cast<uint8_t*>(words), numel * uint32_t(sizeof(Word)));
    return;
  }
  const ChunkBytes found = find_chunk(payload, bytes, chunk, chunks);
  if (warp_id() == 0) {
    status = INDEX;
    if (found.at) status = read_table<F, kDelta>(found.at, found.bytes, numel, block, shared.entry) ? OK : BLOCK;
    if (threadIdx.x == 0) {
      shared.chunk = found.at, shared.words = words, shared.numel = numel, shared.good = status == OK;
      shared.base = static_cast<const Word*>(job.base) + (kDelta ? rank * job.stride + first : 0);
      shared.place = place;
      if (status) report(jobs.status, place, status);
    }
  }
  __syncthreads();
  if (!shared.good) {
    refuse(words, numel, threadIdx.x, kThreads);
    return;
  }
  // Rare blocks need more registers; they have a loop of their own.
  decode_blocks<F, true>(shared, jobs.block, jobs.status);
  decode_blocks<F, false, kDelta>(shared, jobs.block, jobs.status);
}

}  // namespace
}  // namespace zipccl
