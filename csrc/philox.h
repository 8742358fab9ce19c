// Philox-4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011) in the project's counter layout:
// sixteen counters give 64 elements, word by word.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace gradwire::GRADWIRE_ISA {

static inline void philox(const RandomKey& key, std::uint64_t group, U words[4]) {
  U c0 = lane_numbers() + all(std::uint32_t(group * kLanes)), c1 = all(key.bucket);
  U c2 = all(std::uint32_t(key.step)), c3 = all(std::uint32_t(key.step >> 32) << 8 | key.stream);
  std::uint32_t k0 = std::uint32_t(key.seed), k1 = std::uint32_t(key.seed >> 32);
  for (int round = 0; round < 10; ++round) {
    U high0, low0, high1, low1;
    multiply_wide(c0, 0xD2511F53u, high0, low0);
    multiply_wide(c2, 0xCD9E8D57u, high1, low1);
    c0 = high1 ^ c1 ^ all(k0);
    c1 = low1;
    c2 = high0 ^ c3 ^ all(k1);
    c3 = low0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  words[0] = c0, words[1] = c1, words[2] = c2, words[3] = c3;
}

class Random {
 public:
  explicit Random(const RandomKey& key) : key_(key) {}

  // Draws of elements 16 * vector to 16 * vector + 15; cheap if vectors are asked for in order.
  U bits_of(std::int64_t vector) {
    const std::int64_t group = vector >> 2;
    if (group != group_) philox(key_, std::uint64_t(group_ = group), words_);
    return words_[vector & 3];
  }
  F uniform(std::int64_t vector) { return to_float(bits_of(vector) >> 8) * all(0x1p-24f); }

 private:
  RandomKey key_;
  std::int64_t group_ = -1;
  U words_[4];
};

static void random_range(const RandomKey& key, std::int64_t* out, std::int64_t begin, std::int64_t end) {
  Random random(key);
  for (std::int64_t i = begin; i < end; i += kLanes) {  // begin is a multiple of 16
    std::uint32_t lane[kLanes];
    store(lane, random.bits_of(i / kLanes));
    const std::int64_t n = least(kLanes, end - i);
    for (std::int64_t j = 0; j < n; ++j) out[i + j] = lane[j];
  }
}

}  // namespace gradwire::GRADWIRE_ISA
