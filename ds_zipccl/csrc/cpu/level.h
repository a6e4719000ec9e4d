// The functions of a CPU level: the codec of a chunk for each type. cpu/scalar.cpp, cpu/avx2.cpp, cpu/avx512.cpp and
// cpu/neon.cpp define one each, cpu/dispatch.cpp chooses.
#pragma once
#include "common/scaling.cuh"

// Places of types and codes in the tables below; cpu/chunks.h knows the dtypes of FORMAT.md table 1.1. Bytes are the words of all other
// dtypes in delta payloads, and have no exponent codec.
enum ZipcclType { ZIPCCL_BF16, ZIPCCL_FP16, ZIPCCL_FP32, ZIPCCL_BYTES, ZIPCCL_E4M3, ZIPCCL_E5M2, ZIPCCL_TYPES };
enum ZipcclCode { ZIPCCL_CASCADE, ZIPCCL_WIDE, ZIPCCL_CODES };

// A piece of an encoded chunk: `bytes` bytes, then zeros up to `padded`, a multiple of 16.
struct ZipcclPart {
  const uint8_t* from;
  uint32_t bytes, padded;
};
constexpr uint32_t kZipcclParts = 18;  // table, up to 16 bodies, tails
constexpr uint32_t kZipcclWorkspace = 256 << 10;
constexpr uint32_t kZipcclGathered = 64 << 10;  // behind a workspace: words of a chunk that do not lie side by side

constexpr uint64_t kGroupStays = ~0ull;  // in the place of a number of groups: one stays as it is

// Low-rank payloads (FORMAT.md 2.12): columns that one step of any level reads, and the part of its length that a column must have left
// where the columns in front of it are taken out.
constexpr uint32_t kZipcclTile = 32;
constexpr double kZipcclSpanned = 1.0 / (uint64_t(1) << 30);

struct ZipcclLevel {
  // `blocks` are the words of each block. Returns the chunk's bytes, which `parts` names; they stay valid as long as words and workspace
  // (kZipcclWorkspace bytes, aligned to 64). `soon` is their later place, `next` the words that are probably encoded next, a half of a
  // block each; both serve to prefetch memory.
  using Encode = uint32_t(const uint8_t* const* blocks, uint32_t numel, uint32_t block, void* workspace, ZipcclPart* parts,
                          const uint8_t* soon, const uint8_t* const* next);
  // Decodes each block to its place in `blocks`. `stream`: a bit for each block whose words need not stay in the cache.
  using Decode = int32_t(const uint8_t* chunk, uint64_t bytes, uint32_t numel, uint32_t block, uint32_t stream, uint8_t* const* blocks);
  using Add = int32_t(const uint8_t* chunk, uint64_t bytes, uint32_t numel, uint32_t block, uint8_t* sum);
  using AddWords = void(const uint8_t* words, uint64_t numel, uint8_t* sums);

  // The chunk's bytes as in Encode; with kListBit (common/change_list.cuh) where it is a LIST.
  using DeltaEncode = uint32_t(const uint8_t* words, const uint8_t* base, uint32_t numel, uint32_t block, void* workspace,
                               ZipcclPart* parts);
  // `words` may be `base`, or are apart from it.
  using DeltaDecode = int32_t(const uint8_t* chunk, uint64_t bytes, bool list, const uint8_t* base, uint32_t numel, uint32_t block,
                              uint8_t* words);
  using HashBlocks = void(const uint64_t (*keys)[128], const uint8_t* data, uint64_t first, uint64_t blocks, uint64_t* sums);  // cpu/hash.h
  // cpu/rows/rows.h; factors are the bits of floats.
  using RowFactor = uint32_t(const uint8_t* source, const uint8_t* row, uint64_t width);
  using PredictRow = void(const uint8_t* source, uint64_t width, uint32_t factor, uint8_t* out);

  using AddSquaredError = void(const uint8_t* words, const uint8_t* values, uint64_t numel, double* sums);  // cpu/lossy/squared_error.h

