// Products of two factors and orthonormal columns (FORMAT.md 2.12): a fixed order of operations, so that all levels give the same bits.
#pragma once
#include <math.h>
#include <string.h>

#include <algorithm>

#include "common/float_values.cuh"
#include "cpu/level.h"
#include "cpu/lossy/rounded.h"

namespace zipccl {
namespace {
namespace lowrank {

typedef float Floats __attribute__((vector_size(kRegister)));
typedef double Doubles __attribute__((vector_size(kRegister)));

constexpr uint32_t kTileRows = 4, kTileVectors = kRegister == 16 ? 1 : 2;
constexpr uint32_t kTileColumns = kTileVectors * kRegister / sizeof(float);
static_assert(kZipcclTile % kTileColumns == 0, "tiles end where the padding of columns does");

// Products of `Rows` rows with kTileColumns columns: sums over k ascending, each product and each sum rounded.
template <uint32_t Rows>
inline void multiply_tile(const float* p, const float* columns, uint64_t stride, uint32_t rank, float tile[][kTileColumns]) {
  Floats sums[Rows][kTileVectors], q[kTileVectors];
  memcpy(q, columns, sizeof q);
#pragma GCC unroll 4
  for (uint32_t i = 0; i < Rows; ++i)
#pragma GCC unroll 2
    for (uint32_t v = 0; v < kTileVectors; ++v) sums[i][v] = p[uint64_t(i) * rank] * q[v];
  for (uint32_t k = 1; k < rank; ++k) {
    memcpy(q, columns + k * stride, sizeof q);
#pragma GCC unroll 4
    for (uint32_t i = 0; i < Rows; ++i)
#pragma GCC unroll 2
      for (uint32_t v = 0; v < kTileVectors; ++v) sums[i][v] = sums[i][v] + p[uint64_t(i) * rank + k] * q[v];
  }
  memcpy(tile, sums, sizeof sums);
}

// Words of a row of a tile; of float16 none becomes infinite.
template <typename F>
inline void put_words(const float* values, uint64_t n, uint8_t* out) {
  using Word = typename F::Word;
  if constexpr (sizeof(Word) == sizeof(float)) {
    memcpy(out, values, n * sizeof(float));
  } else {
    Word words[kTileColumns];
    for (uint32_t j = 0; j < kTileColumns; ++j) {
      float value = values[j];
      if constexpr (F::M == 10) value = std::min(std::max(value, -65504.0f), 65504.0f);
      words[j] = Values<F>::round(value);
    }
    memcpy(out, words, n * sizeof(Word));
  }
}

// Words of `rows` rows of n columns each, `row_bytes` apart: the rows of p, of `rank` floats, times the columns. Those lie as `rank` rows
// of floats, `stride` apart, of which kZipcclTile more may be read than n says, up to a multiple of kZipcclTile.
template <typename F>
void multiply(const float* p, const float* columns, uint64_t stride, uint32_t rank, uint64_t rows, uint64_t n, uint8_t* out,
              uint64_t row_bytes) {
  alignas(64) float tile[kTileRows][kTileColumns];
  for (uint64_t at = 0; at < n; at += kTileColumns) {
    const uint64_t here = std::min<uint64_t>(n - at, kTileColumns);
    uint8_t* to = out + at * sizeof(typename F::Word);
    uint64_t row = 0;
    for (; row + kTileRows <= rows; row += kTileRows) {
      multiply_tile<kTileRows>(p + row * rank, columns + at, stride, rank, tile);
      for (uint32_t i = 0; i < kTileRows; ++i, to += row_bytes) put_words<F>(tile[i], here, to);
    }
    for (; row < rows; ++row, to += row_bytes) {
      multiply_tile<1>(p + row * rank, columns + at, stride, rank, tile);
      put_words<F>(tile[0], here, to);
    }
  }
}

constexpr uint32_t kLanes = 16;  // sums of a scalar product: lane l has the elements l, l + 16, l + 32, ...

inline double scalar_product(const double* a, const double* b, uint64_t n) {
  constexpr uint32_t each = kRegister / sizeof(double), vectors = kLanes / each;
  Doubles sums[vectors] = {};
  uint64_t at = 0;
  for (; at + kLanes <= n; at += kLanes)
    for (uint32_t v = 0; v < vectors; ++v) {
      Doubles x, y;
      memcpy(&x, a + at + v * each, sizeof x);
      memcpy(&y, b + at + v * each, sizeof y);
      sums[v] += x * y;
    }
  double lanes[kLanes];
  memcpy(lanes, sums, sizeof lanes);
  for (uint32_t l = 0; at < n; ++at, ++l) lanes[l] += a[at] * b[at];
  for (uint32_t half = kLanes / 2; half; half /= 2)
    for (uint32_t l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

// Orthonormal columns in place of `rank` columns of n floats, which lie as rows of `rank`: modified Gram-Schmidt, twice, in double precision.
// `room`: rank n doubles and rank more.
inline void orthonormalize(float* columns, uint64_t n, uint32_t rank, double* room) {
  double* const lengths = room + rank * n;
  const auto column = [&](uint32_t j) { return room + j * n; };
  for (uint32_t j = 0; j < rank; ++j) {
    for (uint64_t i = 0; i < n; ++i) column(j)[i] = columns[i * rank + j];
    lengths[j] = sqrt(scalar_product(column(j), column(j), n));
  }
  for (uint32_t j = 0; j < rank; ++j) {
    double* const own = column(j);
    for (uint32_t turn = 0; turn < 2 * j; ++turn) {
      const double* const earlier = column(turn % j);
      const double part = scalar_product(earlier, own, n);
      for (uint64_t i = 0; i < n; ++i) own[i] -= part * earlier[i];
    }
    const double length = sqrt(scalar_product(own, own, n));
    const bool spanned = length <= lengths[j] * kZipcclSpanned;
    for (uint64_t i = 0; i < n; ++i) own[i] = spanned ? 0 : own[i] / length;
  }
  for (uint32_t j = 0; j < rank; ++j)
    for (uint64_t i = 0; i < n; ++i) columns[i * rank + j] = float(column(j)[i]);
}

}  // namespace lowrank
}  // namespace
}  // namespace zipccl
