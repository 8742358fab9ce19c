// Dense formats, block by block: read, add the residual, find the scale, quantize, pack, write the new residual, all
// while the block is in the first-level cache.
#pragma once

#include "bits.h"
#include "kernels.h"
#include "philox.h"
#include "simd.h"

namespace gradwire::GRADWIRE_ISA {

constexpr std::int32_t kInfinity = 0x7F800000;
constexpr float kLargest = 3.40282347e38f;

static inline std::uint32_t bits_of(float x) {
  std::uint32_t b;
  std::memcpy(&b, &x, 4);
  return b;
}
static inline float float_of(std::uint32_t b) {
  float x;
  std::memcpy(&x, &b, 4);
  return x;
}
static inline float power_of_two(std::int32_t exponent) { return float_of(std::uint32_t(exponent + 127) << 23); }
static inline float inverse(float scale) { return scale > 0 ? 1.0f / scale : 0.0f; }

// Up to 16 values, and zeros behind them.
static inline F load_some(const float* p, std::int64_t n) {
  if (n >= kLanes) return load(p);
  float some[kLanes] = {};
  std::memcpy(some, p, std::size_t(n) * 4);
  return load(some);
}
static inline void store_some(float* p, F v, std::int64_t n) {
  if (n >= kLanes) return store(p, v);
  float some[kLanes];
  store(some, v);
  std::memcpy(p, some, std::size_t(n) * 4);
}

// e = x + decay * residual, padded with zeros to whole vectors; returns the largest magnitude as an integer, which is
// at least kInfinity if something is not finite.
template <bool kFeedback>
static inline std::int32_t stage(const float* x, const float* residual, float decay, std::int64_t n, float* e) {
  const F d = all(decay);
  const U mask = all(0x7FFFFFFFu);
  I top = all(std::int32_t{0});
  const auto put = [&](F v, std::int64_t i) {
    store(e + i, v);
    top = larger(top, as_int(bits(v) & mask));
  };
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) put(kFeedback ? load(x + i) + load(residual + i) * d : load(x + i), i);
  if (i < n) {
    const F v = load_some(x + i, n - i);
    put(kFeedback ? v + load_some(residual + i, n - i) * d : v, i);
  }
  return largest_lane(top);
}

// Replaces what is not finite by 0; returns how many there were.
static std::int64_t clean_values(const float* x, float* e, std::int64_t n) {
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const bool bad = (bits_of(x[i]) & 0x7FFFFFFFu) >= std::uint32_t(kInfinity);
    found += bad;
    e[i] = bad ? 0.0f : x[i];
  }
  return found;
}

// Scales as they travel; returns the float32 value of what was stored.
static inline float store_scale(const Format& f, void* scales, std::int64_t block, float scale) {
  scale = scale < f.largest_scale ? scale : f.largest_scale;
  if (f.scale_type == ScaleType::float32) {
    static_cast<float*>(scales)[block] = scale;
    return scale;
  }
  const std::uint32_t b = bits_of(scale);
  const std::uint32_t rounded = (b + (f.scaling == Scaling::stochastic ? 0xFFFFu : 0x7FFFu + (b >> 16 & 1))) >> 16;
  static_cast<std::uint16_t*>(scales)[block] = std::uint16_t(rounded);
  return float_of(rounded << 16);
}
static inline float load_scale(const Format& f, const void* scales, std::int64_t block) {
  if (f.scale_type == ScaleType::float32) return static_cast<const float*>(scales)[block];
  if (f.scale_type == ScaleType::bfloat16)
    return float_of(std::uint32_t(static_cast<const std::uint16_t*>(scales)[block]) << 16);
  return 0.0f;
}

// The mean of |x| by the law's lane tree; x is padded with zeros, n of its values count.
static inline float mean_magnitude(const float* x, std::int64_t n, std::int64_t block) {
  const F share = all(1.0f / float(block));
  F total = all(0.0f);
  for (std::int64_t i = 0; i < n; i += kLanes) total = total + magnitude(load(x + i)) * share;
  const float mean = fold(total);
  return n == block ? mean : mean * (float(block) / float(n));
}