  // cpu/lossy/rounded.h: as Encode, of words rounded to `mantissa` bits.
  using EncodeRounded = uint32_t(const uint8_t* const* blocks, uint32_t numel, uint32_t block, uint32_t mantissa, void* workspace,
                                 ZipcclPart* parts, const uint8_t* soon, const uint8_t* const* next);
  using RoundWords = void(const uint8_t* words, uint64_t numel, uint32_t mantissa, uint8_t* out);
  // cpu/lossy/scaled.h: groups in a row. The number of groups with codes, or kGroupStays; a FrameErrorCode.
  using EncodeScaled = uint64_t(const uint8_t* words, uint64_t numel, const ZipcclScaling& scaling, uint8_t* scales, uint8_t* codes);
  using DecodeScaled = int32_t(const uint8_t* scales, const uint8_t* codes, uint64_t numel, const ZipcclScaling& scaling, uint8_t* words);
  using ProjectScaled = void(const uint8_t* words, uint64_t numel, const ZipcclScaling& scaling, uint8_t* out);
  // cpu/lossy/lowrank.h
  using Multiply = void(const float* p, const float* columns, uint64_t stride, uint32_t rank, uint64_t rows, uint64_t n, uint8_t* out,
                        uint64_t row_bytes);
  using Orthonormalize = void(float* columns, uint64_t n, uint32_t rank, double* room);

  const char* name;
  Encode* encode[ZIPCCL_TYPES][ZIPCCL_CODES];
  Decode* decode[ZIPCCL_TYPES];
  Add* add[ZIPCCL_FP32 + 1][2];  // to sums of the type itself, to floats
  AddWords* add_words[ZIPCCL_FP32 + 1][2];
  DeltaEncode* delta_encode[ZIPCCL_BYTES + 1];
  DeltaDecode* delta_decode[ZIPCCL_BYTES + 1];
  HashBlocks* hash;
  RowFactor* row_factor[ZIPCCL_FP32 + 1];
  PredictRow* predict_row[ZIPCCL_FP32 + 1];
  RoundWords* round_words[ZIPCCL_FP32 + 1];
  EncodeRounded* encode_rounded[ZIPCCL_FP32 + 1];
  Decode* decode_rounded[ZIPCCL_FP16 + 1];
  Add* add_rounded[ZIPCCL_FP16 + 1][2];
  EncodeScaled* encode_scaled[ZIPCCL_FP32 + 1];
  DecodeScaled* decode_scaled[ZIPCCL_FP32 + 1];
  ProjectScaled* project_scaled[ZIPCCL_FP32 + 1];
  AddSquaredError* add_squared_error[ZIPCCL_FP32 + 1];
  Multiply* multiply[ZIPCCL_FP32 + 1];
  Orthonormalize* orthonormalize;
};

extern const ZipcclLevel zipccl_scalar;
#if defined(__x86_64__)
extern const ZipcclLevel zipccl_avx2, zipccl_avx512;
#elif defined(__aarch64__)
extern const ZipcclLevel zipccl_neon;
#endif

// The level in use.
const ZipcclLevel& zipccl_chosen();

#define ZIPCCL_ENCODE(F, LANES) \
  { zipccl::encode_chunk<zipccl::F, zipccl::Cascade, zipccl::LANES>, zipccl::encode_chunk<zipccl::F, zipccl::Wide, zipccl::LANES> }
#define ZIPCCL_DECODE(F, LANES) zipccl::decode_chunk<zipccl::F, zipccl::LANES>
#define ZIPCCL_ADD(F, LANES) \
  { zipccl::add_chunk<zipccl::F, zipccl::LANES, zipccl::F::Word>, zipccl::add_chunk<zipccl::F, zipccl::LANES, uint32_t> }
#define ZIPCCL_ADD_WORDS(F) \
  { zipccl::add_words<zipccl::F, zipccl::F::Word>, zipccl::add_words<zipccl::F, uint32_t> }
