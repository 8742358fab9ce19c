// Random signs and the Hadamard transform, a block at a time in the cache.
#pragma once

#include "blocks.h"
#include "kernels.h"
#include "philox.h"
#include "simd.h"

namespace gradwire::GRADWIRE_ISA {

template <int kDistance>
static inline F butterfly(F v, U lane) {
  const U second = (lane & all(std::uint32_t(kDistance))) << (kDistance == 1   ? 31
                                                              : kDistance == 2 ? 30
                                                              : kDistance == 4 ? 29
                                                                               : 28);
  return exchange<kDistance>(v) + floats(bits(v) ^ second);  // a + b, and a - b as a + (-b)
}

static inline void hadamard(float* s, std::int64_t block, float factor) {
  const U lane = lane_numbers();
  for (std::int64_t i = 0; i < block; i += kLanes) {
    F v = load(s + i) * all(factor);
    v = butterfly<1>(v, lane);
    v = butterfly<2>(v, lane);
    v = butterfly<4>(v, lane);
    v = butterfly<8>(v, lane);
    store(s + i, v);
  }
  // Two distances a turn: the block is a power of 4.
  for (std::int64_t d = kLanes; d < block; d *= 4)
    for (std::int64_t base = 0; base < block; base += 4 * d)
      for (std::int64_t i = base; i < base + d; i += kLanes) {
        const F a = load(s + i), b = load(s + i + d), c = load(s + i + 2 * d), e = load(s + i + 3 * d);
        const F ab = a + b, a_b = a - b, ce = c + e, c_e = c - e;
        store(s + i, ab + ce);
        store(s + i + d, a_b + c_e);
        store(s + i + 2 * d, ab - ce);
        store(s + i + 3 * d, a_b - c_e);
      }
}

static void rotate_range(const RandomKey& key, const float* x, std::int64_t count, std::int64_t block, bool inverse,
                         float limit, float factor, float* out, std::int64_t begin, std::int64_t end, float* scratch) {
  Random random(key);
  const auto sign = [&](std::int64_t i) { return random.bits_of(i / kLanes) << 31; };
  for (std::int64_t b = begin; b < end; ++b) {
    const std::int64_t first = b * block;
    for (std::int64_t i = 0; i < block; i += kLanes) {
      const std::int64_t left = (inverse ? block - i : count - first - i);
      F v = left > 0 ? load_some(x + first + i, left) : all(0.0f);
      if (!inverse) v = floats(bits(larger(smaller(v, all(limit)), all(-limit))) ^ sign(first + i));
      store(scratch + i, v);
    }
    hadamard(scratch, block, factor);
    for (std::int64_t i = 0; i < block; i += kLanes) {
      const std::int64_t left = inverse ? count - first - i : block - i;
      if (left <= 0) break;
      F v = load(scratch + i);
      if (inverse) v = floats(bits(v) ^ sign(first + i));
      store_some(out + first + i, v, left);
    }
  }
}

}  // namespace gradwire::GRADWIRE_ISA
