// Exponent payload encoder for CUDA: a block of threads encodes a chunk, or a part of a chunk of a small message, in shared memory, learns
// from the chunks before it its place in the payload (a scan with look-back: Merrill and Garland, "Single-pass Parallel Prefix Scan with
// Decoupled Look-back", 2016) and copies it there. One pass over the words; only the words of a RAW block are read again.
//
// No block of threads waits for a block of threads that may not have started, so a single resident block suffices. Parts are numbered
// chunk by chunk and taken in this order, by `ticket`. A block of threads waits only when every part up to the end of its chunk is taken:
// it takes the free parts of its chunk itself before. All these parts belong to blocks of threads that run, and a block of threads tells
// the sizes of its parts before it waits. So the sizes of all chunks up to this one come, and with them, chunk by chunk, their places.
//
// Against a base, the words of the whole chunk decide its form. Each owner of a part reads all of them and comes to the same decision; a
// chunk without a table is then written by the owner of its first part alone, and the other owners end.
#pragma once
#include "cuda/delta/encode_list.cuh"

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
  uint32_t first_item;  // its chunks, or one item for a job without words, are work items from here on; each is cut into 1 << split parts
  uint32_t raw;         // the frame is raw: the header and the words
};

struct EncodeJobs {
  EncodeJob job[kMaxJobs];
  uint32_t count, block, dtype, split;
  uint32_t element_log2;  // an element of the tensor has 1 << element_log2 words
  uint32_t mantissa;      // bits that a rounding code keeps
  uint32_t* ticket;     // zero
  uint64_t* places;     // a zero for every item
  uint64_t* sizes;      // a zero for every part, unless split is 0
  uint32_t* overflows;  // counts payloads that did not fit (may be host memory), or null
};

template <typename F>
struct BlockScratch {
  // A block's staging: its body, then its tail. Both together are smaller than its words, or it is RAW and stays where it is.
  alignas(16) uint8_t slot[kChunkBlocks][kMaxBlock * sizeof(typename F::Word)];
  // Bytes of a block's elements, then room for its exponents as four bits each, which lanes exchange.
  alignas(16) uint8_t list[kWarps][kMaxBlock + kMaxBlock / 2];
};

