// Bit streams: code i has bits i * width and up, lowest bit first.
#pragma once

#include "simd.h"

namespace gradwire::GRADWIRE_ISA {

// Eight codes of at most 8 bits, one a byte <-> one word of 8 * width bits, by folding pairs, fours, eights.
class Folder {
 public:
  explicit constexpr Folder(int width)
      : width_(width), ones_(spread(width, 16)), pairs_(spread(2 * width, 32)), fours_(spread(4 * width, 64)) {}

  std::uint64_t fold(std::uint64_t x) const {
    x = (x & ones_) | (x >> (8 - width_) & ones_ << width_);
    x = (x & pairs_) | (x >> (16 - 2 * width_) & pairs_ << 2 * width_);
    return (x & fours_) | (x >> (32 - 4 * width_) & fours_ << 4 * width_);
  }
  std::uint64_t unfold(std::uint64_t x) const {
    x = (x & fours_) | (x & fours_ << 4 * width_) << (32 - 4 * width_);
    x = (x & pairs_) | (x & pairs_ << 2 * width_) << (16 - 2 * width_);
    return (x & ones_) | (x & ones_ << width_) << (8 - width_);
  }

 private:
  // The lowest `bits` of every `period` bits.
  static constexpr std::uint64_t spread(int bits, int period) {
    std::uint64_t mask = 0;
    for (int at = 0; at < 64; at += period) mask |= ((std::uint64_t{1} << bits) - 1) << at;
    return mask;
  }
  int width_;
  std::uint64_t ones_, pairs_, fours_;
};

template <int kWidthOfCode>
static inline void pack_whole(const std::uint8_t* codes, std::int64_t groups, std::uint8_t* out) {
  const Folder folder(kWidthOfCode);
  for (std::int64_t g = 0; g < groups; ++g) {
    std::uint64_t x;
    std::memcpy(&x, codes + 8 * g, 8);
    x = folder.fold(x);
    std::memcpy(out + kWidthOfCode * g, &x, kWidthOfCode);
  }
}

template <int kWidthOfCode>
static inline void unpack_whole(const std::uint8_t* data, std::int64_t groups, std::uint8_t* codes) {
  const Folder folder(kWidthOfCode);
  std::int64_t g = 0;
  for (; kWidthOfCode * g + 8 <= kWidthOfCode * groups; ++g) {  // whole words, of which the lower part counts
    std::uint64_t x;
    std::memcpy(&x, data + kWidthOfCode * g, 8);
    x = folder.unfold(x);
    std::memcpy(codes + 8 * g, &x, 8);
  }
  for (; g < groups; ++g) {
    std::uint64_t x = 0;
    std::memcpy(&x, data + kWidthOfCode * g, kWidthOfCode);
    x = folder.unfold(x);
    std::memcpy(codes + 8 * g, &x, 8);
  }
}

#define GRADWIRE_BY_WIDTH(function, width, ...) \
  switch (width) {                              \
    case 1: function<1>(__VA_ARGS__); break;    \
    case 2: function<2>(__VA_ARGS__); break;    \
    case 3: function<3>(__VA_ARGS__); break;    \
    case 4: function<4>(__VA_ARGS__); break;    \
    case 5: function<5>(__VA_ARGS__); break;    \
    case 6: function<6>(__VA_ARGS__); break;    \
    case 7: function<7>(__VA_ARGS__); break;    \
    default: function<8>(__VA_ARGS__); break;   \
  }

// Codes of 1 to 8 bits, one a byte; exactly the bytes of the stream are touched.
static inline void pack_bytes(const std::uint8_t* codes, std::int64_t count, int width, std::uint8_t* out) {
  const std::int64_t groups = count / 8;
  GRADWIRE_BY_WIDTH(pack_whole, width, codes, groups, out)
  if (const std::int64_t left = count - 8 * groups) {
    std::uint64_t x = 0;
    std::memcpy(&x, codes + 8 * groups, std::size_t(left));
    x = Folder(width).fold(x);
    std::memcpy(out + width * groups, &x, std::size_t((left * width + 7) / 8));
  }
}

static inline void unpack_bytes(const std::uint8_t* data, std::int64_t count, int width, std::uint8_t* codes) {
  const std::int64_t groups = count / 8;
  GRADWIRE_BY_WIDTH(unpack_whole, width, data, groups, codes)
  if (const std::int64_t left = count - 8 * groups) {
    std::uint64_t x = 0;
    std::memcpy(&x, data + width * groups, std::size_t((left * width + 7) / 8));
    x = Folder(width).unfold(x);
    std::memcpy(codes + 8 * groups, &x, std::size_t(left));
  }
}

// Codes of any width up to 32 bits, any integer type.
template <class T>
static inline void pack_any(const T* codes, int width, std::int64_t count, std::uint8_t* out) {
  std::uint64_t held = 0;
  int filled = 0;
  const std::uint64_t mask = (std::uint64_t{1} << width) - 1;
  for (std::int64_t i = 0; i < count; ++i) {
    held |= (std::uint64_t(codes[i]) & mask) << filled;
    filled += width;
    if (filled >= 32) {
      std::memcpy(out, &held, 4);
      out += 4, held >>= 32, filled -= 32;
    }
  }
  if (filled > 0) std::memcpy(out, &held, std::size_t((filled + 7) / 8));
}

template <class T>
static inline void unpack_any(const std::uint8_t* data, std::int64_t bytes, int width, std::int64_t count, T* out) {
  const std::uint64_t mask = (std::uint64_t{1} << width) - 1;
  std::int64_t i = 0;
  for (; i < count; ++i) {  // a code of 32 bits and the 7 before it lie in 8 bytes
    const std::int64_t bit = i * width, at = bit >> 3;
    if (at + 8 > bytes) break;
    std::uint64_t x;
    std::memcpy(&x, data + at, 8);
    out[i] = T(x >> (bit & 7) & mask);
  }
  for (; i < count; ++i) {
    const std::int64_t bit = i * width, at = bit >> 3;
    std::uint64_t x = 0;
    if (at < bytes) std::memcpy(&x, data + at, std::size_t(least(8, bytes - at)));
    out[i] = T(x >> (bit & 7) & mask);
  }
}

static void pack_range(const std::int64_t* codes, int width, std::int64_t count, std::uint8_t* out) {
  if (width) pack_any(codes, width, count, out);
}
static void unpack_range(const std::uint8_t* data, std::int64_t bytes, int width, std::int64_t count,
                         std::int64_t* out) {
  unpack_any(data, bytes, width, count, out);
}

}  // namespace gradwire::GRADWIRE_ISA
