// The header of a flat frame (FORMAT.md section 1), for kernels that write and read whole frames without the host. Also the tables of jobs
// and the status word of these kernels.
#pragma once
#include "cuda/warp.cuh"

namespace zipccl {
namespace {

constexpr uint32_t kHeaderBytes = 32;
constexpr uint32_t kMagic = 'Z' | 'C' << 8 | 'C' << 16 | 'L' << 24;
constexpr uint32_t kVersion = 2, kCodecRaw = 0, kCodecExponent = 1, kCodecDelta = 2, kFlagOverflow = 4;

constexpr uint32_t kMaxJobs = 48;  // of a launch; their table travels with the kernel's parameters, of which 4 KiB work everywhere
constexpr uint32_t kNone = ~0u;

// The job that a work item belongs to: the last one whose first item is not after it. Jobs are in the order of their items.
template <typename Jobs>
ZIPCCL_DEVICE uint32_t job_of(const Jobs& jobs, uint32_t item) {
  uint32_t number = 0;
  for (uint32_t past = jobs.count; number + 1 < past;) {
    const uint32_t middle = (number + past) / 2;
    if (jobs.job[middle].first_item <= item) {
      number = middle;
    } else {
      past = middle;
    }
  }
  return number;
}

// Words of block b of a chunk. Kernels look such numbers up in shared memory wherever they need them, and keep no registers meanwhile.
template <typename Shared>
ZIPCCL_DEVICE uint32_t numel_of(const Shared& shared, uint32_t b, uint32_t block) {
  return least(shared.numel - b * block, block);
}

// The status keeps the first failure in the order of rank, frame and chunk: rank << 48 | frame << 32 | chunk << 8 | FrameErrorCode. The
// rank is 0xffff in calls without ranks. A number too large for its bits becomes the largest one.
ZIPCCL_DEVICE uint64_t place_of(uint32_t rank, uint32_t frame, uint32_t chunk) {
  return uint64_t(least(rank, 0xffff)) << 48 | uint64_t(least(frame, 0xffff)) << 32 | least(chunk, 0xffffff) << 8;
}
ZIPCCL_DEVICE void report(uint64_t* status, uint64_t place, int32_t what) {
  atomicMin_system(reinterpret_cast<unsigned long long*>(status), static_cast<unsigned long long>(place | uint32_t(what)));
}

// `count` threads, of which this is thread `at`, make words NaN that a refused frame should have given. Ones everywhere are a NaN of
// every type.
template <typename Word>
ZIPCCL_DEVICE void refuse(Word* words, uint32_t n, uint32_t at, uint32_t count) {
  for (; at < n; at += count) words[at] = Word(~Word(0));
}

// The threads of a block copy bytes between any two addresses, and touch nothing but these bytes.
ZIPCCL_DEVICE void copy_raw(const uint8_t* from, uint8_t* to, uint32_t bytes) {
  uint32_t done;
  if ((reinterpret_cast<uintptr_t>(from) | reinterpret_cast<uintptr_t>(to)) % 16 == 0) {
    const uint32_t vectors = bytes / 16;
    for (uint32_t i = threadIdx.x; i < vectors; i += kThreads) reinterpret_cast<uint4*>(to)[i] = reinterpret_cast<const uint4*>(from)[i];
    done = 16 * vectors;
  } else {  // whole words of `to`, each out of one or two words of `from`
    uint32_t head = uint32_t(-reinterpret_cast<uintptr_t>(to)) & 3;
    const uint32_t phase = uint32_t(reinterpret_cast<uintptr_t>(from) + head) & 3;
    head = least(head < phase ? head + 4 : head, bytes);  // the first word of `from` then begins inside
    uint32_t words = (bytes - head) / 4;
    if (phase && words && bytes - head - 4 * words < 4 - phase) --words;  // the last one ends inside
    const uint32_t* const source = reinterpret_cast<const uint32_t*>(from + head - phase);
    for (uint32_t i = threadIdx.x; i < words; i += kThreads)
      reinterpret_cast<uint32_t*>(to + head)[i] = phase ? __funnelshift_r(source[i], source[i + 1], 8 * phase) : source[i];
    if (threadIdx.x < head) to[threadIdx.x] = from[threadIdx.x];
    done = head + 4 * words;
  }
  for (uint32_t i = done + threadIdx.x; i < bytes; i += kThreads) to[i] = from[i];
}

// `block` is 1 in a raw frame. `overflow`: the frame did not fit in its slot; it ends with this header, whose frame_bytes is the length of
// the whole frame.
ZIPCCL_DEVICE void write_header(uint8_t* to, uint32_t codec, uint32_t dtype, uint32_t block, uint64_t numel, uint64_t frame_bytes,
                                bool overflow) {
  uint4* const header = reinterpret_cast<uint4*>(to);
  header[0] = make_uint4(kMagic, kVersion | codec << 8 | dtype << 16 | (overflow ? kFlagOverflow : 0) << 24, log2_of(block) << 8, 0);
  header[1] = make_uint4(uint32_t(numel), uint32_t(numel >> 32), uint32_t(frame_bytes), uint32_t(frame_bytes >> 32));
}

struct Opened {
  int32_t status;  // OK, or the FrameErrorCode
  bool coded;      // or raw
  uint64_t payload_bytes;
};

// Reads the header of a flat frame without a checksum in a buffer of `capacity` bytes. The wanted frame has numel words of `dtype`, raw or
// coded with codec `wanted` in blocks of `block`.
ZIPCCL_DEVICE Opened read_header(const uint8_t* from, uint64_t capacity, uint32_t wanted, uint32_t dtype, uint32_t block, uint64_t numel,
                                 uint32_t itemsize) {
  if (capacity < kHeaderBytes) return {TRUNCATED, false, 0};
  const uint4 a = reinterpret_cast<const uint4*>(from)[0], b = reinterpret_cast<const uint4*>(from)[1];
  const uint32_t codec = a.y >> 8 & 255, flags = a.y >> 24, log2 = a.z >> 8 & 255;
  const bool coded = codec == wanted;
  const uint64_t frame_bytes = uint64_t(b.w) << 32 | b.z, payload_bytes = frame_bytes - kHeaderBytes;
  if (a.x != kMagic) return {MAGIC, coded, 0};
  if ((a.y & 255) != kVersion) return {VERSION, coded, 0};
  if (!coded && codec != kCodecRaw) return {CODEC, coded, 0};
  if (flags == kFlagOverflow) return {OVERFLOWED, coded, 0};
  if (flags || a.z & ~0xff00u || a.w || (coded ? log2 < 7 || log2 > 10 : log2 != 0)) return {RESERVED, coded, 0};
  if (frame_bytes < kHeaderBytes || frame_bytes > capacity) return {TRUNCATED, coded, 0};
  if ((a.y >> 16 & 255) != dtype || (uint64_t(b.y) << 32 | b.x) != numel || (coded && 1u << log2 != block)) return {MISMATCH, coded, 0};
  if (!coded && payload_bytes != numel * itemsize) return {SIZE, coded, 0};
  return {OK, coded, payload_bytes};
}

}  // namespace
}  // namespace zipccl