static inline float least_squares_scale(const Format& f, const float* e, std::int64_t n, float largest, float* y) {
  if (largest == 0) return 0.0f;
  std::int32_t exponent = std::int32_t(bits_of(largest) >> 23) - 127;
  exponent = exponent < -126 ? -126 : exponent > 126 ? 126 : exponent;
  const F unit = all(power_of_two(-exponent)), limit = all(f.limit);
  for (std::int64_t i = 0; i < n; i += kLanes) store(y + i, magnitude(load(e + i)) * unit);
  float scale = mean_magnitude(y, n, f.block) * f.start;
  for (int round = 0; round < f.rounds; ++round) {
    const F inv = all(inverse(scale));
    F weight = all(0.0f), product = all(0.0f);
    for (std::int64_t i = 0; i < n; i += kLanes) {
      const F v = load(y + i), code = nearest(smaller(v * inv, limit));
      weight = weight + code * code;
      product = product + v * code;
    }
    const float w = fold(weight);
    scale = w > 0 ? fold(product) / w : 0.0f;
  }
  return scale * power_of_two(exponent);
}

static inline float l2_norm(const float* e, std::int64_t n, float largest) {
  const F inv = all(inverse(largest));
  F total = all(0.0f);
  for (std::int64_t i = 0; i < n; i += kLanes) {
    const F ratio = load(e + i) * inv;
    total = total + ratio * ratio;
  }
  const float norm = __builtin_sqrtf(fold(total)) * largest;
  return norm < kLargest ? norm : kLargest;
}

// v becomes floor(v) or the integer above it, with the probability of its fraction.
static inline F stochastic(F v, F u) {
  const F down = floor_of(v);
  return down + if_less(u, v - down, all(1.0f), all(0.0f));
}

static inline U sign_bits(F v) { return bits(v) & all(0x80000000u); }

// Small floats with `mantissa` bits of it and `bias`, to nearest; the magnitude is in range. Sign in the top bit.
struct SmallFloat {
  int mantissa, bias, width;
  bool has_infinity;

  GRADWIRE_INLINE U narrow(F v) const {
    const int shift = 23 - mantissa;
    const U m = bits(v) & all(0x7FFFFFFFu);
    const U rounded = (m + all((1u << (shift - 1)) - 1) + (m >> shift & all(1u))) >> shift;
    const U normal = rounded - all(std::uint32_t(127 - bias) << mantissa);
    const float magic = power_of_two(1 - bias - mantissa + 23);
    const U denormal = bits(floats(m) + all(magic)) - all(bits_of(magic));
    const U smallest_normal = all(std::uint32_t(128 - bias) << 23);
    return if_less(as_int(m), as_int(smallest_normal), denormal, normal) | (sign_bits(v) >> (32 - width));
  }

  GRADWIRE_INLINE F widen(U code) const {
    const int shift = 23 - mantissa;
    const std::uint32_t top = (1u << (width - 1)) - 1;
    const U m = code & all(top), sign = code << (32 - width) & all(0x80000000u);
    const U normal = (m << shift) + all(std::uint32_t(127 - bias) << 23);
    const U denormal = bits(to_float(m) * all(power_of_two(1 - bias - mantissa)));
    U value = if_less(as_int(m), as_int(all(1u << mantissa)), denormal, normal);
    const std::uint32_t special = has_infinity ? top & ~((1u << mantissa) - 1) : top;
    value = if_less(as_int(m), as_int(all(special)), value, (m << shift) | all(0x7F800000u));
    return floats(value | sign);
  }
};
static inline SmallFloat small_float(const Format& f) {
  if (f.kind == Kind::half) return {10, 15, 16, true};
  return f.mantissa == 3 ? SmallFloat{3, 7, 8, false} : SmallFloat{2, 15, 8, true};
}

// Encoding: a quantizer is made for each block and turns vectors into codes and their values.

template <Kind kKind>
struct Quantizer;

template <>
struct Quantizer<Kind::integer> {
  F scale, inv, limit;
  U offset;
  bool random;
  Quantizer(const Encode& a, std::int64_t block, const float* e, std::int64_t n, float largest, float* y) {
    const Format& f = a.format;
    const float exact = f.scaling == Scaling::mse ? least_squares_scale(f, e, n, largest, y) : largest * f.reciprocal;
    const float stored = store_scale(f, a.scales, block, exact);
    scale = all(stored), inv = all(inverse(stored)), limit = all(f.limit), offset = all(std::uint32_t(f.limit));
    random = f.scaling == Scaling::stochastic;
  }
  GRADWIRE_INLINE U code(F x, std::int64_t vector, Random& draws, F& value) const {
    // Cutting off first gives the same integers as cutting off last, and keeps `nearest` in its range.
    const F v = larger(smaller(x * inv, limit), all(0.0f) - limit);
    const F c = random ? stochastic(v, draws.uniform(vector)) : nearest(v);
    value = c * scale;
    return to_uint(c + limit);
  }
};

