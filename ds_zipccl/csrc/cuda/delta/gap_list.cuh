// LIST chunks of delta payloads for CUDA (FORMAT.md 2.5 and section 3): what encoder and decoder share. A block of threads works on a chunk:
// each thread has an equal part of its words or bits, in their order, and sums over the threads before it say which words and gaps they are.
#pragma once
#include "common/change_list.cuh"
#include "cuda/delta/delta.cuh"
#include "cuda/frame.cuh"

namespace zipccl {
namespace {

// A number below 2^16 for each level.
struct EachLevel {
  uint32_t pair[3];

  ZIPCCL_DEVICE uint32_t of(uint32_t level) const { return (level < 2 ? pair[0] : level < 4 ? pair[1] : pair[2]) >> 16 * (level % 2) & 0xffff; }
  ZIPCCL_DEVICE void add(uint32_t level, uint32_t x) {
    x <<= 16 * (level % 2);
    if (level < 2) pair[0] += x;
    else if (level < 4) pair[1] += x;
    else pair[2] += x;
  }
};

// Room in which the warps of a block of threads tell each other a number. Uses of the same room have a barrier and the use of another one
// between them.
using Told = uint32_t[3][kWarps];

// The sums over the threads before this one; `all` becomes those over all threads. A barrier for the block of threads.
ZIPCCL_DEVICE EachLevel sum_before(const EachLevel& x, Told& told, EachLevel& all) {
  EachLevel before;
#pragma unroll
  for (uint32_t i = 0; i < 3; ++i) {
    before.pair[i] = sum_below(x.pair[i]);
    if (lane_id() == kLanes - 1) told[i][warp_id()] = before.pair[i] + x.pair[i];
  }
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < 3; ++i) {
    all.pair[i] = 0;
#pragma unroll
    for (uint32_t warp = 0; warp < kWarps; ++warp) {
      const uint32_t sum = told[i][warp];
      all.pair[i] += sum;
      if (warp < warp_id()) before.pair[i] += sum;
    }
  }
  return before;
}
// The same for one number.
ZIPCCL_DEVICE uint32_t sum_before(uint32_t x, Told& told, uint32_t& all) {
  uint32_t before = sum_below(x);
  if (lane_id() == kLanes - 1) told[0][warp_id()] = before + x;
  __syncthreads();
  all = 0;
#pragma unroll
  for (uint32_t warp = 0; warp < kWarps; ++warp) {
    const uint32_t sum = told[0][warp];
    all += sum;
    if (warp < warp_id()) before += sum;
  }
  return before;
}
// The largest numbers of the threads before this one, zero for the first thread. A barrier for the block of threads.
ZIPCCL_DEVICE EachLevel most_before(EachLevel x, Told& told) {
#pragma unroll
  for (uint32_t i = 0; i < 3; ++i) {
#pragma unroll
    for (uint32_t distance = 1; distance < kLanes; distance *= 2)
      x.pair[i] = __vmaxu2(x.pair[i], __shfl_up_sync(kEveryLane, x.pair[i], distance));
    if (lane_id() == kLanes - 1) told[i][warp_id()] = x.pair[i];
    const uint32_t below = __shfl_up_sync(kEveryLane, x.pair[i], 1);
    x.pair[i] = lane_id() ? below : 0;
  }
  __syncthreads();
#pragma unroll
  for (uint32_t i = 0; i < 3; ++i) {
#pragma unroll
    for (uint32_t warp = 0; warp < kWarps; ++warp)
      if (warp < warp_id()) x.pair[i] = __vmaxu2(x.pair[i], told[i][warp]);
  }
  return x;
}

}  // namespace
}  // namespace zipccl
