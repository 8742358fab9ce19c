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

template <Kind kKind, bool kRandom = false>
struct Quantizer;

template <bool kRandom>
struct Quantizer<Kind::integer, kRandom> {
  F scale, inv, limit;
  Quantizer(const Encode& a, std::int64_t block, const float* e, std::int64_t n, float largest, float* y) {
    const Format& f = a.format;
    const float exact = f.scaling == Scaling::mse ? least_squares_scale(f, e, n, largest, y) : largest * f.reciprocal;
    const float stored = store_scale(f, a.scales, block, exact);
    scale = all(stored), inv = all(inverse(stored)), limit = all(f.limit);
  }
  GRADWIRE_INLINE U code(F x, std::int64_t vector, Random& draws, F& value) const {
    // Cutting off first gives the same integers as cutting off last, and keeps `nearest` in its range.
    const F v = larger(smaller(x * inv, limit), all(0.0f) - limit);
    const F c = kRandom ? stochastic(v, draws.uniform(vector)) : nearest(v);
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
#if defined(__F16C__)
      c = to_half(v);
      value = from_half(c);
#else
      c = small.narrow(v);
      value = small.widen(c);
#endif
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

// One block into `digits`: a byte a code, half a byte for integers of 4 bits, four bytes for levels of more than 8.
template <Kind kKind, bool kFeedback, bool kRandom>
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

  // Whole vectors first: there, `left` is a constant and all that asks for it disappears.
  const auto for_vectors = [n](auto&& body) {
    std::int64_t i = 0;
    for (; i + kLanes <= n; i += kLanes) body(i, std::int64_t{kLanes});
    if (i < n) body(i, n - i);
  };
  if constexpr (kKind == Kind::sign) {
    const F scale = all(store_scale(f, a.scales, block, largest > 0 ? mean_magnitude(e, n, f.block) : 0.0f));
    std::uint8_t* out = a.codes + first / 8;
    for_vectors([&](std::int64_t i, std::int64_t left) GRADWIRE_LAMBDA {
      const F x = load(e + i);
      const std::uint16_t mask = std::uint16_t(mask_less(x, all(0.0f)));
      std::memcpy(out + i / 8, &mask, left > 8 ? 2 : 1);
      if (kFeedback) write_rest(a, first + i, x - negate_some(scale, mask), left);
    });
  } else {
    const Quantizer<kKind, kRandom> quantizer(a, block, e, n, largest, e + f.block);
    const std::int64_t vector = first / kLanes;
    for_vectors([&](std::int64_t i, std::int64_t left) GRADWIRE_LAMBDA {
      const F x = load(e + i);
      F value;
      const U code = quantizer.code(x, vector + i / kLanes, draws, value);
      if constexpr (kKind == Kind::half) {
        std::uint16_t some[kLanes];
        std::uint16_t* target = reinterpret_cast<std::uint16_t*>(a.codes) + first + i;
        store_words(left >= kLanes ? target : some, code);
        if (left < kLanes) std::memcpy(target, some, std::size_t(left) * 2);
      } else if (kKind == Kind::levels && f.bits > 8) {
        store(reinterpret_cast<std::uint32_t*>(digits) + i, code);
      } else if (kKind == Kind::integer && f.bits == 4) {
        store_nibbles(digits + i / 2, code);
      } else {
        store_bytes(digits + i, code);
      }
      if (kFeedback) write_rest(a, first + i, x - value, left);
    });
  }
  return bad;
}

template <Kind kKind, bool kFeedback, bool kRandom>
static std::int64_t encode_blocks(const Encode& a, std::int64_t begin, std::int64_t end, float* scratch) {
  const Format& f = a.format;
  std::uint8_t* digits = reinterpret_cast<std::uint8_t*>(scratch + 2 * f.block);
  Random draws(a.key);
  std::int64_t bad = 0;
  if constexpr (kKind == Kind::ternary) {  // five values a byte, across blocks: groups of five blocks
    for (std::int64_t group = begin; group < end; ++group) {
      const std::int64_t first = group * 5 * f.block, n = least(5 * f.block, a.count - first);
      for (std::int64_t i = 0; i * f.block < n; ++i)
        bad += encode_block<kKind, kFeedback, kRandom>(a, group * 5 + i, scratch, digits + i * f.block, draws);
      std::memset(digits + n, 0, 4);
      for (std::int64_t i = 0; i < n; i += 5)
        a.codes[(first + i) / 5] = std::uint8_t(digits[i] + 3 * digits[i + 1] + 9 * digits[i + 2] + 27 * digits[i + 3] +
                                                81 * digits[i + 4]);
    }
  } else {
    for (std::int64_t block = begin; block < end; ++block) {
      const std::int64_t first = block * f.block, n = least(f.block, a.count - first);
      std::uint8_t* out = a.codes + first / 8 * f.bits;
      const bool packed = f.bits == 8 || (kKind == Kind::integer && f.bits == 4), in_place = packed && n == f.block;
      bad += encode_block<kKind, kFeedback, kRandom>(a, block, scratch, in_place ? out : digits, draws);
      if (kKind == Kind::sign || kKind == Kind::half || in_place) continue;
      if (packed) {
        if (f.bits == 4 && n % 2) digits[n / 2] &= 15;
        std::memcpy(out, digits, std::size_t((n * f.bits + 7) / 8));
      } else if (f.bits > 8) {
        pack_any(reinterpret_cast<std::uint32_t*>(digits), f.bits, n, out);
      } else {
        pack_bytes(digits, n, f.bits, out);
      }
    }
  }
  if (a.streamed) end_of_streams();
  return bad;
}

template <Kind kKind, bool kRandom = false>
static std::int64_t encode_kind(const Encode& a, std::int64_t begin, std::int64_t end, float* scratch) {
  return a.residual ? encode_blocks<kKind, true, kRandom>(a, begin, end, scratch)
                    : encode_blocks<kKind, false, kRandom>(a, begin, end, scratch);
}

static std::int64_t encode_range(const Encode& a, std::int64_t begin, std::int64_t end, float* scratch) {
  switch (a.format.kind) {
    case Kind::integer:
      return a.format.scaling == Scaling::stochastic ? encode_kind<Kind::integer, true>(a, begin, end, scratch)
                                                     : encode_kind<Kind::integer>(a, begin, end, scratch);
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
  if constexpr (kKind == Kind::integer) return to_float(code - all(std::uint32_t(f.limit))) * scale;
  if constexpr (kKind == Kind::float8) return small.widen(code) * scale;
  if constexpr (kKind == Kind::levels)
    return to_float(code - all(std::uint32_t(f.limit))) * all(f.reciprocal) * scale;
  if constexpr (kKind == Kind::ternary) return to_float(code - all(1u)) * scale;
  if constexpr (kKind == Kind::natural) return natural_value(code, top);
#if defined(__F16C__)
  if constexpr (kKind == Kind::half) return f.mantissa == 10 ? from_half(code) : floats(code << 16);
#else
  if constexpr (kKind == Kind::half) return f.mantissa == 10 ? small.widen(code) : floats(code << 16);
#endif
  return scale;
}

// The five digits of a byte, lowest first, one a byte.
struct Digits {
  std::uint64_t of[256];
  constexpr Digits() : of() {
    for (std::uint32_t byte = 0; byte < 256; ++byte)
      for (std::uint32_t i = 0, left = byte; i < 5; ++i, left /= 3) of[byte] |= std::uint64_t(left % 3) << 8 * i;
  }
};
constexpr Digits kDigits;

// Digits of values first to first + n, to `out`, which has room for 8 more.
static inline void unpack_digits(const std::uint8_t* codes, std::int64_t first, std::int64_t n, std::uint8_t* out) {
  std::int64_t at = first / 5;
  const int skipped = int(first % 5);
  std::uint64_t digits = kDigits.of[codes[at]] >> 8 * skipped;
  std::memcpy(out, &digits, 8);
  for (std::int64_t i = 5 - skipped; i < n; i += 5) {
    digits = kDigits.of[codes[++at]];
    std::memcpy(out + i, &digits, 8);
  }
}

template <Kind kKind, bool kAdd>
static inline void decode_block(const Decode& a, const SmallFloat& small, std::int64_t block, int payload,
                                float* scratch) {
  const Format& f = a.format;
  const std::int64_t first = block * f.block, n = least(f.block, a.count - first);
  const std::uint8_t* codes = a.codes[payload];
  const F scale = all(load_scale(f, a.scales[payload], block));
  const std::int32_t top = kKind == Kind::natural ? static_cast<const std::uint8_t*>(a.scales[payload])[block] : 0;
  std::uint8_t* digits = reinterpret_cast<std::uint8_t*>(scratch);
  std::uint32_t* words = reinterpret_cast<std::uint32_t*>(scratch);
  const std::uint8_t* bytes = digits;
  const bool wide = kKind == Kind::levels && f.bits > 8, nibbles = kKind == Kind::integer && f.bits == 4;
  if (kKind == Kind::ternary) {
    unpack_digits(codes, first, n, digits);
  } else if (wide) {
    const std::int64_t at = first / 8 * f.bits;
    unpack_any(codes + at, a.code_bytes - at, f.bits, n, words);
  } else if (kKind != Kind::sign && kKind != Kind::half) {
    const std::uint8_t* source = codes + first / 8 * f.bits;
    if ((f.bits == 8 || nibbles) && n == f.block)
      bytes = source;
    else if (f.bits == 8 || nibbles)
      std::memcpy(digits, source, std::size_t((n * f.bits + 7) / 8));
    else
      unpack_bytes(source, n, f.bits, digits);
  }
  const bool streams = a.streamed && !kAdd && a.payloads == 1;
  const auto body = [&](std::int64_t i, std::int64_t left) GRADWIRE_LAMBDA {
    F value;
    if constexpr (kKind == Kind::sign) {
      std::uint16_t mask = 0;
      std::memcpy(&mask, codes + (first + i) / 8, left > 8 ? 2 : 1);
      value = negate_some(scale, mask);
    } else if constexpr (kKind == Kind::half) {
      std::uint16_t some[kLanes] = {};
      const std::uint16_t* source = reinterpret_cast<const std::uint16_t*>(codes) + first + i;
      if (left < kLanes) std::memcpy(some, source, std::size_t(left) * 2);
      value = value_of<kKind>(f, small, load_words(left < kLanes ? some : source), scale, top);
    } else {
      const U code = wide ? load(words + i) : nibbles ? load_nibbles(bytes + i / 2) : load_bytes(bytes + i);
      value = value_of<kKind>(f, small, code, scale, top);
    }
    float* out = a.out + first + i;
    if (kAdd)
      store_some(out, load_some(out, left) + value, left);
    else if (streams && left >= kLanes)
      stream(out, value);
    else
      store_some(out, value, left);
  };
  std::int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) body(i, std::int64_t{kLanes});
  if (i < n) body(i, n - i);
}

template <Kind kKind>
static void decode_blocks(const Decode& a, std::int64_t begin, std::int64_t end, float* scratch) {
  const SmallFloat small = small_float(a.format);
  for (std::int64_t block = begin; block < end; ++block) {
    if (a.add)
      decode_block<kKind, true>(a, small, block, 0, scratch);
    else
      decode_block<kKind, false>(a, small, block, 0, scratch);
    for (int payload = 1; payload < a.payloads; ++payload) decode_block<kKind, true>(a, small, block, payload, scratch);
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

static inline std::int64_t count_nonfinite(const float* x, std::int64_t n) {
  std::int64_t found = 0;
  for (std::int64_t i = 0; i < n; ++i) found += (bits_of(x[i]) & 0x7FFFFFFFu) >= std::uint32_t(kInfinity);
  return found;
}

// Hands every vector of elements begin to end to `put(i, n)`: n values from i on, kLanes but for the last. It returns the
// values, of which those that are not finite are counted: by `count(begin, end)`, where a stretch has any.
template <class Put, class Count>
static inline std::int64_t each_counted(std::int64_t begin, std::int64_t end, Put put, Count count) {
  const U mask = all(0x7FFFFFFFu);
  std::int64_t bad = 0;
  while (begin < end) {
    const std::int64_t chunk = least(end, begin + 4096);
    I top = all(std::int32_t{0});
    std::int64_t i = begin;
    for (; i + kLanes <= chunk; i += kLanes) top = larger(top, as_int(bits(put(i, std::int64_t{kLanes})) & mask));
    if (i < chunk) top = larger(top, as_int(bits(put(i, chunk - i)) & mask));
    if (largest_lane(top) >= kInfinity) bad += count(begin, chunk);
    begin = chunk;
  }
  return bad;
}

// e = x + decay * residual for elements begin to end, as it is; returns how many are not finite.
static std::int64_t accumulate_range(const float* x, const float* residual, float decay, float* e, bool streamed,
                                     std::int64_t begin, std::int64_t end) {
  if (!residual && !e)
    return each_counted(
        begin, end, [&](std::int64_t i, std::int64_t n) GRADWIRE_LAMBDA { return load_some(x + i, n); },
        [&](std::int64_t from, std::int64_t to) { return count_nonfinite(x + from, to - from); });
  const F d = all(decay);
  const std::int64_t bad = each_counted(
      begin, end,
      [&](std::int64_t i, std::int64_t n) GRADWIRE_LAMBDA {
        F v = load_some(x + i, n);
        if (residual) v = v + load_some(residual + i, n) * d;
        if (e && streamed && n >= kLanes)
          stream(e + i, v);
        else if (e)
          store_some(e + i, v, n);
        return v;
      },
      [&](std::int64_t from, std::int64_t to) {
        std::int64_t found = 0;
        for (std::int64_t i = from; i < to; ++i) {
          const float v = residual ? x[i] + residual[i] * decay : x[i];
          found += count_nonfinite(&v, 1);
        }
        return found;
      });
  if (streamed) end_of_streams();
  return bad;
}

// x / by for elements begin to end, where they lie; returns how many of the quotients are not finite.
static std::int64_t divide_range(float* x, float by, std::int64_t begin, std::int64_t end) {
  std::uint32_t word;
  std::memcpy(&word, &by, sizeof word);
  const bool exact = (word & 0x7FFFFFu) == 0;  // a power of two: the product with 1 / by is the quotient
  const F divisor = all(by), factor = all(1.0f / by);
  const auto count = [&](std::int64_t from, std::int64_t to) { return count_nonfinite(x + from, to - from); };
  const auto put = [&](std::int64_t i, std::int64_t n, F v) GRADWIRE_LAMBDA {
    store_some(x + i, v, n);
    return v;
  };
  if (exact)
    return each_counted(
        begin, end,
        [&](std::int64_t i, std::int64_t n) GRADWIRE_LAMBDA { return put(i, n, load_some(x + i, n) * factor); }, count);
  return each_counted(
      begin, end,
      [&](std::int64_t i, std::int64_t n) GRADWIRE_LAMBDA { return put(i, n, load_some(x + i, n) / divisor); }, count);
}

static void clean_range(const float* x, float* e, std::int64_t count) { clean_values(x, e, count); }

}  // namespace gradwire::GRADWIRE_ISA