template <>
struct Quantizer<Kind::float8> {
  F scale, inv, limit;
  SmallFloat small;
  Quantizer(const Encode& a, std::int64_t block, const float*, std::int64_t, float largest, float*)
      : small(small_float(a.format)) {
    const float stored = store_scale(a.format, a.scales, block, largest * a.format.reciprocal);
    scale = all(stored), inv = all(inverse(stored)), limit = all(a.format.limit);
  }
  GRADWIRE_INLINE U code(F x, std::int64_t, Random&, F& value) const {
    const U c = small.narrow(larger(smaller(x * inv, limit), all(0.0f) - limit));
    value = small.widen(c) * scale;
    return c;
  }
};

template <>
struct Quantizer<Kind::levels> {
  F inv, levels, reciprocal, norm;
  Quantizer(const Encode& a, std::int64_t block, const float* e, std::int64_t n, float largest, float*) {
    const float exact = l2_norm(e, n, largest), shrunk = exact * a.format.shrink;
    const float stored = shrunk < kLargest ? shrunk : kLargest;
    static_cast<float*>(a.scales)[block] = stored;
    inv = all(inverse(exact)), levels = all(a.format.limit), reciprocal = all(a.format.reciprocal), norm = all(stored);
  }
  GRADWIRE_INLINE U code(F x, std::int64_t vector, Random& draws, F& value) const {
    const F c = stochastic(smaller(magnitude(x) * inv * levels, levels), draws.uniform(vector));
    const U shifted = to_uint(floats(bits(c) | sign_bits(x)) + levels);
    value = (to_float(shifted) - levels) * reciprocal * norm;
    return shifted;
  }
};

template <>
struct Quantizer<Kind::ternary> {
  F inv, scale;
  Quantizer(const Encode& a, std::int64_t block, const float*, std::int64_t, float largest, float*) {
    const float stored = largest * a.format.shrink;
    static_cast<float*>(a.scales)[block] = stored;
    inv = all(inverse(largest)), scale = all(stored);
  }
  GRADWIRE_INLINE U code(F x, std::int64_t vector, Random& draws, F& value) const {
    const F c = smaller(stochastic(magnitude(x) * inv, draws.uniform(vector)), all(1.0f));
    const F digit = floats(bits(c) | sign_bits(x)) + all(1.0f);
    value = (digit - all(1.0f)) * scale;
    return to_uint(digit);
  }
};

static inline F natural_value(U code, std::int32_t top) {
  const U low = code & all(127u);
  I exponent = as_int(low) + all(top - 127);
  exponent = if_less(exponent, all(std::int32_t{0}), all(std::int32_t{0}), exponent);
  exponent = if_less(all(std::int32_t{254}), exponent, all(std::int32_t{254}), exponent);
  const U value = as_uint(exponent) << 23 | (code & all(128u)) << 24;
  return floats(if_equal(low, all(0u), all(0u), value));
}

template <>
struct Quantizer<Kind::natural> {
  std::int32_t top;
  F to_unit;
  Quantizer(const Encode& a, std::int64_t block, const float*, std::int64_t, float largest, float*) {
    const std::int32_t above = std::int32_t(bits_of(largest) >> 23) + 1;
    top = largest > 0 ? (above < 254 ? above : 254) : 0;
    static_cast<std::uint8_t*>(a.scales)[block] = std::uint8_t(top);
    const std::int32_t exponent = 127 - (top - 126);
    to_unit = all(power_of_two(exponent > 127 ? 127 : exponent));
  }
  GRADWIRE_INLINE U code(F x, std::int64_t vector, Random& draws, F& value) const {
    const I zero = all(std::int32_t{0}), lowest = all(top - 126);
    const U m = bits(x) & all(0x7FFFFFFFu);
    const I exponent = as_int(m >> 23);
    const F inside = to_float(m & all(0x7FFFFFu)) * all(0x1p-23f);
    const F fraction = if_less(exponent, lowest, floats(m) * to_unit, inside);
    I level = if_less(exponent, lowest, lowest - all(std::int32_t{1}), exponent);
    level = level + if_less(draws.uniform(vector), fraction, all(std::int32_t{1}), zero);
    I c = level - lowest + all(std::int32_t{1});
    c = if_less(all(std::int32_t{127}), c, all(std::int32_t{127}), c);
    c = if_less(level, lowest, zero, c);
    c = if_less(zero, exponent, c, zero);
    if (top == 0) c = zero;
    const I negative = if_less(zero, c, as_int(sign_bits(x) >> 24), zero);
    const U result = as_uint(c | negative);
    value = natural_value(result, top);
    return result;
  }
};

