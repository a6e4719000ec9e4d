// Exponent payload decoder for CUDA: a block of threads takes a chunk, its warps the blocks. Everything read is proven to lie in the chunk
// first (FORMAT.md section 4).
#pragma once
#include "cuda_frame.cuh"
#include "cuda_words.cuh"

namespace zipccl {
namespace {

// What the table says of a block; offsets are bytes from the start of the chunk.
struct Entry {
  uint32_t body, tail;
  uint16_t tail_bytes;
  uint8_t mode, top, trim;
};

template <typename F>
struct DecodeScratch {  // of a warp
  union {
    uint8_t list[2][kMaxBlock];                 // exponents that a tier escapes; tiers go from one list to the other
    alignas(16) typename F::Word words[kMaxBlock];  // then those of a SPARSE block that are not zero
  };
};

ZIPCCL_FN constexpr uint32_t names_of(const Tier& tier) {  // k of code, a byte each
  return uint32_t(tier.k_of_code[0]) | uint32_t(tier.k_of_code[1]) << 8 | uint32_t(tier.k_of_code[2]) << 16;
}

// A warp reads the table of a chunk of numel words that has `bytes` bytes. Returns whether all parts lie in the chunk and fill it.
template <typename F>
ZIPCCL_DEVICE bool read_table(const uint8_t* chunk, uint64_t bytes, uint32_t numel, uint32_t block, Entry* entries) {
  const uint32_t blocks = (numel + block - 1) / block, lane = lane_id(), table = table_bytes<F>(blocks);
  if (table > bytes) return false;
  uint32_t mode = FILL, top = 0, trim = 0, tail_bytes = 0, body_size = 0;
  bool good = true;
  if (lane < blocks) {
    const uint32_t packed = chunk[blocks + 2 * lane] | uint32_t(chunk[blocks + 2 * lane + 1]) << 8;
    mode = packed >> kTailBits;
    tail_bytes = packed & ((1u << kTailBits) - 1);
    top = chunk[lane];
    if (F::has_trim) trim = chunk[3 * blocks + lane];
    good = mode < kModes && trim <= F::M;
    if (good) body_size = body_bytes<F>(mode, least(numel - lane * block, block), trim);
    if (mode == RAW) good = good && tail_bytes == 0;
    if (mode == FILL) good = good && (tail_bytes == 0 || tail_bytes == sizeof(typename F::Word));
  }
  const uint32_t bodies = __reduce_add_sync(kEveryLane, body_size), tails = __reduce_add_sync(kEveryLane, tail_bytes);
  const uint32_t body = table + sum_below(body_size), tail = table + bodies + sum_below(tail_bytes);
  if (lane < blocks) entries[lane] = {body, tail, uint16_t(tail_bytes), uint8_t(mode), uint8_t(top), uint8_t(trim)};
  return __all_sync(kEveryLane, good) && pad16(table + bodies + tails) == bytes;
}

// A lane's words of the two planes of a tier after the first, and where its escapes are among all of the tier's.
struct TierWords {
  uint32_t low, high, escapes_below;
};

// Reads the `count` entries of a tier from bit `at` of `second`; returns how many escape.
ZIPCCL_DEVICE uint32_t read_tier(const uint8_t* second, uint32_t at, uint32_t count, TierWords& tier) {
  const uint32_t first = at + kLanes * lane_id();
  tier.low = read_bits(second, first, at + count);
  tier.high = read_bits(second, first + count, at + 2 * count);
  const uint32_t escapes = uint32_t(__popc(tier.low & tier.high));
  tier.escapes_below = sum_below(escapes);
  return __shfl_sync(kEveryLane, tier.escapes_below + escapes, kLanes - 1);
}

// The exponents of a tier's `count` entries to `to`: by their codes, or the next of those that the tier escapes, `escapes`.
template <typename Code, uint32_t kTier>
ZIPCCL_DEVICE void decode_tier(const TierWords& tier, uint32_t count, uint32_t top, const uint8_t* escapes, uint8_t* to) {
  constexpr uint32_t names = names_of(Code::tier[kTier]);
  for (uint32_t i = 0; i < count; i += kLanes) {
    const uint32_t low = __shfl_sync(kEveryLane, tier.low, i / kLanes), high = __shfl_sync(kEveryLane, tier.high, i / kLanes);
    const uint32_t below = __shfl_sync(kEveryLane, tier.escapes_below, i / kLanes), escaped = low & high;
    const uint32_t code = (low >> lane_id() & 1) | (high >> lane_id() & 1) << 1;
    if (i + lane_id() < count) {
      uint32_t e = top + kAbove - (names >> 8 * code & 255);
      if (kTier + 1 == kTiers && code == kZeroCode) e = 0;
      if (code == 3) e = escapes[below + __popc(escaped & lanes_below())];
      to[i + lane_id()] = uint8_t(e);
    }
  }
  __syncwarp();
}

// Decodes m coded elements (FORMAT.md 2.1). The first part is proven to be there; the second must fill its `bytes` bytes exactly.
template <typename F, typename Code>
ZIPCCL_DEVICE bool decode_elements(const uint8_t* first, const uint8_t* second, uint32_t bytes, uint32_t m, uint32_t top, uint32_t trim,
                                   uint8_t (*list)[kMaxBlock], Rows<F>& words) {
  constexpr uint32_t bits = Code::tier[0].bits;
  if (!F::has_trim) trim = 0;  // the compiler then knows r
  const uint32_t r = 1 + F::M - trim;
  const uint8_t* const tier1 = first + parts_bytes(m, r);
  uint32_t codes[bits], escapes = kEveryLane, at[kRows];  // a byte for each row
#pragma unroll
  for (uint32_t p = 0; p < bits; ++p) {
    codes[p] = 0;
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row)
      if (octet_length(row, m)) codes[p] |= uint32_t(tier1[p * plane_bytes(m) + row * kLanes + lane_id()]) << 8 * row;
    escapes &= codes[p];
  }
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) escapes &= ~(~low_ones(octet_length(row, m)) << 8 * row & 255u << 8 * row);
  const uint32_t count1 = places(escapes, at);

