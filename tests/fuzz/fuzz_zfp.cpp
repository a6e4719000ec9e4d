// Encodes words with ZFP and decodes codes of any content, to be built with AddressSanitizer and UBSan. All buffers are exactly as large as
// their contents and often unaligned, so that a byte read or written outside is seen.
// Usage: fuzz_zfp SEED CASES. The exit status is 0 if all went well; the line on stdout has the tensors that were coded and refused.
#include "cpu/interface.h"
#include "drawn.h"

namespace {

bool same(const Exact& a, const Exact& b) { return a.size() == b.size() && (!a.size() || !memcmp(a.data, b.data, a.size())); }

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return fprintf(stderr, "usage: fuzz_zfp SEED CASES\n"), 2;
  state = strtoull(argv[1], nullptr, 10);
  uint64_t coded = 0, refused = 0;
  for (uint64_t cases = strtoull(argv[2], nullptr, 10); cases; --cases) {
    const int32_t dtype = int32_t(1 + below(3));
    const uint64_t item = dtype == 3 ? 4 : 2, numel = below(below(2) ? 12 : 700);
    const uint32_t rate = uint32_t(3 + below(30)), exponents = dtype == 2 ? 31 : 255, mantissa = dtype == 1 ? 7 : dtype == 2 ? 10 : 23;
    Exact words(numel * item), codes((4 * rate * ((numel + 3) / 4) + 63) / 64 * 8), found(numel * item), projected(numel * item);
    const uint64_t texture = below(4), middle = below(exponents);
    bool finite = true;
    for (uint64_t i = 0; i < numel; ++i) {
      uint32_t word = uint32_t(draw());
      const uint64_t exponent = texture == 0 ? draw() % (exponents + 1) : texture == 1 ? 0 : (middle + below(5)) % exponents;
      word = (word & ~(exponents << mantissa)) | uint32_t(exponent) << mantissa;
      if (texture == 3 && below(3) == 0) word = 0;
      finite &= (word >> mantissa & exponents) != exponents;
      memcpy(words.data + i * item, &word, item);
    }
    const bool good = zipccl_zfp_encode(words.data, numel, dtype, rate, codes.data, 1);
    if (good != finite) fail("what is finite");
    ++(good ? coded : refused);
    zipccl_zfp_project(words.data, numel, dtype, rate, projected.data, 1);
    if (good) {
      zipccl_zfp_decode(codes.data, numel, dtype, rate, found.data, ZIPCCL_WORDS, 1);
      if (!same(found, projected)) fail("a decoder's words are not the projected ones");
      zipccl_zfp_project(words.data, numel, dtype, rate, words.data, 1);
      if (!same(words, projected)) fail("a projection in place");
    }
    for (uint64_t i = 0; i < codes.size(); ++i) codes.data[i] = uint8_t(below(3) ? draw() : 0);
    zipccl_zfp_decode(codes.data, numel, dtype, rate, found.data, ZIPCCL_WORDS, 1);
    for (uint64_t i = 0; i < numel; ++i) {
      uint32_t word = 0;
      memcpy(&word, found.data + i * item, item);
      if ((word >> mantissa & exponents) == exponents) fail("a decoded word that is not finite");
    }
    const int32_t fp32_sums = int32_t(below(2));
    Exact sums(numel * (fp32_sums ? 4 : item));
    if (sums.size()) memset(sums.data, 0, sums.size());
    zipccl_zfp_decode(codes.data, numel, dtype, rate, sums.data, ZIPCCL_SUMS + fp32_sums, 1);
  }
  printf("coded %llu refused %llu\n", (unsigned long long)coded, (unsigned long long)refused);
}