#define ZIPCCL_ROWS(FUNCTION) \
  { zipccl::FUNCTION<zipccl::Bf16>, zipccl::FUNCTION<zipccl::Fp16>, zipccl::FUNCTION<zipccl::Fp32> }
#define ZIPCCL_ROUNDED(LANES)                                                                                             \
  ZIPCCL_ROWS(round_words),                                                                                               \
      {zipccl::encode_rounded_chunk<zipccl::Trimmed<zipccl::Bf16>, zipccl::LANES>,                                        \
       zipccl::encode_rounded_chunk<zipccl::Trimmed<zipccl::Fp16>, zipccl::LANES>,                                        \
       zipccl::encode_rounded_chunk<zipccl::Fp32, zipccl::LANES>},                                                        \
      {ZIPCCL_DECODE(Trimmed<zipccl::Bf16>, LANES), ZIPCCL_DECODE(Trimmed<zipccl::Fp16>, LANES)},                         \
      {ZIPCCL_ADD(Trimmed<zipccl::Bf16>, LANES), ZIPCCL_ADD(Trimmed<zipccl::Fp16>, LANES)}
#define ZIPCCL_SCALED(FUNCTION, LANES) \
  { zipccl::FUNCTION<zipccl::Bf16, zipccl::LANES>, zipccl::FUNCTION<zipccl::Fp16, zipccl::LANES>, zipccl::FUNCTION<zipccl::Fp32, zipccl::LANES> }
#define ZIPCCL_BASED(FUNCTION, LANES) \
  { zipccl::FUNCTION<zipccl::Bf16, zipccl::LANES>, zipccl::FUNCTION<zipccl::Fp16, zipccl::LANES>,                    \
    zipccl::FUNCTION<zipccl::Fp32, zipccl::LANES>, zipccl::FUNCTION<zipccl::Byte, zipccl::LANES> }
#define ZIPCCL_LEVEL(NAME, LANES)                                                                                         \
  const ZipcclLevel zipccl_##NAME = {                                                                                     \
      #NAME,                                                                                                              \
      {ZIPCCL_ENCODE(Bf16, LANES), ZIPCCL_ENCODE(Fp16, LANES), ZIPCCL_ENCODE(Fp32, LANES), {}, ZIPCCL_ENCODE(E4m3, LANES), \
       ZIPCCL_ENCODE(E5m2, LANES)},                                                                                       \
      {ZIPCCL_DECODE(Bf16, LANES), ZIPCCL_DECODE(Fp16, LANES), ZIPCCL_DECODE(Fp32, LANES), nullptr,                       \
       ZIPCCL_DECODE(E4m3, LANES), ZIPCCL_DECODE(E5m2, LANES)},                                                           \
      {ZIPCCL_ADD(Bf16, LANES), ZIPCCL_ADD(Fp16, LANES), ZIPCCL_ADD(Fp32, LANES)},                                               \
      {ZIPCCL_ADD_WORDS(Bf16), ZIPCCL_ADD_WORDS(Fp16), ZIPCCL_ADD_WORDS(Fp32)},                                                  \
      ZIPCCL_BASED(encode_delta_chunk, LANES),                                                                            \
      ZIPCCL_BASED(decode_delta_chunk, LANES),                                                                            \
      zipccl::hash_blocks<zipccl::LANES>,                                                                                 \
      ZIPCCL_ROWS(row_factor),                                                                                            \
      ZIPCCL_ROWS(predict_row),                                                                                           \
      ZIPCCL_ROUNDED(LANES),                                                                                              \
      ZIPCCL_SCALED(encode_scaled, LANES),                                                                                \
      ZIPCCL_SCALED(decode_scaled, LANES),                                                                                \
      ZIPCCL_SCALED(project_scaled, LANES),                                                                               \
      ZIPCCL_ROWS(add_squared_error),                                                                                     \
      ZIPCCL_ROWS(lowrank::multiply),                                                                                     \
      zipccl::lowrank::orthonormalize}
