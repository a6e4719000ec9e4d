// Payload decoder for CUDA: a block of threads takes a chunk, or a part of a chunk of a small message, its warps the blocks. Parts know
// nothing of each other: each reads the table of its chunk. A LIST is one part, whatever the cut.
#pragma once
#include "cuda/delta/decode_list.cuh"

namespace zipccl {
namespace {

// Where a chunk of a payload lies, if its offsets are possible.
struct ChunkBytes {
  const uint8_t* at;  // null: they are not
  uint64_t bytes;
  bool list;
};
template <bool kDelta = false>
ZIPCCL_DEVICE ChunkBytes find_chunk(const uint8_t* payload, uint64_t bytes, uint32_t chunk, uint32_t chunks) {
  const uint32_t begin = pad16(4 * chunks);
  constexpr uint32_t offset = kDelta ? ~kListBit : ~0u;
  if (begin > bytes) return {nullptr, 0, false};
  const uint32_t* const index = reinterpret_cast<const uint32_t*>(payload);
  const uint64_t start = uint64_t(index[chunk] & offset) * 16;
  const uint64_t end = chunk + 1 < chunks ? uint64_t(index[chunk + 1] & offset) * 16 : bytes;
  if (start < begin || start > end || end > bytes || (chunk == 0 && start != begin)) return {nullptr, 0, false};
  return {payload + start, end - start, kDelta && (index[chunk] & kListBit)};
}

// The bytes of a payload whose blocks are RAW, with all paddings: no delta payload has more (FORMAT.md section 4, SIZE).
template <typename F>
ZIPCCL_DEVICE uint64_t payload_bound(uint64_t numel, uint32_t block) {
  constexpr uint64_t itemsize = sizeof(typename F::Word);
  const uint32_t per_chunk = block * kChunkBlocks, chunks = pieces(numel, per_chunk), rest = uint32_t(numel) & (per_chunk - 1);
  const uint32_t partial = rest & (block - 1), tables = pad16(4 * chunks) + table_bytes<F>(pieces(rest, block));
  return tables + (numel >> log2_of(per_chunk)) * table_bytes<F>(kChunkBlocks) + (numel - partial) * itemsize +
         pad16(partial * uint32_t(itemsize)) + 16ull * chunks;
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
  uint32_t split;          // items are cut into 1 << split parts
  uint32_t first_frame;    // number of the first job among the frames of the call
  uint32_t ranked;         // or there are no ranks: the grid has one row
  uint32_t skip;           // the rank whose frames are not decoded, or kNone
  uint32_t element_log2;   // an element of the tensor has 1 << element_log2 words
};

enum Content : uint32_t { NOTHING, WORDS, BLOCKS, LISTED, REFUSED };  // of a work item

template <typename F>
struct DecodeShared {
  union {
    DecodeScratch<F> scratch[kWarps];
    ListScratch list;  // of all warps
  };
  Entry entry[kChunkBlocks];
  const uint8_t* chunk;  // or the words of a chunk: those of a raw frame, or those of the base
  uint64_t bytes;        // of the chunk
  typename F::Word* words;
  const typename F::Word* base;
  uint64_t place;              // of this chunk, for the status
  uint32_t numel, begin, end;  // words of the chunk; blocks of this part
  Content content;
};

// Words at no multiple of 16 go through the scratch: vectors there, and from there whole words of memory in the order of addresses.
template <bool kDelta, typename F>
ZIPCCL_DEVICE bool is_staged(const DecodeShared<F>& shared, uint32_t b) {
  return reinterpret_cast<uintptr_t>(shared.words) % 16 && !(kDelta && shared.entry[b].mode == CHANGE);
}

// A warp decodes its blocks, the whole ones or the partial ones; a bad block is reported, and becomes NaN.
template <typename F, bool kWhole, bool kDelta = false>
ZIPCCL_DEVICE void decode_blocks(DecodeShared<F>& shared, uint32_t block, uint64_t* status) {
  using Word = typename F::Word;
  for (uint32_t b = shared.begin + warp_id(); b < shared.end; b += kWarps) {
    const Entry& entry = shared.entry[b];
    const uint32_t n = numel_of(shared, b, block);
    if (is_whole(entry, n) != kWhole) continue;
    DecodeScratch<F>& scratch = shared.scratch[warp_id()];
    Word* const words = is_staged<kDelta>(shared, b) ? scratch.words : shared.words + b * block;
    bool good;
    if constexpr (kWhole) {
      const auto put = [=](uint32_t row, const Octet<F>& octet) {
        octet.store_whole(reinterpret_cast<uint8_t*>(words + row * kRow + 8 * lane_id()), 8 * sizeof(Word));
      };
      good = decode_whole<F>(shared.chunk, entry, scratch, put);
    } else if (kDelta && entry.mode == CHANGE) {
      good = decode_change<F>(shared.chunk + entry.tail, entry.tail_bytes, shared.base + b * block, n, entry.top, scratch, words);
    } else {
      good = decode_part<F>(shared.chunk, entry, n, scratch, words);
    }
    __syncwarp();
    if (!good) {
      if (lane_id() == 0) report(status, shared.place, BLOCK);
      refuse(shared.words + b * block, numel_of(shared, b, block), lane_id(), kLanes);
    } else if (is_staged<kDelta>(shared, b)) {
      const uint8_t* const from = reinterpret_cast<const uint8_t*>(shared.scratch[warp_id()].words);
      copy_bytes<kWhole ? 4 : 1>(reinterpret_cast<uint8_t*>(shared.words + b * block), from,
                                 (kWhole ? kMaxBlock : numel_of(shared, b, block)) * uint32_t(sizeof(Word)));
      __syncwarp();  // the scratch has been read
    }
  }
}

// A warp opens the frame of a work item and reads the table of its chunk, for all warps of the block of threads.
template <typename F, bool kDelta>
ZIPCCL_DEVICE void open_part(const DecodeJobs& jobs, DecodeShared<F>& shared) {
  using Word = typename F::Word;
  const uint32_t item = blockIdx.x >> jobs.split, part = blockIdx.x & ((1u << jobs.split) - 1), number = job_of(jobs, item);
  const uint32_t rank = blockIdx.y + (blockIdx.y >= jobs.skip ? 1 : 0);
  const DecodeJob& job = jobs.job[number];
  const uint32_t per_part = kChunkBlocks >> jobs.split, per_chunk = jobs.block * kChunkBlocks;
  const uint32_t chunk = item - job.first_item, chunks = pieces(job.numel, per_chunk);
  const uint64_t first = uint64_t(chunk) * per_chunk;
  const uint32_t numel = uint32_t(job.numel - first < per_chunk ? job.numel - first : per_chunk);
  const uint8_t* const payload = job.payload + rank * jobs.rank_bytes;
  const uint64_t place = place_of(jobs.ranked ? rank : kNone, jobs.first_frame + number, chunk);
  uint64_t bytes = job.bytes;
  int32_t status = OK;
  bool raw = false;
  if (job.header) {
    const uint32_t codec = kDelta ? kCodecDelta : kCodecExponent;
    const Opened opened = read_header(job.header + rank * jobs.rank_bytes, job.bytes, codec, jobs.dtype, jobs.block,
                                      job.numel >> jobs.element_log2, sizeof(Word) << jobs.element_log2);
    status = opened.status, bytes = opened.payload_bytes, raw = !opened.coded;
  }
  if (kDelta && !status && !raw) {
    if (numel && !job.base) status = CODEC;
    else if (bytes > payload_bound<F>(job.numel, jobs.block)) status = SIZE;
  }
  const Word* const base = static_cast<const Word*>(job.base) + (kDelta ? rank * job.stride + first : 0);
  const uint8_t* at = payload + first * sizeof(Word);
  Content content = WORDS;
  if (status || chunk >= chunks) {  // the first part of the first item speaks for the frame
    if (!status && bytes) status = INDEX;
    if (chunk || part) status = OK;
    content = chunk < chunks ? REFUSED : NOTHING;
  } else if (!raw) {
    const ChunkBytes found = find_chunk<kDelta>(payload, bytes, chunk, chunks);
    status = INDEX, at = found.at, bytes = found.bytes;
    if (kDelta && at && found.list) {
      status = OK, content = part ? NOTHING : LISTED;
    } else if (kDelta && at && !bytes) {
      status = OK, at = reinterpret_cast<const uint8_t*>(base);
    } else {
      if (at) status = read_table<F, kDelta>(at, bytes, numel, jobs.block, shared.entry) ? OK : BLOCK;
      content = status ? REFUSED : BLOCKS;
    }
  }
  if (lane_id()) return;
  if (status) report(jobs.status, place, status);
  shared.content = content, shared.chunk = at, shared.bytes = bytes, shared.numel = numel, shared.place = place;
  shared.words = static_cast<Word*>(job.words) + rank * job.stride + first;
  shared.base = base;
  shared.begin = part * per_part, shared.end = least((part + 1) * per_part, pieces(numel, jobs.block));
}

// One work item: a part of a chunk of a frame, or as many words of a raw frame or a base; or a part of a frame without words. Words that a
// bad frame does not give become NaN.
template <typename F, bool kDelta = false>
ZIPCCL_DEVICE void decode(const DecodeJobs& jobs) {
  using Word = typename F::Word;
  ZIPCCL_SHARED(DecodeShared<F>, shared);
  if (warp_id() == 0) open_part<F, kDelta>(jobs, shared);
  __syncthreads();
  if (shared.content == NOTHING) return;
  if constexpr (kDelta) {
    if (shared.content == LISTED) {
      if (decode_list<F>(shared.chunk, shared.bytes, shared.base, shared.numel, shared.words, shared.list)) return;
      if (threadIdx.x == 0) report(jobs.status, shared.place, BLOCK);
      return refuse(shared.words, shared.numel, threadIdx.x, kThreads);
    }
  }
  if (shared.content != BLOCKS) {
    const uint32_t begin = least(shared.begin * jobs.block, shared.numel), end = least(shared.end * jobs.block, shared.numel);
    if (end <= begin) return;
    if (shared.content == REFUSED) return refuse(shared.words + begin, end - begin, threadIdx.x, kThreads);
    const uint8_t* const from = shared.chunk + begin * sizeof(Word);
    uint8_t* const to = reinterpret_cast<uint8_t*>(shared.words + begin);
    return from == to ? void() : copy_raw(from, to, (end - begin) * uint32_t(sizeof(Word)));
  }
  // Rare blocks need more registers; they have a loop of their own.
  if constexpr (F::E != 0) decode_blocks<F, true>(shared, jobs.block, jobs.status);
  decode_blocks<F, false, kDelta>(shared, jobs.block, jobs.status);
}

}  // namespace
}  // namespace zipccl
