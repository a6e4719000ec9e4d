// The C interface of low-rank payloads on the CPU (FORMAT.md 2.12): products of factors, and orthonormal columns.
#include "cpu/chunks.h"
#include "cpu/interface.h"
#include "cpu/lossy/denormals.h"

using namespace zipccl;

namespace {

constexpr uint64_t kRows = 64;      // rows that a thread takes at a time
constexpr uint64_t kColumns = 512;  // columns of a row that are made at a time where they are added

}  // namespace

void zipccl_multiply(const float* p, const float* columns, uint64_t stride, uint32_t rank, uint64_t n, uint64_t m, int32_t dtype,
                     uint8_t* out, int32_t into, int32_t threads) {
  const ZipcclType type = type_of(dtype);
  const uint64_t itemsize = kItemsize[type], row_bytes = m * itemsize, sum_bytes = into == ZIPCCL_FP32_SUMS ? 4 : itemsize;
  ZipcclLevel::Multiply* const of_type = zipccl_chosen().multiply[type];
  ZipcclLevel::AddWords* const add = zipccl_chosen().add_words[type][into == ZIPCCL_FP32_SUMS];
  const auto multiply = [&](uint64_t row, uint64_t rows, uint64_t at, uint64_t here, uint8_t* words) {
    const Denormals on;
    of_type(p + row * rank, columns + at, stride, rank, rows, here, words, here * itemsize);
  };
  each_part(n, kRows, n * row_bytes, threads, [&](uint64_t first, uint64_t rows) {
    if (!into) return multiply(first, rows, 0, m, out + first * row_bytes);
    alignas(64) uint8_t words[4 * kColumns * sizeof(float)];
    for (uint64_t row = first; row < first + rows; row += 4) {
      const uint64_t count = std::min<uint64_t>(first + rows - row, 4);
      for (uint64_t at = 0; at < m; at += kColumns) {
        const uint64_t here = std::min(m - at, kColumns);
        multiply(row, count, at, here, words);
        for (uint64_t i = 0; i < count; ++i) add(words + i * here * itemsize, here, out + ((row + i) * m + at) * sum_bytes);
      }
    }
  });
}

void zipccl_orthonormalize(float* columns, uint64_t n, uint32_t rank, double* room) {
  ZipcclLevel::Orthonormalize* const orthonormalize = zipccl_chosen().orthonormalize;
  const Denormals on;
  orthonormalize(columns, n, rank, room);
}
