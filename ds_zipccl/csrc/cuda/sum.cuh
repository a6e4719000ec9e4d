// Decode and sum: the words of several frames are added in fp32, in the order of the frames, and written once.
#pragma once
#include "cuda/decode.cuh"
#include "common/float_values.cuh"

namespace zipccl {
namespace {

constexpr uint32_t kMaxFrames = 48;  // of a launch

struct SumJob {
  const uint8_t* frame[kMaxFrames];  // flat frames without checksums, each at a multiple of 16
  uint64_t capacity[kMaxFrames];     // bytes of their slots
  uint32_t count, block, dtype;      // all coded frames have this block
  uint32_t fp32_sums, add;           // the sums are floats, not words; the floats already in `sums` are the first summand
  uint32_t split;                    // chunks are cut into 1 << split parts
  void* sums;
  uint64_t numel;
  uint64_t* status;                  // as in DecodeJobs, a frame for a job
};

template <typename F>
struct SumShared {
  DecodeScratch<F> scratch[kWarps];
  Entry entry[kMaxFrames][kChunkBlocks];
  const uint8_t* chunk[kMaxFrames];  // of a coded frame; of a raw one its payload
  uint8_t coded[kMaxFrames];
  uint32_t failed;
};

// A warp opens a frame for a chunk of numel words. Returns OK, or the FrameErrorCode.
template <typename F>
ZIPCCL_DEVICE int32_t open_summand(const SumJob& job, uint32_t frame, uint32_t chunk, uint32_t numel, SumShared<F>& shared) {
  const uint8_t* const at = job.frame[frame];
  const Opened opened = read_header(at, job.capacity[frame], kCodecExponent, job.dtype, job.block, job.numel, sizeof(typename F::Word));
  if (opened.status) return opened.status;
  const uint8_t* from = at + kHeaderBytes;
  if (opened.coded) {
    const ChunkBytes found = find_chunk(from, opened.payload_bytes, chunk, pieces(job.numel, job.block * kChunkBlocks));
    if (!found.at) return INDEX;
    if (!read_table<F>(found.at, found.bytes, numel, job.block, shared.entry[frame])) return BLOCK;
    from = found.at;
  }
  if (lane_id() == 0) shared.chunk[frame] = from, shared.coded[frame] = opened.coded;
  return OK;
}

// One work item: a part of a chunk of the sums.
template <typename F>
ZIPCCL_DEVICE void decode_sum(const SumJob& job) {
  using Word = typename F::Word;
  ZIPCCL_SHARED(SumShared<F>, shared);
  const uint32_t chunk = blockIdx.x >> job.split, part = blockIdx.x & ((1u << job.split) - 1), per_part = kChunkBlocks >> job.split;
  const uint32_t per_chunk = job.block * kChunkBlocks;
  const uint64_t first = uint64_t(chunk) * per_chunk;
  const uint32_t numel = uint32_t(job.numel - first < per_chunk ? job.numel - first : per_chunk), blocks = pieces(numel, job.block);
  if (threadIdx.x == 0) shared.failed = 0;
  __syncthreads();
  for (uint32_t frame = warp_id(); frame < job.count; frame += kWarps) {
    const int32_t status = open_summand<F>(job, frame, chunk, numel, shared);
    if (status && lane_id() == 0) {
      atomicOr(&shared.failed, 1u);
      report(job.status, frame, chunk, status);
    }
  }
  __syncthreads();
  if (shared.failed) return;

  for (uint32_t b = part * per_part + warp_id(); b < least((part + 1) * per_part, blocks); b += kWarps) {
    const uint64_t at = first + b * job.block;
    const uint32_t n = least(numel - b * job.block, job.block);
    float sum[kRows][8];
    if (job.add) {
#pragma unroll
      for (uint32_t row = 0; row < kRows; ++row) {
        const uint32_t* const before = static_cast<const uint32_t*>(job.sums) + at + row * kRow + 8 * lane_id();
        const uint32_t length = Part{n}.length(row);
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) sum[row][i] = i < length ? as_float(before[i]) : 0;
      }
    }
    for (uint32_t frame = 0; frame < job.count; ++frame) {
      const uint8_t* const from = shared.chunk[frame];
      const Entry& entry = shared.entry[frame][b];
      DecodeScratch<F>& scratch = shared.scratch[warp_id()];
      const bool start = frame == 0 && !job.add;  // not 0 + x: that would lose the sign of -0
      const auto add = [&](uint32_t row, const Octet<F>& octet) {
#pragma unroll
        for (uint32_t i = 0; i < 8; ++i) {
          const float value = Values<F>::from(octet.word(i));
          sum[row][i] = start ? value : sum[row][i] + value;
        }
      };
      bool good = true;
      if (shared.coded[frame] && is_whole(entry, n)) {
        good = decode_whole<F>(from, entry, scratch, add);
      } else {
        const Word* words = reinterpret_cast<const Word*>(from) + at;
        if (shared.coded[frame]) {
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
      if (!good) {
        if (lane_id() == 0) report(job.status, frame, chunk, BLOCK);
        return;
      }
      __syncwarp();  // the scratch has been read
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