template <>
struct Quantizer<Kind::half> {
  F limit;
  int mantissa;
  SmallFloat small;
  Quantizer(const Encode& a, std::int64_t, const float*, std::int64_t, float, float*)
      : limit(all(a.format.limit)), mantissa(a.format.mantissa), small(small_float(a.format)) {}
  GRADWIRE_INLINE U code(F x, std::int64_t, Random&, F& value) const {
    const F v = larger(smaller(x, limit), all(0.0f) - limit);
    U c;
    if (mantissa == 10) {
      c = small.narrow(v);
      value = small.widen(c);
      return c;
    }
    c = mantissa < 0 ? bits(x) >> 16 : (bits(v) + all(0x7FFFu) + (bits(v) >> 16 & all(1u))) >> 16;
    value = floats(c << 16);
    return c;
  }
};

static inline void write_rest(const Encode& a, std::int64_t at, F rest, std::int64_t n) {
  if (a.streamed && n >= kLanes)
    stream(a.rest + at, rest);
  else
    store_some(a.rest + at, rest, n);
}

// One block into `digits` (one byte a code) or `words`; exactly the codes' own places in `a.codes` where they fit.
template <Kind kKind, bool kFeedback>
static inline std::int64_t encode_block(const Encode& a, std::int64_t block, float* e, std::uint8_t* digits,
                                        Random& draws) {
  const Format& f = a.format;
  const std::int64_t first = block * f.block, n = least(f.block, a.count - first);
  std::int64_t bad = 0;
  std::int32_t top = stage<kFeedback>(a.x + first, kFeedback ? a.residual + first : nullptr, a.decay, n, e);
  if (top >= kInfinity) {
    bad = clean_values(e, e, n);
    top = stage<false>(e, nullptr, 1.0f, n, e);
  }
  float largest = float_of(std::uint32_t(top));
  if (largest < f.floor) largest = 0.0f;

  if constexpr (kKind == Kind::sign) {
    const float scale = store_scale(f, a.scales, block, largest > 0 ? mean_magnitude(e, n, f.block) : 0.0f);
    const U positive = all(bits_of(scale));
    std::uint8_t* out = a.codes + first / 8;
    for (std::int64_t i = 0; i < n; i += kLanes) {
      const F x = load(e + i);
      const std::uint16_t mask = std::uint16_t(mask_less(x, all(0.0f)));
      std::memcpy(out + i / 8, &mask, n - i > 8 ? 2 : 1);
      if (kFeedback) {
        const U minus = if_less(x, all(0.0f), all(0x80000000u), all(0u));
        write_rest(a, first + i, x - floats(positive | minus), n - i);
      }
    }
  } else {
    const Quantizer<kKind> quantizer(a, block, e, n, largest, e + f.block);
    const std::int64_t vector = first / kLanes;
    for (std::int64_t i = 0; i < n; i += kLanes) {
      const F x = load(e + i);
      F value;
      const U code = quantizer.code(x, vector + i / kLanes, draws, value);
      if constexpr (kKind == Kind::half) {
        std::uint16_t some[kLanes];
        std::uint16_t* target = reinterpret_cast<std::uint16_t*>(a.codes) + first + i;
        store_words(n - i >= kLanes ? target : some, code);
        if (n - i < kLanes) std::memcpy(target, some, std::size_t(n - i) * 2);
      } else if constexpr (kKind == Kind::levels) {
        if (f.bits > 8)
          store(reinterpret_cast<std::uint32_t*>(digits) + i, code);
        else
          store_bytes(digits + i, code);
      } else {
        store_bytes(digits + i, code);
      }
      if (kFeedback) write_rest(a, first + i, x - value, n - i);
    }
  }
  return bad;
}

