// Exponent payload encoder for CUDA: a block of threads encodes a chunk in shared memory, learns from the chunks before it its place in
// the payload (a scan with look-back: Merrill and Garland, "Single-pass Parallel Prefix Scan with Decoupled Look-back", 2016) and copies
// it there. One pass over the words; only the words of a RAW block are read again.
#pragma once
#include "cuda/delta.cuh"
#include "cuda/frame.cuh"

namespace zipccl {
namespace {

struct EncodeJob {
  const void* words;    // at any address of a word
  const void* base;     // of a delta payload, at any address of a word
  uint8_t* payload;     // a multiple of 16
  uint8_t* header;      // 32 bytes before the payload: a whole flat frame is written; or null: only the payload
  uint64_t* bytes;      // where to put the payload's size, or null
  uint64_t numel;
  uint64_t capacity;    // bytes that may be written from `payload` on
  uint32_t first_item;  // its chunks, or one item for a job without words, are work items from here on
  uint32_t raw;         // the frame is raw: the header and the words
};

struct EncodeJobs {
  EncodeJob job[kMaxJobs];
  uint32_t count, block, dtype;
  uint32_t* ticket;     // zero
  uint64_t* places;     // a zero for every item
  uint32_t* overflows;  // counts payloads that did not fit (may be host memory), or null
};

template <typename F>
struct EncodeShared {
  // A block's staging: its body, then its tail. Both together are smaller than its words, or it is RAW and stays where it is.
  alignas(16) uint8_t slot[kChunkBlocks][kMaxBlock * sizeof(typename F::Word)];
  alignas(16) uint8_t list[kWarps][kMaxBlock];
  alignas(16) uint8_t table[kChunkBlocks * 4];
  Form form[kChunkBlocks];
  uint32_t body_at[kChunkBlocks], tail_at[kChunkBlocks];
  uint32_t item, units;
  uint64_t start;
};

// Tells the later chunks the size of this chunk, and learns its place from the earlier chunks; both in units of 16 bytes. One
// warp calls it. A place holds 1 << 32 | the units of its chunk, or 2 << 32 | those of all chunks of the payload up to it.
ZIPCCL_DEVICE uint32_t look_back(uint64_t* places, uint32_t chunk, uint32_t index_units, uint32_t units) {
  volatile uint64_t* const place = places;
  if (chunk == 0) {
    if (lane_id() == 0) place[0] = 2ull << 32 | (index_units + units);
    return index_units;
  }
  if (lane_id() == 0) place[chunk] = 1ull << 32 | units;
  uint32_t before = 0;
  for (uint32_t at = chunk;; at -= kLanes) {
    const bool exists = lane_id() < at;
    uint64_t seen = exists ? place[at - 1 - lane_id()] : 2ull << 32;
    while (__any_sync(kEveryLane, seen == 0)) {
      __nanosleep(32);
      if (seen == 0) seen = place[at - 1 - lane_id()];
    }
    const uint32_t whole = __ballot_sync(kEveryLane, seen >> 33 & 1);
    const uint32_t last = whole ? uint32_t(__ffs(int(whole))) - 1 : kLanes;  // nearest chunk that knows its place
    before += __reduce_add_sync(kEveryLane, lane_id() <= last ? uint32_t(seen) : 0);
    if (whole) break;
  }
  if (lane_id() == 0) place[chunk] = 2ull << 32 | (before + units);
  return before;
}

// A RAW block to a multiple of 16, with its padding.
template <typename F>
ZIPCCL_DEVICE void copy_raw_block(const typename F::Word* from, uint32_t n, uint8_t* body) {
  constexpr uint32_t itemsize = sizeof(typename F::Word);
  for (uint32_t at = 8 * lane_id(); at * itemsize < pad16(n * itemsize); at += kRow) {
    Octet<F> octet;
    octet.load(from + at, at < n ? least(n - at, 8) : 0, 0);
    octet.store_whole(body + at * itemsize, least(pad16(n * itemsize) - at * itemsize, 8 * itemsize));
  }
}

// How blocks are coded: with one of the codes, or against a base.
template <typename Code>
struct Alone : Code {
  static constexpr bool delta = false;
};
struct AgainstBase {
  static constexpr bool delta = true;
};

// One work item: a chunk of a job, or a job without words.
template <typename F, typename Code>
ZIPCCL_DEVICE void encode(const EncodeJobs& jobs) {
  using Word = typename F::Word;
  ZIPCCL_SHARED(EncodeShared<F>, shared);
  // Items are taken in order, so that a chunk waits only for items that running blocks have taken.
  if (threadIdx.x == 0) shared.item = atomicAdd(jobs.ticket, 1u);
  __syncthreads();
  const uint32_t item = shared.item;
  const EncodeJob& job = jobs.job[job_of(jobs, item)];
  const uint32_t chunk = item - job.first_item, per_chunk = jobs.block * kChunkBlocks;
  const uint32_t chunks = pieces(job.numel, per_chunk), index_bytes = pad16(4 * chunks);
  const uint64_t first = uint64_t(chunk) * per_chunk;
  const Word* const words = static_cast<const Word*>(job.words) + first;
  const uint32_t numel = uint32_t(job.numel - first < per_chunk ? job.numel - first : per_chunk);
  const uint32_t blocks = pieces(numel, jobs.block), warp = warp_id(), lane = lane_id();
  if (job.raw) {
    const uint64_t bytes = job.numel * sizeof(Word);
    const bool fits = bytes <= job.capacity;
    if (fits) copy_raw(reinterpret_cast<const uint8_t*>(words), job.payload + first * sizeof(Word), numel * uint32_t(sizeof(Word)));
    if (chunk == 0 && threadIdx.x == 0) {
      write_header(job.header, kCodecRaw, jobs.dtype, 1, job.numel, kHeaderBytes + bytes, !fits);
      if (!fits && jobs.overflows) atomicAdd_system(jobs.overflows, 1u);
    }
    return;
  }

  for (uint32_t b = warp; b < blocks; b += kWarps) {
    const uint32_t n = least(numel - b * jobs.block, jobs.block);
    const Word* const from = words + b * jobs.block;
    Form form = {kLater, 0, 0, 0, 0};
    if constexpr (!Code::delta) {
      if (n == Whole::n && reinterpret_cast<uintptr_t>(from) % 16 == 0)
        form = encode_block<F, Code>(from, Whole(), shared.slot[b], shared.list[warp]);
    }
    if (lane == 0) shared.form[b] = form;
  }
  __syncwarp();
  for (uint32_t b = warp; b < blocks; b += kWarps) {
    if (shared.form[b].mode != kLater) continue;
    const uint32_t n = least(numel - b * jobs.block, jobs.block);
    const Word* const from = words + b * jobs.block;
    Form form;
    if constexpr (Code::delta) {
      const Word* const base = static_cast<const Word*>(job.base) + first + b * jobs.block;
      form = encode_change<F>(from, base, n, shared.slot[b], shared.list[warp]);
    } else {
      form = encode_block<F, Code>(from, Part{n}, shared.slot[b], shared.list[warp]);
    }
    if (lane == 0) shared.form[b] = form;
  }
  __syncthreads();

  if (warp == 0) {
    const uint32_t table = table_bytes<F>(blocks);
    const Form form = lane < blocks ? shared.form[lane] : Form{FILL, 0, 0, 0, 0};
    for (uint32_t i = lane; i < sizeof shared.table / 4; i += kLanes) reinterpret_cast<uint32_t*>(shared.table)[i] = 0;
    __syncwarp();
    const uint32_t entry = form.mode << kTailBits | form.tail;
    if (lane < blocks) {
      shared.table[lane] = uint8_t(form.top);
      shared.table[blocks + 2 * lane] = uint8_t(entry);
      shared.table[blocks + 2 * lane + 1] = uint8_t(entry >> 8);
      if (F::has_trim) shared.table[3 * blocks + lane] = uint8_t(form.trim);
    }
    const uint32_t bodies = __reduce_add_sync(kEveryLane, form.body), tails = __reduce_add_sync(kEveryLane, form.tail);
    const uint32_t body_at = table + sum_below(form.body), tail_at = table + bodies + sum_below(form.tail);
    if (lane < blocks) shared.body_at[lane] = body_at, shared.tail_at[lane] = tail_at;
    const uint32_t units = blocks ? (table + bodies + pad16(tails)) / 16 : 0;
    const uint32_t start = look_back(jobs.places + job.first_item, chunk, index_bytes / 16, units);
    if (lane == 0) shared.start = uint64_t(start) * 16, shared.units = units;
  }
  __syncthreads();

  const uint64_t end = shared.start + shared.units * 16;
  if (chunk + 1 >= chunks && threadIdx.x == 0) {
    if (job.bytes) *job.bytes = end;
    if (job.header) {
      const uint32_t codec = Code::delta ? kCodecDelta : kCodecExponent;
      write_header(job.header, codec, jobs.dtype, jobs.block, job.numel, kHeaderBytes + end, end > job.capacity);
    }
    if (end > job.capacity && jobs.overflows) atomicAdd_system(jobs.overflows, 1u);
  }
  if (end > job.capacity || !blocks) return;
  if (threadIdx.x == 0) reinterpret_cast<uint32_t*>(job.payload)[chunk] = uint32_t(shared.start / 16);
  if (chunk + 1 == chunks && threadIdx.x < (index_bytes - 4 * chunks) / 4)
    reinterpret_cast<uint32_t*>(job.payload)[chunks + threadIdx.x] = 0;
  uint8_t* const out = job.payload + shared.start;
  if (threadIdx.x < table_bytes<F>(blocks) / 16)
    reinterpret_cast<uint4*>(out)[threadIdx.x] = reinterpret_cast<const uint4*>(shared.table)[threadIdx.x];
  for (uint32_t b = warp; b < blocks; b += kWarps) {
    const Form form = shared.form[b];
    uint8_t* const body = out + shared.body_at[b];
    if (form.mode == RAW) {
      copy_raw_block<F>(words + b * jobs.block, least(numel - b * jobs.block, jobs.block), body);
    } else {
      const uint4* const from = reinterpret_cast<const uint4*>(shared.slot[b]);
      for (uint32_t i = lane; i < form.body / 16; i += kLanes) reinterpret_cast<uint4*>(body)[i] = from[i];
      copy_bytes(out + shared.tail_at[b], shared.slot[b] + form.body, form.tail);
    }
  }
  const uint32_t tails_end = shared.tail_at[blocks - 1] + shared.form[blocks - 1].tail;
  if (threadIdx.x < pad16(tails_end) - tails_end) out[tails_end + threadIdx.x] = 0;
}

}  // namespace
}  // namespace zipccl