  TierWords tiers[kTiers - 1];
  if (2 * count1 > 8 * bytes) return false;
  const uint32_t count2 = read_tier(second, 0, count1, tiers[0]);
  if (2 * (count1 + count2) > 8 * bytes) return false;
  const uint32_t count3 = read_tier(second, 2 * count1, count2, tiers[1]);
  if (2 * (count1 + count2 + count3) > 8 * bytes) return false;
  const uint32_t left = read_tier(second, 2 * (count1 + count2), count3, tiers[2]);
  const uint32_t tier_bytes = (2 * (count1 + count2 + count3) + 7) / 8;
  if (tier_bytes + left != bytes) return false;
  decode_tier<Code, 3>(tiers[2], count3, top, second + tier_bytes, list[0]);
  decode_tier<Code, 2>(tiers[1], count2, top, list[0], list[1]);
  decode_tier<Code, 1>(tiers[0], count1, top, list[1], list[0]);

  const uint32_t top4 = ((top + kAbove - Code::tier[0].k_of_code[0]) & 255) * kEachByte;
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t length = octet_length(row, m);
    Bytes8 code = {{0, 0}};
#pragma unroll
    for (uint32_t p = 0; p < bits; ++p) {
      const Bytes8 plane = spread(codes[p] >> 8 * row & 255);
      code.half[0] |= plane.half[0] << p, code.half[1] |= plane.half[1] << p;
    }
    Bytes8 e = {{__vsub4(top4, code.half[0]), __vsub4(top4, code.half[1])}};
    const uint8_t* escaped = list[0] + at[row];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i)
      if (escapes >> (8 * row + i) & 1) e.half[i / 4] = __byte_perm(e.half[i / 4], *escaped++, 0x3210 + (4 - i % 4) * (1 << 4 * (i % 4)));

    Bytes8 parts[(1 + F::M + 7) / 8 > 1 ? (1 + F::M + 7) / 8 : 2] = {};