template <Kind kKind, bool kFeedback>
static std::int64_t encode_blocks(const Encode& a, std::int64_t begin, std::int64_t end, float* scratch) {
  const Format& f = a.format;
  std::uint8_t* digits = reinterpret_cast<std::uint8_t*>(scratch + 2 * f.block);
  Random draws(a.key);
  std::int64_t bad = 0;
  if constexpr (kKind == Kind::ternary) {  // five values a byte, across blocks: groups of five blocks
    for (std::int64_t group = begin; group < end; ++group) {
      const std::int64_t first = group * 5 * f.block, n = least(5 * f.block, a.count - first);
      for (std::int64_t i = 0; i * f.block < n; ++i)
        bad += encode_block<kKind, kFeedback>(a, group * 5 + i, scratch, digits + i * f.block, draws);
      std::memset(digits + n, 0, 4);
      for (std::int64_t i = 0; i < n; i += 5)
        a.codes[(first + i) / 5] = std::uint8_t(digits[i] + 3 * digits[i + 1] + 9 * digits[i + 2] + 27 * digits[i + 3] +
                                                81 * digits[i + 4]);
    }
  } else {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * f.block, n = least(f.block, a.count - first);
      const bool in_place = f.bits == 8 && n == f.block;
      bad += encode_block<kKind, kFeedback>(a, block, scratch, in_place ? a.codes + first : digits, draws);
      if (kKind == Kind::sign || kKind == Kind::half || in_place) continue;
      std::uint8_t* out = a.codes + first / 8 * f.bits;
      if (f.bits > 8)
        pack_any(reinterpret_cast<std::uint32_t*>(digits), f.bits, n, out);
      else
        pack_bytes(digits, n, f.bits, out);
    }
  }
  if (a.streamed) end_of_streams();
  return bad;
}

template <Kind kKind>
static std::int64_t encode_kind(const Encode& a, std::int64_t begin, std::int64_t end, float* scratch) {
  return a.residual ? encode_blocks<kKind, true>(a, begin, end, scratch)
                    : encode_blocks<kKind, false>(a, begin, end, scratch);
}

static std::int64_t encode_range(const Encode& a, std::int64_t begin, std::int64_t end, float* scratch) {
  switch (a.format.kind) {
    case Kind::integer: return encode_kind<Kind::integer>(a, begin, end, scratch);
    case Kind::float8: return encode_kind<Kind::float8>(a, begin, end, scratch);
    case Kind::sign: return encode_kind<Kind::sign>(a, begin, end, scratch);
    case Kind::levels: return encode_kind<Kind::levels>(a, begin, end, scratch);
    case Kind::ternary: return encode_kind<Kind::ternary>(a, begin, end, scratch);
    case Kind::natural: return encode_kind<Kind::natural>(a, begin, end, scratch);
    case Kind::half: return encode_kind<Kind::half>(a, begin, end, scratch);
  }
  return 0;
}

// Decoding: values of a vector of codes, given a block's scale.

template <Kind kKind>
static inline F value_of(const Format& f, const SmallFloat& small, U code, F scale, std::int32_t top) {
  if constexpr (kKind == Kind::integer) return to_float(as_int(code) - all(std::int32_t(f.limit))) * scale;
  if constexpr (kKind == Kind::float8) return small.widen(code) * scale;
  if constexpr (kKind == Kind::levels)
    return to_float(as_int(code) - all(std::int32_t(f.limit))) * all(f.reciprocal) * scale;
  if constexpr (kKind == Kind::ternary) return to_float(as_int(code) - all(std::int32_t{1})) * scale;
  if constexpr (kKind == Kind::natural) return natural_value(code, top);
  if constexpr (kKind == Kind::half) return f.mantissa == 10 ? small.widen(code) : floats(code << 16);
  return scale;
}

