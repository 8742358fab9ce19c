// Finding the largest magnitudes. Magnitudes are compared as integers: their order is that of the floats.
#pragma once

#include "kernels.h"
#include "simd.h"

namespace gradwire::GRADWIRE_ISA {

static inline I order(F v) { return as_int(bits(v) & all(0x7FFFFFFFu)); }

// Up to 16 values as integers; what is missing is -1 and loses to everything.
static inline I order_some(const float* p, std::int64_t n) {
  if (n >= kLanes) return order(load(p));
  std::int32_t some[kLanes];
  for (int i = 0; i < kLanes; ++i) some[i] = -1;
  std::memcpy(some, p, std::size_t(n) * 4);
  for (std::int64_t i = 0; i < n; ++i) some[i] &= 0x7FFFFFFF;
  return load_as<I>(some);
}

// Appends the magnitudes of at least `at_least`, and where they are.
static bool find_range(const float* x, std::int64_t begin, std::int64_t end, std::uint32_t at_least, Found& found) {
  const I bound = all(std::int32_t(at_least));
  const std::int64_t count = end - begin;
  for (std::int64_t chunk = 0; chunk < count; chunk += 4096) {
    const std::int64_t stop = least(count, chunk + 4096);
    if (found.capacity < found.size + 4096 + kLanes && !grow(found, found.size + 4096 + kLanes)) return false;
    std::uint32_t* magnitudes = found.magnitudes + found.size;
    std::uint32_t* positions = found.positions + found.size;
    for (std::int64_t i = chunk; i < stop; i += kLanes) {
      const I v = order_some(x + begin + i, stop - i);
      std::uint32_t mask = mask_at_least(v, bound);
#if defined(__AVX512F__)
      const __m512i numbers = (__m512i)(lane_numbers() + all(std::uint32_t(i))).part[0];
      _mm512_storeu_si512(magnitudes, _mm512_maskz_compress_epi32(__mmask16(mask), (__m512i)v.part[0]));
      _mm512_storeu_si512(positions, _mm512_maskz_compress_epi32(__mmask16(mask), numbers));
      const int n = __builtin_popcount(mask);
      magnitudes += n, positions += n;
#else
      if (!mask) continue;
      std::uint32_t lane[kLanes];
      store(lane, v);
      for (; mask; mask &= mask - 1) {
        const int j = __builtin_ctz(mask);
        *magnitudes++ = lane[j];
        *positions++ = std::uint32_t(i + j);
      }
#endif
    }
    found.size = magnitudes - found.magnitudes;
  }
  return true;
}

// Counts by the upper 15 bits.
static void histogram_range(const float* x, std::int64_t begin, std::int64_t end, std::int64_t* counts) {
  for (std::int64_t i = begin; i < end; ++i) {
    std::uint32_t b;
    std::memcpy(&b, x + i, 4);
    ++counts[(b & 0x7FFFFFFFu) >> 16];
  }
}

static inline std::int64_t count_at_least(const float* x, std::int64_t n, std::int32_t bound) {
  const I b = all(bound);
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < n; i += kLanes) found += __builtin_popcount(mask_at_least(order_some(x + i, n - i), b));
  return found;
}

static void block_top_range(const float* x, std::int64_t count, std::int64_t each, std::int64_t block,
                            std::int64_t begin, std::int64_t end, std::int64_t* out) {
  for (std::int64_t b = begin; b < end; ++b) {
    const std::int64_t first = b * block, n = least(block, count - first), wanted = least(each, n);
    const float* row = x + first;
    std::int64_t* target = out + b * each;
    // The largest bound that `wanted` values reach, by halving.
    std::int32_t low = 0;
    std::int64_t high = std::int64_t{1} << 31;
    while (high - low > 1) {
      const std::int32_t middle = std::int32_t((low + high) / 2);
      const std::int64_t reach = count_at_least(row, n, middle);
      if (reach >= wanted) low = middle;
      if (reach == wanted) break;
      if (reach < wanted) high = middle;
    }
    std::int64_t ties = wanted - (low == 0x7FFFFFFF ? 0 : count_at_least(row, n, low + 1));
    for (std::int64_t i = 0; i < n; i += kLanes) {
      std::int32_t lane[kLanes];
      const I v = order_some(row + i, n - i);
      std::uint32_t mask = mask_at_least(v, all(low));
      if (!mask) continue;
      store(lane, v);
      for (; mask; mask &= mask - 1) {
        const int j = __builtin_ctz(mask);
        if (lane[j] == low && ties-- <= 0) continue;
        *target++ = first + i + j;
      }
    }
  }
}

}  // namespace gradwire::GRADWIRE_ISA
