// Packs maps of row frames, reads them back, and reads damaged and random maps, to be built with AddressSanitizer and UBSan.
// Usage: fuzz_maps SEED CASES. The exit status is 0 if all went well; the line on stdout has the maps that were taken and refused.
#include <memory>
#include <vector>

#include "cpu/interface.h"
#include "cpu/rows/row_map.h"
#include "drawn.h"

namespace {

// Reads a map in memory of exactly the bytes that a payload has, with a nested header's 32 bytes behind it. Numbers that are not
// refused are rows of the receiver, and no source is repeated.
bool taken(const std::vector<uint8_t>& bytes, uint64_t count, uint64_t repeats, uint64_t bits, uint64_t reach, std::vector<int32_t>* rows) {
  const uint64_t needed = (count + repeats * bits + 7) / 8, size = (needed + 15) / 16 * 16 + 32;
  const std::unique_ptr<uint8_t[]> map(new uint8_t[size]());
  memcpy(map.get(), bytes.data(), bytes.size() < size ? bytes.size() : size);
  const std::unique_ptr<int32_t[]> literals(new int32_t[count - repeats]), repeated(new int32_t[repeats]), sources(new int32_t[repeats]);
  const ZipcclMap one = {map.get(), count, repeats, bits, reach, literals.get(), repeated.get(), sources.get()};
  if (zipccl_unpack_repeats(&one)) return false;
  std::vector<bool> marked(reach + count);
  for (uint64_t i = 0; i < repeats; ++i) marked.at(uint64_t(repeated[i])) = true;
  for (uint64_t i = 0; i < repeats; ++i)
    if (sources[i] < 0 || sources[i] >= repeated[i] || marked.at(uint64_t(sources[i]))) fail("a source that cannot be");
  for (uint64_t i = 0; i < count - repeats; ++i)
    if (marked.at(reach + uint64_t(literals[i])) || (i && literals[i] <= literals[i - 1])) fail("a literal that is repeated, or not in order");
  rows->assign(sources.get(), sources.get() + repeats);
  return true;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) return fprintf(stderr, "usage: fuzz_maps SEED CASES\n"), 2;
  state = strtoull(argv[1], nullptr, 10);
  uint64_t took = 0, refused = 0;
  for (uint64_t cases = strtoull(argv[2], nullptr, 10); cases; --cases) {
    // Rows of a segment: some repeat earlier ones. The frame has the last `count`.
    const uint64_t all = 1 + below(300), first = below(4) ? below(all) : 0, count = all - first, share = below(9), width = 1 + below(20);
    std::vector<int32_t> sources(all), wanted;
    for (uint64_t i = 0; i < all; ++i) {
      const uint64_t other = below(i + 1);
      sources[i] = below(8) < share ? sources[other] : int32_t(i);
      if (i >= first && sources[i] != int32_t(i)) wanted.push_back(sources[i]);
    }
    const std::unique_ptr<uint8_t[]> words(new uint8_t[2 * width * all]);
    for (uint64_t i = 0; i < 2 * width * all; ++i) words[i] = uint8_t(below(3) / 2);
    std::vector<int32_t> literals(count);
    std::vector<uint8_t> map(below(8) ? 2048 : below(100), 0xA5);
    const std::unique_ptr<uint8_t[]> exact(new uint8_t[map.size()]);
    zipccl::Repeats rows = {words.get(), width, 2, first, count, sources.data(), literals.data(), exact.get(), map.size(), 0, 0, 0};
    zipccl::pack_repeats(&rows);
    const uint64_t bytes = (count + rows.repeats * rows.bits + 7) / 8;
    if (rows.repeats != wanted.size() || rows.plain > rows.repeats || rows.bits > 9) fail("other numbers than the rows have");
    if (!rows.repeats || (bytes + 15) / 16 * 16 + 16 > map.size()) continue;
    map.assign(exact.get(), exact.get() + (bytes + 15) / 16 * 16);
    std::vector<int32_t> found;
    if (!taken(map, count, rows.repeats, rows.bits, first, &found) || found != wanted) fail("not the map that was packed");
    for (int i = 0; i < 8; ++i) {
      std::vector<uint8_t> damaged = map;
      for (uint64_t n = 1 + below(3); n; --n) damaged[below(damaged.size())] ^= uint8_t(1u << below(8));
      if (below(4) == 0)
        for (uint8_t& byte : damaged) byte = uint8_t(below(256));
      const uint64_t repeats = below(3) ? rows.repeats : below(count + 1), bits = below(3) ? rows.bits : below(33);
      ++(taken(damaged, count, repeats, bits, below(2) ? first : below(3), &found) ? took : refused);
    }
  }
  printf("taken %llu refused %llu\n", (unsigned long long)took, (unsigned long long)refused);
}
