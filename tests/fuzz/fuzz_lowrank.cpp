// Multiplies factors of any content and makes columns orthonormal, to be built with AddressSanitizer and UBSan. All buffers are exactly as
// large as their contents, so that a byte read or written outside is seen.
// Usage: fuzz_lowrank SEED CASES. The exit status is 0 if all went well.
#include <math.h>

#include <vector>

#include "cpu/interface.h"
#include "drawn.h"

namespace {

// A finite number: of any scale, or like those of a factor.
float number(bool any) {
  const uint32_t exponent = any ? uint32_t(below(200)) : 120 + uint32_t(below(10)), bits = uint32_t(draw() & 0x807fffff) | exponent << 23;
  float value;
  memcpy(&value, &bits, 4);
  return below(8) ? value : 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return fprintf(stderr, "usage: fuzz_lowrank SEED CASES\n"), 2;
  state = strtoull(argv[1], nullptr, 10);
  const uint64_t all = strtoull(argv[2], nullptr, 10);
  for (uint64_t turn = 0; turn < all; ++turn) {
    const uint64_t n = 1 + below(below(2) ? 9 : 90), m = 1 + below(below(3) ? 70 : 1200), rank = 1 + below(9), stride = (m + 31) / 32 * 32;
    const int32_t dtype = int32_t(1 + below(3)), fp32_sums = int32_t(below(2));
    const uint64_t item = dtype == 3 ? 4 : 2;
    const bool any = below(4) == 0;
    std::vector<float> p(n * rank), columns(stride * rank, 0.0f);
    for (float& value : p) value = number(any);
    for (uint64_t k = 0; k < rank; ++k)
      for (uint64_t j = 0; j < m; ++j) columns[k * stride + j] = number(false);
    std::vector<uint8_t> words(n * m * item), sums(n * m * (fp32_sums ? 4 : item), 0);
    zipccl_multiply(p.data(), columns.data(), stride, uint32_t(rank), n, m, dtype, words.data(), ZIPCCL_WORDS, 1);
    zipccl_multiply(p.data(), columns.data(), stride, uint32_t(rank), n, m, dtype, sums.data(), ZIPCCL_SUMS + fp32_sums, 1);
    for (uint64_t place = 0; place < n * m && dtype == 3; ++place) {
      float found, wanted = p[place / m * rank] * columns[place % m], sum;
      for (uint64_t k = 1; k < rank; ++k) wanted += p[place / m * rank + k] * columns[k * stride + place % m];
      memcpy(&found, words.data() + 4 * place, 4);
      memcpy(&sum, sums.data() + 4 * place, 4);
      if (memcmp(&found, &wanted, 4) || sum != wanted) fail("another product");
    }
    std::vector<double> room((n + 1) * rank);
    zipccl_orthonormalize(p.data(), n, uint32_t(rank), room.data());
    for (uint64_t a = 0; a < rank; ++a)
      for (uint64_t b = 0; b <= a; ++b) {
        double product = 0;
        for (uint64_t i = 0; i < n; ++i) product += double(p[i * rank + a]) * p[i * rank + b];
        if (fabs(product - (a == b)) > 1e-5 && !(a == b && product == 0)) fail("columns that are not orthonormal");
      }
  }
  printf("cases %llu\n", (unsigned long long)all);
}