#pragma unroll
    for (uint32_t byte = 0; byte < (1 + F::M + 7) / 8; ++byte) {
      if (byte < r / 8) {
        const uint8_t* const from = first + byte * m + row * kRow + 8 * lane_id();
        if (length == 8 && reinterpret_cast<uintptr_t>(from) % 8 == 0) {
          const uint2 eight = *reinterpret_cast<const uint2*>(from);
          parts[byte] = {{eight.x, eight.y}};
        } else {
#pragma unroll
          for (uint32_t i = 0; i < 8; ++i)
            if (i < length) parts[byte].half[i / 4] |= uint32_t(from[i]) << 8 * (i % 4);
        }
      } else if (byte == r / 8 && length) {
        for (uint32_t p = 0; p < r % 8; ++p) {
          const Bytes8 plane = spread(first[r / 8 * m + p * plane_bytes(m) + row * kLanes + lane_id()]);
          parts[byte].half[0] |= plane.half[0] << p, parts[byte].half[1] |= plane.half[1] << p;
        }
      }
    }
    if (F::E < 8) e.half[0] &= F::exponent_mask * kEachByte, e.half[1] &= F::exponent_mask * kEachByte;
    words.row[row].join(parts, e, trim);
  }
  __syncwarp();  // the lists have been read
  return true;
}

// Decodes a SPARSE tail of `bytes` bytes to n words (FORMAT.md 2.2).
template <typename F>
ZIPCCL_DEVICE bool decode_sparse(const uint8_t* tail, uint32_t bytes, uint32_t n, uint32_t top, uint32_t trim, DecodeScratch<F>& scratch,
                                 Rows<F>& words) {
  using Word = typename F::Word;
  const uint32_t plane = plane_bytes(n);
  if (bytes < 1 + plane || tail[0] > 1) return false;
  uint32_t zeros = 0, keep = 0, at[kRows], zero_at[kRows];
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const uint32_t valid = low_ones(octet_length(row, n));
    const uint32_t map = valid ? tail[1 + row * kLanes + lane_id()] & valid : 0;
    zeros |= map << 8 * row;
    keep |= (~map & valid) << 8 * row;
  }
  const uint32_t m = places(keep, at), zero_count = places(zeros, zero_at);
  const uint32_t signs_at = 1 + plane, first = signs_at + (tail[0] ? plane_bytes(zero_count) : 0);
  const uint32_t second = first + first_part_bytes(m, 1 + F::M - trim, Cascade::tier[0].bits);
  if (second > bytes) return false;
  if (!decode_elements<F, Cascade>(tail + first, tail + second, bytes - second, m, top, trim, scratch.list, words)) return false;
  words.store(scratch.words, m);
  __syncwarp();
#pragma unroll
  for (uint32_t row = 0; row < kRows; ++row) {
    const Word* other = scratch.words + at[row];
    uint32_t sign = 8 * signs_at + zero_at[row];
#pragma unroll
    for (uint32_t i = 0; i < 8; ++i) {
      Word word = 0;
      if (keep >> (8 * row + i) & 1) word = *other++;
      if (zeros >> (8 * row + i) & 1) {
        if (tail[0] && tail[sign / 8] >> sign % 8 & 1) word = F::negative_zero;
        ++sign;
      }
      words.row[row].set(i, word);
    }
  }
  __syncwarp();  // the words have been read
  return true;
}

// Decodes a block of n words of a chunk whose table is good; returns whether the block is.
template <typename F>
ZIPCCL_DEVICE bool decode_block(const uint8_t* chunk, const Entry& entry, uint32_t n, DecodeScratch<F>& scratch, Rows<F>& words) {
  using Word = typename F::Word;
  const uint8_t *const body = chunk + entry.body, *const tail = chunk + entry.tail;
  switch (entry.mode) {
    case FILL: {
      Word word = 0;
      for (uint32_t i = 0; i < entry.tail_bytes; ++i) word |= Word(Word(tail[i]) << 8 * i);
#pragma unroll
      for (uint32_t row = 0; row < kRows; ++row)
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) words.row[row].set(i, word);
      return true;
    }
    case RAW: words.load(reinterpret_cast<const Word*>(body), n, Word(0)); return true;
    case CASCADE: return decode_elements<F, Cascade>(body, tail, entry.tail_bytes, n, entry.top, entry.trim, scratch.list, words);
    case WINDOW: return decode_elements<F, Window>(body, tail, entry.tail_bytes, n, entry.top, entry.trim, scratch.list, words);
    default: return decode_sparse<F>(tail, entry.tail_bytes, n, entry.top, entry.trim, scratch, words);
  }
}