template <Kind kKind>
static void decode_blocks(const Decode& a, std::int64_t begin, std::int64_t end, float* scratch) {
  static constexpr std::uint32_t kLaneBits[kLanes] = {1,   2,   4,    8,    16,   32,   64,    128,
                                                      256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  const Format& f = a.format;
  const SmallFloat small = small_float(f);
  const U lane_bits = load(kLaneBits);
  std::uint8_t* digits = reinterpret_cast<std::uint8_t*>(scratch);
  std::uint32_t* words = reinterpret_cast<std::uint32_t*>(scratch);
  for (std::int64_t block = begin; block < end; ++block) {
    const std::int64_t first = block * f.block, n = least(f.block, a.count - first);
    for (int p = 0; p < a.payloads; ++p) {
      const std::uint8_t* codes = a.codes[p];
      const F scale = all(load_scale(f, a.scales[p], block));
      const std::int32_t top = kKind == Kind::natural ? static_cast<const std::uint8_t*>(a.scales[p])[block] : 0;
      const std::uint8_t* bytes = digits;
      if (kKind == Kind::ternary) {
        for (std::int64_t i = first, q = first / 5; i < first + n; ++q) {
          std::uint32_t left = codes[q];
          for (std::int64_t j = 5 * q; j < 5 * q + 5; ++j, left /= 3)
            if (j >= i && j < first + n) digits[j - first] = std::uint8_t(left % 3);
          i = 5 * q + 5;
        }
      } else if (kKind == Kind::levels && f.bits > 8) {
        const std::int64_t at = first / 8 * f.bits;
        unpack_any(codes + at, a.code_bytes - at, f.bits, n, words);
      } else if (kKind != Kind::sign && kKind != Kind::half) {
        if (f.bits < 8)
          unpack_bytes(codes + first / 8 * f.bits, n, f.bits, digits);
        else if (n == f.block)
          bytes = codes + first;
        else
          std::memcpy(digits, codes + first, std::size_t(n));
      }
      const bool adds = a.add || p > 0, streams = a.streamed && !adds && a.payloads == 1;
      for (std::int64_t i = 0; i < n; i += kLanes) {
        F value;
        if constexpr (kKind == Kind::sign) {
          std::uint16_t mask = 0;
          std::memcpy(&mask, codes + (first + i) / 8, n - i > 8 ? 2 : 1);
          const U negative = if_equal(all(std::uint32_t(mask)) & lane_bits, all(0u), all(0u), all(0x80000000u));
          value = floats(bits(scale) ^ negative);
        } else if constexpr (kKind == Kind::half) {
          std::uint16_t some[kLanes] = {};
          const std::uint16_t* source = reinterpret_cast<const std::uint16_t*>(codes) + first + i;
          if (n - i < kLanes) std::memcpy(some, source, std::size_t(n - i) * 2);
          value = value_of<kKind>(f, small, load_words(n - i < kLanes ? some : source), scale, top);
        } else if (kKind == Kind::levels && f.bits > 8) {
          value = value_of<kKind>(f, small, load(words + i), scale, top);
        } else {
          value = value_of<kKind>(f, small, load_bytes(bytes + i), scale, top);
        }
        float* out = a.out + first + i;
        if (adds)
          store_some(out, load_some(out, n - i) + value, n - i);
        else if (streams && n - i >= kLanes)
          stream(out, value);
        else
          store_some(out, value, n - i);
      }
    }
  }
  if (a.streamed) end_of_streams();
}

static void decode_range(const Decode& a, std::int64_t begin, std::int64_t end, float* scratch) {
  switch (a.format.kind) {
    case Kind::integer: return decode_blocks<Kind::integer>(a, begin, end, scratch);
    case Kind::float8: return decode_blocks<Kind::float8>(a, begin, end, scratch);
    case Kind::sign: return decode_blocks<Kind::sign>(a, begin, end, scratch);
    case Kind::levels: return decode_blocks<Kind::levels>(a, begin, end, scratch);
    case Kind::ternary: return decode_blocks<Kind::ternary>(a, begin, end, scratch);
    case Kind::natural: return decode_blocks<Kind::natural>(a, begin, end, scratch);
    case Kind::half: return decode_blocks<Kind::half>(a, begin, end, scratch);
  }
}

// e = x + decay * residual for elements begin to end, as it is; returns how many are not finite.
static std::int64_t accumulate_range(const float* x, const float* residual, float decay, float* e, bool streamed,
                                     std::int64_t begin, std::int64_t end) {
  const F d = all(decay);
  const U mask = all(0x7FFFFFFFu);
  std::int64_t bad = 0;
  while (begin < end) {
    const std::int64_t chunk = least(end, begin + 4096);
    I top = all(std::int32_t{0});
    std::int64_t i = begin;
    for (; i < chunk; i += kLanes) {
      const std::int64_t n = chunk - i;
      F v = load_some(x + i, n);
      if (residual) v = v + load_some(residual + i, n) * d;
      top = larger(top, as_int(bits(v) & mask));
      if (!e) continue;
      if (streamed && n >= kLanes)
        stream(e + i, v);
      else
        store_some(e + i, v, n);
    }
    if (largest_lane(top) >= kInfinity)
      for (i = begin; i < chunk; ++i) {
        const float v = residual ? x[i] + residual[i] * decay : x[i];
        bad += (bits_of(v) & 0x7FFFFFFFu) >= std::uint32_t(kInfinity);
      }
    begin = chunk;
  }
  if (streamed) end_of_streams();
  return bad;
}

static void clean_range(const float* x, float* e, std::int64_t count) { clean_values(x, e, count); }

}  // namespace gradwire::GRADWIRE_ISA
