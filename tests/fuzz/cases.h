// Cases from a file for fuzz.cpp, which includes this file behind its own functions. A case is seven numbers of eight bytes: dtype, block,
// elements, code, kept bits, 1 where there is a base, bytes of the payload; then the words, the base, the payload, and the words that
// decoders give.
#pragma once
#include <fstream>

const uint64_t no_key[2] = {0, 0};

namespace {

struct FromFile {
  Case c;
  Exact words, base, payload, wanted;
  FromFile(std::ifstream& file, const uint64_t* head)
      : c{int32_t(head[0]), uint32_t(head[1]), head[2], int32_t(head[3]), uint32_t(head[4])},
        words(c.numel * c.item()),
        base(head[5] ? words.size() : 0),
        payload(head[6]),
        wanted(words.size()) {
    for (const Exact* each : {&words, &base, &payload, &wanted})
      file.read(reinterpret_cast<char*>(each->data), std::streamsize(each->size()));
    if (!file) fail("the file is cut short", c, "any");
  }
};

template <typename Each>
uint64_t each_case(const char* path, Each each) {
  std::ifstream file(path, std::ios::binary);
  uint64_t cases = 0, head[7];
  for (; file.read(reinterpret_cast<char*>(head), sizeof head); ++cases) each(FromFile(file, head));
  return cases;
}

// Encodes the words of every case at every level to the payload of the file, and decodes this to the words of the file.
int check(const char* path, const std::vector<const char*>& levels) {
  const uint64_t cases = each_case(path, [&](const FromFile& in) {
    const std::string golden(reinterpret_cast<char*>(in.payload.data), in.payload.size());
    std::string decoded;
    if (encode_everywhere(in.c, levels, in.words, in.base) != golden) fail("another payload than the file's", in.c, levels[0]);
    if (decode_everywhere(in.c, levels, golden, in.base, decoded)) fail("refused the payload of the file", in.c, levels[0]);
    if (decoded.compare(0, decoded.npos, reinterpret_cast<char*>(in.wanted.data), in.wanted.size()))
      fail("other words than the file's", in.c, levels[0]);
  });
  return printf("cases %llu\n", (unsigned long long)cases), cases == 0;
}

// Runs a kernel some times over every case, so that its instructions can be counted. Results are those of check().
int repeat(const std::string& kernel, uint64_t times, const char* path, const char* level) {
  if (zipccl_force_level(level)) return fprintf(stderr, "no level %s\n", level), 2;
  return each_case(path, [&](const FromFile& in) {
    const Case& c = in.c;
    Exact out(bound(c)), words(4 * c.numel);
    ZipcclSegment segment = {in.words.data, c.numel, out.data, 0};
    uint64_t sums[2];
    for (uint64_t i = 0; i < times; ++i) {
      if (kernel == "hash") zipccl_hash(in.words.data, in.words.size(), no_key, sums, 1);
      if (kernel == "encode" && c.code < 2) zipccl_encode(&segment, 1, c.dtype, c.code, c.block, 1);
      if (kernel == "encode" && c.code == 2) zipccl_delta_encode(in.words.data, in.base.data, c.numel, out.data, c.dtype, c.block, 1);
      if (kernel == "decode" && c.code < 2) zipccl_decode(in.payload.data, in.payload.size(), words.data, c.numel, c.dtype, 0, c.block, ZIPCCL_WORDS, 1);
      if (kernel == "decode" && c.code == 2)
        zipccl_delta_decode(in.payload.data, in.payload.size(), in.base.data, words.data, c.numel, c.dtype, c.block, 1);
      if (kernel == "add") zipccl_decode(in.payload.data, in.payload.size(), words.data, c.numel, c.dtype, 0, c.block, ZIPCCL_FP32_SUMS, 1);
    }
  }) == 0;
}

}  // namespace