// Where a chunk of a payload lies, if its offsets are possible.
struct ChunkBytes {
  const uint8_t* at;  // null: they are not
  uint64_t bytes;
};
ZIPCCL_DEVICE ChunkBytes find_chunk(const uint8_t* payload, uint64_t bytes, uint64_t chunk, uint64_t chunks) {
  const uint64_t begin = (4 * chunks + 15) / 16 * 16;
  if (begin > bytes) return {nullptr, 0};
  const uint32_t* const index = reinterpret_cast<const uint32_t*>(payload);
  const uint64_t start = uint64_t(index[chunk]) * 16, end = chunk + 1 < chunks ? uint64_t(index[chunk + 1]) * 16 : bytes;
  if (start < begin || start > end || end > bytes || (chunk == 0 && start != begin)) return {nullptr, 0};
  return {payload + start, end - start};
}

// The failure that is kept is the one of the first job, and of its first chunk: job << 48 | chunk << 8 | status.
ZIPCCL_DEVICE void report(uint64_t* status, uint64_t job, uint64_t chunk, int32_t what) {
  atomicMin_system(reinterpret_cast<unsigned long long*>(status), static_cast<unsigned long long>(job << 48 | chunk << 8 | uint32_t(what)));
}

constexpr uint32_t kMaxDecodeJobs = 64;

struct DecodeJob {
  const uint8_t* payload;  // a multiple of 16
  const uint8_t* header;   // 32 bytes before it: a whole flat frame in `bytes` bytes of slot; or null: a payload of `bytes` bytes
  uint64_t bytes;
  void* words;             // at any address of a word
  uint64_t numel, first_item;
};

struct DecodeJobs {
  DecodeJob job[kMaxDecodeJobs];
  uint32_t count, block, dtype;
  uint64_t* status;              // all ones, and so it stays if nothing fails; may be host memory
};

// Copies the part of a raw frame that a work item stands for.
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
  uint32_t good;
};

// One work item: a chunk of a job, or as many words of a raw frame; or a job without words.
template <typename F>
ZIPCCL_DEVICE void decode(const DecodeJobs& jobs) {
  using Word = typename F::Word;
  ZIPCCL_SHARED(DecodeShared<F>, shared);
  const uint64_t item = blockIdx.x;
  uint32_t number = 0;
  while (number + 1 < jobs.count && jobs.job[number + 1].first_item <= item) ++number;
  const DecodeJob& job = jobs.job[number];
  const uint64_t chunk = item - job.first_item;
  const uint32_t block = jobs.block;
  const uint64_t per_chunk = uint64_t(block) * kChunkBlocks, chunks = (job.numel + per_chunk - 1) / per_chunk, first = chunk * per_chunk;
  const uint32_t numel = uint32_t(job.numel - first < per_chunk ? job.numel - first : per_chunk), blocks = (numel + block - 1) / block;
  uint64_t bytes = job.bytes;
  if (job.header) {
    const Opened opened = read_header(job.header, job.bytes, jobs.dtype, block, job.numel, sizeof(Word));
    bytes = opened.payload_bytes;
    if (opened.status) {
      if (chunk == 0 && threadIdx.x == 0) report(jobs.status, number, 0, opened.status);
      return;
    }
    if (!opened.coded) {
      copy_raw(job.payload + first * sizeof(Word), static_cast<uint8_t*>(job.words) + first * sizeof(Word), numel * sizeof(Word));
      return;
    }
  }
  if (chunk >= chunks) {
    if (bytes && threadIdx.x == 0) report(jobs.status, number, 0, INDEX);
    return;
  }
  const ChunkBytes found = find_chunk(job.payload, bytes, chunk, chunks);
  if (!found.at) {
    if (threadIdx.x == 0) report(jobs.status, number, chunk, INDEX);
    return;
  }
  if (warp_id() == 0) {
    const bool good = read_table<F>(found.at, found.bytes, numel, block, shared.entry);
    if (lane_id() == 0) shared.good = good;
  }
  __syncthreads();
  bool good = shared.good;
  for (uint32_t b = warp_id(); good && b < blocks; b += kWarps) {
    const uint32_t n = least(numel - b * block, block);
    Rows<F> words;
    good = decode_block<F>(found.at, shared.entry[b], n, shared.scratch[warp_id()], words);
    if (good) words.store(static_cast<Word*>(job.words) + first + b * block, n);
  }
  if (!good && lane_id() == 0) report(jobs.status, number, chunk, BLOCK);
}

}  // namespace
}  // namespace zipccl
