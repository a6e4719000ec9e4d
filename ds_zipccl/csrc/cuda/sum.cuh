// Decode and sum: the words of several summands are added in fp32, in their order, and written once. A summand is a frame, or plain words.
#pragma once
#include "cuda/decode.cuh"
#include "common/float_values.cuh"

namespace zipccl {
namespace {

constexpr uint32_t kMaxFrames = 48;  // whose tables are in shared memory at a time; and most addresses of a launch

// Summand k is `own` where k is own_at. Otherwise it is in a slot: at frame[0] + k * stride, with capacity[0] bytes; or, without a stride,
// at frame[k], with capacity[k] bytes.
struct SumJob {
  const uint8_t* frame[kMaxFrames];  // slots, each at a multiple of 16
  uint64_t capacity[kMaxFrames];
  uint64_t stride;
  const void* own;                   // plain words, at any address of a word; may be `sums` where these are words
  void* sums;                        // at any address of a sum
  uint64_t numel;
  uint64_t* status;                  // as in DecodeJobs, without ranks; the summand for the frame
  uint32_t count, block, dtype;      // all coded frames have this block
  uint32_t own_at;                   // or kNone
  uint32_t plain;                    // slots hold plain words, or flat frames without checksums
  uint32_t fp32_sums;                // the sums are floats, not words
  uint32_t split;                    // chunks are cut into 1 << split parts
};

template <typename F>
struct SumShared {
  DecodeScratch<F> scratch[kWarps];
  Entry entry[kMaxFrames][kChunkBlocks];
  const uint8_t* chunk[kMaxFrames];  // of a coded frame; of plain words and of a raw frame the first word
  uint8_t coded[kMaxFrames];
  uint32_t failed;
};

// A warp opens summand k, the one in place `at` of the shared tables, for a chunk of numel words. Returns OK, or the FrameErrorCode.
template <typename F>
ZIPCCL_DEVICE int32_t open_summand(const SumJob& job, uint32_t k, uint32_t at, uint32_t chunk, uint32_t numel, SumShared<F>& shared) {
  const bool own = k == job.own_at;
  const uint8_t* from = job.stride ? job.frame[0] + k * job.stride : job.frame[k];
  bool coded = false;
  if (own) {
    from = static_cast<const uint8_t*>(job.own);
  } else if (!job.plain) {
    const uint64_t capacity = job.capacity[job.stride ? 0 : k];
    const Opened opened = read_header(from, capacity, kCodecExponent, job.dtype, job.block, job.numel, sizeof(typename F::Word));
    if (opened.status) return opened.status;
    from += kHeaderBytes;
    coded = opened.coded;
    if (coded) {
      const ChunkBytes found = find_chunk(from, opened.payload_bytes, chunk, pieces(job.numel, job.block * kChunkBlocks));
      if (!found.at) return INDEX;
      if (!read_table<F>(found.at, found.bytes, numel, job.block, shared.entry[at])) return BLOCK;
      from = found.at;
    }
  }
  if (lane_id() == 0) shared.chunk[at] = from, shared.coded[at] = coded;
  return OK;
}

// Sums that a refused frame should have helped to give.
template <typename F>
ZIPCCL_DEVICE void refuse_sums(const SumJob& job, uint64_t first, uint32_t n, uint32_t at, uint32_t count) {
  if (job.fp32_sums) {
    refuse(static_cast<uint32_t*>(job.sums) + first, n, at, count);
  } else {
    refuse(static_cast<typename F::Word*>(job.sums) + first, n, at, count);
  }
}

// One work item: a part of a chunk of the sums. Warps take blocks, eight at a time; for these blocks the summands are opened in groups. Sums that a
// bad frame belongs to become NaN.
template <typename F>
ZIPCCL_DEVICE void decode_sum(const SumJob& job) {
  using Word = typename F::Word;
  ZIPCCL_SHARED(SumShared<F>, shared);
  const uint32_t chunk = blockIdx.x >> job.split, part = blockIdx.x & ((1u << job.split) - 1), per_part = kChunkBlocks >> job.split;
  const uint32_t per_chunk = job.block * kChunkBlocks;
  const uint64_t first = uint64_t(chunk) * per_chunk;
  const uint32_t numel = uint32_t(job.numel - first < per_chunk ? job.numel - first : per_chunk), blocks = pieces(numel, job.block);
  if (threadIdx.x == 0) shared.failed = 0;
  const uint32_t begin = part * per_part, end = least(begin + per_part, blocks);

  for (uint32_t b0 = begin; b0 < end; b0 += kWarps) {
    const uint32_t b = b0 + warp_id(), n = b < end ? least(numel - b * job.block, job.block) : 0;
    const uint64_t at = first + b * job.block;
    float sum[kRows][8];
    bool good = n != 0;
    for (uint32_t group = 0; group < job.count; group += kMaxFrames) {
      const uint32_t members = least(job.count - group, kMaxFrames);
      if (b0 == begin || job.count > kMaxFrames) {
        __syncthreads();  // the group before has been read
        for (uint32_t member = warp_id(); member < members; member += kWarps) {
          const int32_t status = open_summand<F>(job, group + member, member, chunk, numel, shared);
          if (status && lane_id() == 0) {
            atomicOr(&shared.failed, 1u);
            report(job.status, place_of(kNone, group + member, chunk), status);
          }
        }
        __syncthreads();
        if (shared.failed) {
          const uint32_t skipped = begin * job.block;
          return refuse_sums<F>(job, first + skipped, least(end * job.block, numel) - skipped, threadIdx.x, kThreads);
        }
      }
      for (uint32_t member = 0; good && member < members; ++member) {
        const uint8_t* const from = shared.chunk[member];
        const Entry& entry = shared.entry[member][b];
        const bool coded = shared.coded[member], start = group + member == 0;  // not 0 + x: that would lose the sign of -0
        DecodeScratch<F>& scratch = shared.scratch[warp_id()];
        const auto add = [&](uint32_t row, const Octet<F>& octet) {
#pragma unroll
          for (uint32_t i = 0; i < 8; ++i) {
            const float value = Values<F>::from(octet.word(i));
            sum[row][i] = start ? value : sum[row][i] + value;
          }
        };
        if (coded && is_whole(entry, n)) {
          good = decode_whole<F>(from, entry, scratch, add);
        } else {
          const Word* words = reinterpret_cast<const Word*>(from) + at;
          if (coded) {
            good = decode_part<F>(from, entry, n, scratch, scratch.words);
            words = scratch.words;
          }
          __syncwarp();
#pragma unroll
          for (uint32_t row = 0; row < kRows; ++row) {
            Octet<F> octet;
            octet.load(words + row * kRow + 8 * lane_id(), Part{n}.length(row), 0);
            add(row, octet);
          }
        }
        if (!good && lane_id() == 0) report(job.status, place_of(kNone, group + member, chunk), BLOCK);
        __syncwarp();  // the scratch has been read
      }
    }
    if (!good) {
      refuse_sums<F>(job, at, n, lane_id(), kLanes);
      continue;
    }
    // Whole blocks that are not at a multiple of 16 go through the scratch, as in decode_blocks().
    const uint32_t itemsize = job.fp32_sums ? 4 : sizeof(Word);
    uint8_t* const sums = static_cast<uint8_t*>(job.sums) + at * itemsize;
    const bool staged = n == Whole::n && reinterpret_cast<uintptr_t>(sums) % 16;
    static_assert(sizeof(DecodeScratch<F>) >= 4 * kMaxBlock, "room for the floats of a block");
    uint8_t* const stage = staged ? reinterpret_cast<uint8_t*>(&shared.scratch[warp_id()]) : sums;
#pragma unroll
    for (uint32_t row = 0; row < kRows; ++row) {
      uint8_t* const to = stage + (row * kRow + 8 * lane_id()) * itemsize;
      const uint32_t length = Part{n}.length(row);
      Octet<Fp32> unrounded;
      Octet<F> rounded;
#pragma unroll
      for (uint32_t i = 0; i < 8; ++i) unrounded.set(i, as_bits(sum[row][i])), rounded.set(i, Values<F>::round(sum[row][i]));
      if (job.fp32_sums) {
        unrounded.store(reinterpret_cast<uint32_t*>(to), length);
      } else {
        rounded.store(reinterpret_cast<Word*>(to), length);
      }
    }
    if (staged) {
      __syncwarp();
      copy_bytes(sums, stage, n * itemsize);
      __syncwarp();  // the scratch has been read
    }
  }
}

}  // namespace
}  // namespace zipccl