template <typename F>
struct EncodeShared {
  union {
    BlockScratch<F> blocks;
    Lists<F> lists;
  };
  ListPlan plan;
  Form form[kChunkBlocks];
  uint32_t body_at[kChunkBlocks], tail_at[kChunkBlocks];
  const typename F::Word* words;  // of the chunk
  uint64_t start;
  uint32_t ticket, item, own, job, units;
  uint32_t numel, begin, end;  // words of the chunk; blocks of this part
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

// A part's sizes as one word, which is never zero.
ZIPCCL_DEVICE uint64_t part_sizes(uint32_t bodies, uint32_t tails) { return 1ull << 63 | uint64_t(bodies) << 32 | tails; }

// Takes the first part after `ticket`, before `end`, that no block of threads has; a result of `end` or more says that there is none.
ZIPCCL_DEVICE uint32_t next_ticket(uint32_t* tickets, uint32_t ticket, uint32_t end) {
  while (++ticket < end) {
    const uint32_t seen = atomicCAS(tickets, ticket, ticket + 1);
    if (seen == ticket) break;
    ticket = seen - 1;  // all before `seen` have an owner
  }
  return ticket;
}

// A RAW block to a multiple of 16, with its padding.
template <typename F, typename Grid>
ZIPCCL_DEVICE void copy_raw_block(const typename F::Word* from, uint32_t n, const Grid& grid, uint8_t* body) {
  constexpr uint32_t itemsize = sizeof(typename F::Word);
  for (uint32_t at = 8 * lane_id(); at * itemsize < pad16(n * itemsize); at += kRow) {
    Octet<F> octet;
    octet.load(from + at, at < n ? least(n - at, 8) : 0, 0);
    grid.octet(octet);
    octet.store_whole(body + at * itemsize, least(pad16(n * itemsize) - at * itemsize, 8 * itemsize));
  }
}

// How blocks are coded: with one of the codes, the same of rounded words, or against a base.
struct Exactly {
  template <typename F>
  static ZIPCCL_DEVICE AsTheyAre grid(const EncodeJobs&) { return {}; }
};
template <typename Code>
struct Alone : Code, Exactly {
  static constexpr bool delta = false;
};
template <typename Code>
struct OfRounded : Code {
  static constexpr bool delta = false;
  template <typename F>
  static ZIPCCL_DEVICE Rounded<F> grid(const EncodeJobs& jobs) { return Rounded<F>(jobs.mantissa); }
};
struct AgainstBase : Exactly {
  static constexpr bool delta = true;
};

// A thread looks up the ticket's part.
template <typename F>
ZIPCCL_DEVICE void take_part(const EncodeJobs& jobs, EncodeShared<F>& shared) {
  const uint32_t part = shared.ticket & ((1u << jobs.split) - 1), per_part = kChunkBlocks >> jobs.split;
  shared.own |= 1u << part;
  shared.begin = part * per_part, shared.end = least((part + 1) * per_part, pieces(shared.numel, jobs.block));
}

// A thread looks up the ticket's chunk.
template <typename F>
ZIPCCL_DEVICE void open_item(const EncodeJobs& jobs, EncodeShared<F>& shared) {
  shared.item = shared.ticket >> jobs.split, shared.job = job_of(jobs, shared.item), shared.own = 0;
  const EncodeJob& job = jobs.job[shared.job];
  const uint32_t per_chunk = jobs.block * kChunkBlocks;
  const uint64_t first = uint64_t(shared.item - job.first_item) * per_chunk;
  shared.words = static_cast<const typename F::Word*>(job.words) + first;
  shared.numel = uint32_t(job.numel - first < per_chunk ? job.numel - first : per_chunk);
  take_part(jobs, shared);
}

// A part of a raw frame.
template <typename F>
ZIPCCL_DEVICE void copy_raw_part(const EncodeJobs& jobs, const EncodeShared<F>& shared) {
  constexpr uint32_t itemsize = sizeof(typename F::Word);
  const EncodeJob& job = jobs.job[shared.job];
  const uint64_t bytes = job.numel * itemsize, first = uint64_t(shared.item - job.first_item) * jobs.block * kChunkBlocks;
  const bool fits = bytes <= job.capacity;
  const uint32_t begin = least(shared.begin * jobs.block, shared.numel), end = least(shared.end * jobs.block, shared.numel);
  if (fits) {
    uint8_t* const to = job.payload + (first + begin) * itemsize;
    copy_raw(reinterpret_cast<const uint8_t*>(shared.words + begin), to, (end - begin) * itemsize);
  }
  if (shared.ticket == job.first_item << jobs.split && threadIdx.x == 0) {
    write_header(job.header, kCodecRaw, jobs.dtype, 1, job.numel >> jobs.element_log2, kHeaderBytes + bytes, !fits);
    if (!fits && jobs.overflows) atomicAdd_system(jobs.overflows, 1u);
  }
}

// Warps code the blocks of a part: first the whole ones, then the ones that need more registers. All blocks of a warp have the
// same list, as their numbers differ by multiples of kWarps.
template <typename F, typename Code>
ZIPCCL_DEVICE void encode_blocks(const EncodeJobs& jobs, EncodeShared<F>& shared) {
  const auto grid = Code::template grid<F>(jobs);
  for (uint32_t b = shared.begin + warp_id(); b < shared.end; b += kWarps) {
    Form form = {kLater, 0, 0, 0, 0};
    if constexpr (!Code::delta) {
      if (numel_of(shared, b, jobs.block) == Whole::n)
        form = encode_block<F, Code>(shared.words + b * jobs.block, Whole(), grid, shared.blocks.slot[b], shared.blocks.list[b % kWarps]);
    }
    if (lane_id() == 0) shared.form[b] = form;
  }
  __syncwarp();
  for (uint32_t b = shared.begin + warp_id(); b < shared.end; b += kWarps) {
    if (shared.form[b].mode != kLater) continue;
    const uint32_t n = numel_of(shared, b, jobs.block);
    const typename F::Word* const from = shared.words + b * jobs.block;
    Form form;
    if constexpr (Code::delta) {
      const EncodeJob& job = jobs.job[shared.job];
      const uint64_t first = uint64_t(shared.item - job.first_item) * jobs.block * kChunkBlocks;
      const auto* const base = static_cast<const typename F::Word*>(job.base) + first + b * jobs.block;
      form = encode_change<F>(from, base, n, shared.blocks.slot[b], shared.blocks.list[b % kWarps]);
    } else {
      form = encode_block<F, Code>(from, Part{n}, grid, shared.blocks.slot[b], shared.blocks.list[b % kWarps]);
    }
    __syncwarp();  // all lanes have read that the block comes later
    if (lane_id() == 0) shared.form[b] = form;
  }
}

// A block of threads codes its part of the chunk, and then the parts of the chunk that no block of threads has.
template <typename F, typename Code>
ZIPCCL_DEVICE void encode_parts_of_chunk(const EncodeJobs& jobs, EncodeShared<F>& shared) {
  do {
    encode_blocks<F, Code>(jobs, shared);
    __syncthreads();
    if (!jobs.split) break;
    if (warp_id() == 0) {
      const uint32_t b = shared.begin + lane_id();
      const Form form = b < shared.end ? shared.form[b] : Form{FILL, 0, 0, 0, 0};
      const uint32_t bodies = __reduce_add_sync(kEveryLane, form.body), tails = __reduce_add_sync(kEveryLane, form.tail);
      if (lane_id() == 0) {
        static_cast<volatile uint64_t*>(jobs.sizes)[shared.ticket] = part_sizes(bodies, tails);
        const uint32_t end_ticket = (shared.item + 1) << jobs.split, next = next_ticket(jobs.ticket, shared.ticket, end_ticket);
        shared.ticket = next;
        if (next < end_ticket) take_part(jobs, shared);
      }
    }
    __syncthreads();
  } while (shared.ticket >> jobs.split == shared.item);
}

// A warp finds the places of bodies and tails in a chunk, all of whose parts are taken, and returns the chunk's size in units of 16 bytes,
// which all warps find in `shared`.
template <typename F>
ZIPCCL_DEVICE uint32_t lay_out_table(const EncodeJobs& jobs, EncodeShared<F>& shared) {
  // A lane for each block. The first block of a part of another owner stands for its whole part.
  const uint32_t lane = lane_id(), blocks = pieces(shared.numel, jobs.block), table = table_bytes<F>(blocks);
  const uint32_t part_shift = log2_of(kChunkBlocks) - jobs.split, part = lane >> part_shift;
  const bool own = shared.own >> part & 1, stands = lane < blocks && !own && lane == part << part_shift;
  uint32_t body = 0, tail = 0;
  if (lane < blocks && own) body = shared.form[lane].body, tail = shared.form[lane].tail;
  if (jobs.split) {
    const volatile uint64_t* const sizes = jobs.sizes + (uint64_t(shared.item) << jobs.split) + part;
    uint64_t seen = stands ? *sizes : part_sizes(0, 0);
    while (__any_sync(kEveryLane, seen == 0)) {
      __nanosleep(32);
      if (seen == 0) seen = *sizes;
    }
    if (stands) body = uint32_t(seen >> 32) & 0x7fffffffu, tail = uint32_t(seen);
  }
  const uint32_t bodies = __reduce_add_sync(kEveryLane, body), tails = __reduce_add_sync(kEveryLane, tail);
  const uint32_t body_at = table + sum_below(body), tail_at = table + bodies + sum_below(tail);
  if (lane < blocks) shared.body_at[lane] = body_at, shared.tail_at[lane] = tail_at;
  const uint32_t units = blocks ? (table + bodies + pad16(tails)) / 16 : 0;
  if (lane == 0) shared.units = units;
  return units;
}

// Codes a chunk against its base, and returns its form, which is not EITHER. The first warp gets its size in units of 16 bytes. A LIST is
// in the scratch, if this is the owner of the first part and the LIST fits in the payload.
template <typename F, typename Code>
ZIPCCL_DEVICE ChunkForm encode_against_base(const EncodeJobs& jobs, EncodeShared<F>& shared, uint32_t& units) {
  const EncodeJob& job = jobs.job[shared.job];
  const uint64_t first = uint64_t(shared.item - job.first_item) * jobs.block * kChunkBlocks;
  const auto* const bases = static_cast<const typename F::Word*>(job.base) + first;
  const uint64_t room = shared.own & 1 ? job.capacity : 0;
  for (bool lost = false;; lost = true) {
    const ChunkForm form = list_changes<F>(shared.words, bases, shared.numel, jobs.block, lost, room, shared.plan, shared.lists);
    if (form == SAME || form == LIST) {
      units = form == LIST ? shared.plan.bytes / 16 : 0;
      if (threadIdx.x == 0) shared.units = units;
      // Nobody asks for this part's sizes, unless words change under the encoder: then results are wrong, but nothing hangs.
      if (jobs.split && !lost && threadIdx.x == 0) static_cast<volatile uint64_t*>(jobs.sizes)[shared.ticket] = part_sizes(0, 0);
      return form;
    }
    if (lost) return TABLE;  // words changed under the encoder: the results are wrong, but the first layout stays inside its slot
    encode_parts_of_chunk<F, Code>(jobs, shared);
    if (warp_id() == 0) units = lay_out_table(jobs, shared);
    if (form == TABLE) return TABLE;
    __syncthreads();
    if (shared.plan.bytes / 16 > shared.units) return TABLE;
  }
}

// One work item: a part of a chunk of a job, or of a job without words.
template <typename F, typename Code>
ZIPCCL_DEVICE void encode(const EncodeJobs& jobs) {
  ZIPCCL_SHARED(EncodeShared<F>, shared);
  if (threadIdx.x == 0) {
    shared.ticket = atomicAdd(jobs.ticket, 1u);
    if (shared.ticket < gridDim.x) open_item(jobs, shared);
  }
  __syncthreads();
  if (shared.ticket >= gridDim.x) return;  // other blocks of threads took all parts
  if (jobs.job[shared.job].raw) return copy_raw_part(jobs, shared);

  const EncodeJob& job = jobs.job[shared.job];
  const uint32_t chunk = shared.item - job.first_item, chunks = pieces(job.numel, jobs.block * kChunkBlocks);
  const uint32_t index_bytes = pad16(4 * chunks), blocks = pieces(shared.numel, jobs.block);
  uint32_t units = 0;  // of the first warp
  ChunkForm form = TABLE;
  if constexpr (Code::delta) {
    form = encode_against_base<F, Code>(jobs, shared, units);
    if (form != TABLE && !(shared.own & 1)) return;
  } else {
    encode_parts_of_chunk<F, Code>(jobs, shared);
    if (warp_id() == 0) units = lay_out_table(jobs, shared);
  }
  const uint32_t part_shift = log2_of(kChunkBlocks) - jobs.split, warp = warp_id(), lane = lane_id();
  if (warp == 0) {
    // Every owner of a part looks back by itself; all tell the later chunks the same.
    const uint32_t start = look_back(jobs.places + job.first_item, chunk, index_bytes / 16, units);
    if (lane == 0) shared.start = uint64_t(start) * 16;
  }
  __syncthreads();

  const uint64_t end = shared.start + shared.units * 16;
  const bool leads = shared.own & 1;  // the owner of the first part writes all that is not of a block
  if (leads && chunk + 1 >= chunks && threadIdx.x == 0) {
    if (job.bytes) *job.bytes = end;
    if (job.header) {
      const uint32_t codec = Code::delta ? kCodecDelta : kCodecExponent;
      const uint64_t numel = job.numel >> jobs.element_log2;
      write_header(job.header, codec, jobs.dtype, jobs.block, numel, kHeaderBytes + end, end > job.capacity);
    }
    if (end > job.capacity && jobs.overflows) atomicAdd_system(jobs.overflows, 1u);
  }
  if (end > job.capacity || !blocks) return;
  uint8_t* const out = job.payload + shared.start;
  if (leads) {
    if (threadIdx.x == 0) reinterpret_cast<uint32_t*>(job.payload)[chunk] = uint32_t(shared.start / 16) | (form == LIST ? kListBit : 0);
    if (chunk + 1 == chunks && threadIdx.x < (index_bytes - 4 * chunks) / 4)
      reinterpret_cast<uint32_t*>(job.payload)[chunks + threadIdx.x] = 0;
    if constexpr (Code::delta) {
      if (form == LIST)
        for (uint32_t i = threadIdx.x; i < shared.units; i += kThreads)
          reinterpret_cast<uint4*>(out)[i] = reinterpret_cast<const uint4*>(shared.lists.string)[i];
      if (form != TABLE) return;
    }
    const uint32_t entries = blocks * (F::has_trim ? 4 : 3);
    if (threadIdx.x < table_bytes<F>(blocks) - entries) out[entries + threadIdx.x] = 0;
  }
  const bool ends = shared.own >> ((blocks - 1) >> part_shift) & 1;
  if (threadIdx.x < blocks && shared.own >> (threadIdx.x >> part_shift) & 1) {
    const Form form = shared.form[threadIdx.x];
    const uint32_t entry = form.mode << kTailBits | form.tail;
    out[threadIdx.x] = uint8_t(form.top);
    out[blocks + 2 * threadIdx.x] = uint8_t(entry);
    out[blocks + 2 * threadIdx.x + 1] = uint8_t(entry >> 8);
    if (F::has_trim) out[3 * blocks + threadIdx.x] = uint8_t(form.trim);
  }
  for (uint32_t b = warp; b < blocks; b += kWarps) {
    if (!(shared.own >> (b >> part_shift) & 1)) continue;
    const Form form = shared.form[b];
    uint8_t* const body = out + shared.body_at[b];
    if (form.mode == RAW) {
      copy_raw_block<F>(shared.words + b * jobs.block, numel_of(shared, b, jobs.block), Code::template grid<F>(jobs), body);
    } else {
      const uint4* const from = reinterpret_cast<const uint4*>(shared.blocks.slot[b]);
      const uint4* const end = from + form.body / 16;
      uint4* to = reinterpret_cast<uint4*>(body) + lane;
#pragma unroll 1
      for (const uint4* at = from + lane; at < end; at += kLanes, to += kLanes) *to = *at;
      copy_bytes(out + shared.tail_at[b], shared.blocks.slot[b] + form.body, form.tail);
    }
  }
  if (!ends) return;
  const uint32_t tails_end = shared.tail_at[blocks - 1] + shared.form[blocks - 1].tail;
  if (threadIdx.x < pad16(tails_end) - tails_end) out[tails_end + threadIdx.x] = 0;
}

}  // namespace
}  // namespace zipccl
