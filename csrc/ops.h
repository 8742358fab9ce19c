// The ops of gradwire/kernels/ops.py on whole tensors: work divided over threads, on the instruction set in use.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "kernels.h"

namespace gradwire {

std::vector<std::string> instruction_sets();  // those this machine runs, best last
std::string instruction_set();                // the one in use
void use_instruction_set(const std::string& name);

std::int64_t encode_blocks(Encode& a, int threads);
void decode_blocks(Decode& a, int threads);
std::int64_t accumulate(const float* x, const float* residual, float decay, float* e, std::int64_t count, int threads);
std::int64_t divide(float* x, float by, std::int64_t count, int threads);
void clean(const float* x, float* e, std::int64_t count);
void random_bits(const RandomKey& key, std::int64_t* out, std::int64_t count, int threads);
void pack_bits(const std::int64_t* codes, int bits, std::int64_t count, std::uint8_t* out);
void unpack_bits(const std::uint8_t* data, std::int64_t bytes, int bits, std::int64_t count, std::int64_t* out);

void select_top(const float* x, std::int64_t count, std::int64_t wanted, std::int64_t* out, int threads);
std::vector<std::int64_t> select_at_least(const float* x, std::int64_t count, float tau, int threads);
void select_block_top(const float* x, std::int64_t count, std::int64_t each, std::int64_t block, std::int64_t* out,
                      int threads);
// One index of each of `count` stretches of [0, total), which has fewer than 2**31 elements a stretch.
void select_random(const RandomKey& key, std::int64_t total, std::int64_t count, std::int64_t* out, int threads);
void scatter(float* out, std::int64_t count, const std::int64_t* indices, const float* values, std::int64_t n, bool add);
void gather(const float* x, std::int64_t count, const std::int64_t* indices, float* values, std::int64_t n);
void pack_indices(const std::int64_t* indices, std::int64_t n, std::int64_t total, int width, std::uint8_t* out);
// The number of bits set where n were declared, or -1 if they are not sorted, distinct and below total; n if all is well.
std::int64_t unpack_indices(const std::uint8_t* data, std::int64_t total, std::int64_t n, int width, std::int64_t* out);

void rotate(const RandomKey& key, const float* x, std::int64_t count, std::int64_t block, bool inverse, float limit,
            float factor, float* out, int threads);

enum class Product { thin, thin_transposed, outer, mean };
void products(Product what, const std::vector<Matrix>& matrices, int threads);

struct Factor {  // rows x rank
  const float* in;
  float* out;
  std::int64_t rows;
  int rank;
};
// Columns that span the same and are orthonormal: the same bytes on every machine.
void orthogonalize(const Factor& factor, double shift, double least);

}  // namespace gradwire
