// What the instruction sets implement: work on a range of a tensor, one thread's share. ops.cpp divides the work.
// gradwire/kernels/ops.py says what each must compute.
#pragma once

#include <cstdint>

namespace gradwire {

enum class Kind : int { integer, float8, sign, levels, ternary, natural, half };
enum class Scaling : int { absmax, mse, stochastic };
enum class ScaleType : int { none, float32, bfloat16, uint8 };

struct RandomKey {
  std::uint64_t seed;
  std::uint64_t step;
  std::uint32_t bucket;
  std::uint32_t stream;
};

// A format, with the constants of the numeric law that Python works out.
struct Format {
  Kind kind;
  ScaleType scale_type;
  Scaling scaling;
  int bits;             // of a code
  int mantissa;         // of a small float; 16-bit truncation has -1
  std::int64_t block;
  float limit;          // the largest code, or the number of levels
  float reciprocal;     // 1 / limit
  float largest_scale;  // such that scale * limit is finite
  float start;          // of the least-squares rounds, over the mean
  int rounds;
  float shrink;
  float floor;          // a block with a smaller maximum is zero
};

struct Encode {
  Format format;
  RandomKey key;
  const float* x;
  const float* residual;  // may be null
  float decay;
  std::int64_t count;
  std::uint8_t* codes;
  void* scales;
  float* rest;    // null if there is no residual
  bool streamed;  // rest is aligned and too large for the caches
};

constexpr int kMostPayloads = 64;

struct Decode {
  Format format;
  std::int64_t count;
  int payloads;
  const std::uint8_t* codes[kMostPayloads];
  const void* scales[kMostPayloads];
  std::int64_t code_bytes;
  float* out;
  bool add;
  bool streamed;
};

// Growing arrays of (magnitude, position) that a scan found; memory of the caller, grown by `grow` only.
struct Found {
  std::uint32_t* magnitudes = nullptr;
  std::uint32_t* positions = nullptr;  // from the start of the range
  std::int64_t size = 0;
  std::int64_t capacity = 0;
};
bool grow(Found& found, std::int64_t at_least);  // false: no memory

struct Matrix {  // a rows x columns, thin factors with `rank` columns stored transposed: rank x length
  const float* m;
  const float* left;
  const float* right;
  float* out;
  std::int64_t rows, columns;
  int rank;
  // If there are any, M Q is that of their sum, and the sum is written to m.
  const float* x = nullptr;
  const float* residual = nullptr;
};

struct Kernels {
  const char* name;
  // Blocks (ternary: groups of five) begin to end; returns how many elements were not finite.
  std::int64_t (*encode)(const Encode&, std::int64_t begin, std::int64_t end, float* scratch);
  void (*decode)(const Decode&, std::int64_t begin, std::int64_t end, float* scratch);
  // e = x + decay * residual (may be null), elements begin to end; e may be null: only count.
  std::int64_t (*accumulate)(const float* x, const float* residual, float decay, float* e, bool streamed,
                             std::int64_t begin, std::int64_t end);
  // x / by where it lies; by at least 1, so that what is not finite was not before.
  std::int64_t (*divide)(float* x, float by, std::int64_t begin, std::int64_t end);
  void (*clean)(const float* x, float* e, std::int64_t count);
  void (*random)(const RandomKey&, std::int64_t* out, std::int64_t begin, std::int64_t end);
  void (*pack)(const std::int64_t* codes, int bits, std::int64_t count, std::uint8_t* out);
  void (*unpack)(const std::uint8_t* data, std::int64_t bytes, int bits, std::int64_t count, std::int64_t* out);
  bool (*find)(const float* x, std::int64_t begin, std::int64_t end, std::uint32_t at_least, Found&);
  void (*histogram)(const float* x, std::int64_t begin, std::int64_t end, std::int64_t* counts);
  // The `each` largest of blocks begin to end; `out` is that of block 0.
  void (*block_top)(const float* x, std::int64_t count, std::int64_t each, std::int64_t block, std::int64_t begin,
                    std::int64_t end, std::int64_t* out);
  void (*rotate)(const RandomKey&, const float* x, std::int64_t count, std::int64_t block, bool inverse, float limit,
                 float factor, float* out, std::int64_t begin, std::int64_t end, float* scratch);
  // M Q for rows begin to end, M^T P for columns begin to end, M - P Q^T for rows begin to end; and P Q^T,
  // which is taken off M.
  void (*thin)(const Matrix&, std::int64_t begin, std::int64_t end);
  void (*thin_transposed)(const Matrix&, std::int64_t begin, std::int64_t end);
  void (*outer)(const Matrix&, bool streamed, std::int64_t begin, std::int64_t end);
  void (*mean)(const Matrix&, std::int64_t begin, std::int64_t end);
};

namespace portable {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}

}  // namespace gradwire
