// Sixteen lanes, whatever the machine has: one AVX-512 register, two of AVX2, four of SSE2 or NEON.
//
// This header and those that include it are compiled once per instruction set, each time into a namespace of its own
// (GRADWIRE_ISA). They use no templates of the standard library: the linker would merge their copies, and code for
// AVX-512 could run on a machine without it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace gradwire::GRADWIRE_ISA {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif
#define GRADWIRE_INLINE __attribute__((always_inline)) inline
#define GRADWIRE_LAMBDA __attribute__((always_inline))
constexpr int kLanes = 16;
constexpr int kParts = kLanes / kWidth;

typedef float NativeF __attribute__((vector_size(kWidth * 4)));
typedef std::int32_t NativeI __attribute__((vector_size(kWidth * 4)));
typedef std::uint32_t NativeU __attribute__((vector_size(kWidth * 4)));
typedef std::uint8_t NativeBytes __attribute__((vector_size(kWidth)));
typedef std::uint16_t NativeWords __attribute__((vector_size(kWidth * 2)));

template <class V>
struct Lanes {
  V part[kParts];
};
using F = Lanes<NativeF>;
using I = Lanes<NativeI>;
using U = Lanes<NativeU>;

#define GRADWIRE_EACH for (int p_ = 0; p_ < kParts; ++p_)
#define GRADWIRE_BINARY(op)                                   \
  template <class V>                                          \
  static inline Lanes<V> operator op(Lanes<V> a, Lanes<V> b) { \
    GRADWIRE_EACH a.part[p_] = a.part[p_] op b.part[p_];      \
    return a;                                                 \
  }
GRADWIRE_BINARY(+)
GRADWIRE_BINARY(-)
GRADWIRE_BINARY(*)
GRADWIRE_BINARY(/)
GRADWIRE_BINARY(&)
GRADWIRE_BINARY(|)
GRADWIRE_BINARY(^)
#undef GRADWIRE_BINARY

template <class V>
static inline Lanes<V> operator<<(Lanes<V> a, int n) {
  GRADWIRE_EACH a.part[p_] = a.part[p_] << n;
  return a;
}
template <class V>
static inline Lanes<V> operator>>(Lanes<V> a, int n) {
  GRADWIRE_EACH a.part[p_] = a.part[p_] >> n;
  return a;
}

static inline F all(float x) {
  F r;
  GRADWIRE_EACH r.part[p_] = x - NativeF{};
  return r;
}
static inline I all(std::int32_t x) {
  I r;
  GRADWIRE_EACH r.part[p_] = x - NativeI{};
  return r;
}
static inline U all(std::uint32_t x) {
  U r;
  GRADWIRE_EACH r.part[p_] = x - NativeU{};
  return r;
}

// Register by register: compilers take a whole structure through the stack, in other pieces than it is read in.
template <class L, class T>
static inline L load_as(const T* p) {
  L r;
  GRADWIRE_EACH std::memcpy(&r.part[p_], p + kWidth * p_, sizeof r.part[p_]);
  return r;
}
static inline F load(const float* p) { return load_as<F>(p); }
static inline U load(const std::uint32_t* p) { return load_as<U>(p); }
template <class T, class V>
static inline void store(T* p, Lanes<V> v) {
  GRADWIRE_EACH std::memcpy(p + kWidth * p_, &v.part[p_], sizeof v.part[p_]);
}

// Past the caches, for results too large to find them there again; p is aligned to 64 bytes.
static inline void stream(float* p, F v) {
#if defined(__AVX512F__)
  _mm512_stream_ps(p, (__m512)v.part[0]);
#elif defined(__AVX2__)
  GRADWIRE_EACH _mm256_stream_ps(p + 8 * p_, (__m256)v.part[p_]);
#elif defined(__SSE2__)
  GRADWIRE_EACH _mm_stream_ps(p + 4 * p_, (__m128)v.part[p_]);
#else
  store(p, v);
#endif
}
static inline void end_of_streams() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

static inline U bits(F a) {
  U r;
  GRADWIRE_EACH r.part[p_] = (NativeU)a.part[p_];
  return r;
}
static inline F floats(U a) {
  F r;
  GRADWIRE_EACH r.part[p_] = (NativeF)a.part[p_];
  return r;
}
static inline I as_int(U a) {
  I r;
  GRADWIRE_EACH r.part[p_] = (NativeI)a.part[p_];
  return r;
}
static inline U as_uint(I a) {
  U r;
  GRADWIRE_EACH r.part[p_] = (NativeU)a.part[p_];
  return r;
}
static inline F magnitude(F a) { return floats(bits(a) & all(0x7FFFFFFFu)); }

static inline F to_float(I a) {
  F r;
  GRADWIRE_EACH r.part[p_] = __builtin_convertvector(a.part[p_], NativeF);
  return r;
}
// Two's complement.
static inline F to_float(U a) { return to_float(as_int(a)); }
// The lanes hold integers.
static inline U to_uint(F a) {
  I r;
  GRADWIRE_EACH r.part[p_] = __builtin_convertvector(a.part[p_], NativeI);
  return as_uint(r);
}

#define GRADWIRE_SELECT(name, op)                                                            \
  template <class V, class W>                                                                \
  static inline Lanes<W> name(Lanes<V> a, Lanes<V> b, Lanes<W> yes, Lanes<W> no) {            \
    GRADWIRE_EACH yes.part[p_] = a.part[p_] op b.part[p_] ? yes.part[p_] : no.part[p_];      \
    return yes;                                                                              \
  }
GRADWIRE_SELECT(if_less, <)
GRADWIRE_SELECT(if_equal, ==)
#undef GRADWIRE_SELECT

// Of numbers, no NaN among them. -0 and 0 are equal: which of the two comes out is not defined.
#if defined(__AVX2__)
#if defined(__AVX512F__)
#define GRADWIRE_MM(name) _mm512_##name
using RegisterF = __m512;
using RegisterI = __m512i;
#else
#define GRADWIRE_MM(name) _mm256_##name
using RegisterF = __m256;
using RegisterI = __m256i;
#endif
#define GRADWIRE_NATIVE(name, Type, Native, Register, instruction)                                              \
  static inline Type name(Type a, Type b) {                                                                     \
    GRADWIRE_EACH a.part[p_] = (Native)GRADWIRE_MM(instruction)((Register)a.part[p_], (Register)b.part[p_]);    \
    return a;                                                                                                   \
  }
GRADWIRE_NATIVE(smaller, F, NativeF, RegisterF, min_ps)
GRADWIRE_NATIVE(larger, F, NativeF, RegisterF, max_ps)
GRADWIRE_NATIVE(larger, I, NativeI, RegisterI, max_epi32)
#undef GRADWIRE_NATIVE
#else
static inline F smaller(F a, F b) { return if_less(a, b, a, b); }
static inline F larger(F a, F b) { return if_less(b, a, a, b); }
static inline I larger(I a, I b) { return if_less(b, a, a, b); }
#endif

// To the nearest integer, half to even; for magnitudes below 2**22. Never -0.
static inline F nearest(F a) {
  const F magic = all(12582912.0f);  // 1.5 * 2**23
  return (a + magic) - magic;
}
static inline F floor_of(F a) {
  const F r = nearest(a);
  return if_less(a, r, r - all(1.0f), r);
}

// a * b + c, in one rounding where the machine can: only for what promises no exact bytes.
static inline F multiply_add(F a, F b, F c) {
#if defined(__AVX512F__)
  c.part[0] = (NativeF)_mm512_fmadd_ps((__m512)a.part[0], (__m512)b.part[0], (__m512)c.part[0]);
  return c;
#elif defined(__FMA__)
  GRADWIRE_EACH c.part[p_] = (NativeF)_mm256_fmadd_ps((__m256)a.part[p_], (__m256)b.part[p_], (__m256)c.part[p_]);
  return c;
#else
  return a * b + c;
#endif
}

// One bit a lane, lane 0 lowest: where a < b.
static inline std::uint32_t mask_less(F a, F b) {
#if defined(__AVX512F__)
  return _mm512_cmp_ps_mask((__m512)a.part[0], (__m512)b.part[0], _CMP_LT_OQ);
#elif defined(__AVX2__)
  std::uint32_t m = 0;
  GRADWIRE_EACH m |= std::uint32_t(_mm256_movemask_ps((__m256)(a.part[p_] < b.part[p_]))) << (8 * p_);
  return m;
#elif defined(__SSE2__)
  std::uint32_t m = 0;
  GRADWIRE_EACH m |= std::uint32_t(_mm_movemask_ps((__m128)(a.part[p_] < b.part[p_]))) << (4 * p_);
  return m;
#else
  std::uint32_t m = 0;
  GRADWIRE_EACH for (int i = 0; i < kWidth; ++i) m |= std::uint32_t(a.part[p_][i] < b.part[p_][i]) << (kWidth * p_ + i);
  return m;
#endif
}
static inline std::uint32_t mask_at_least(I a, I b) {
#if defined(__AVX512F__)
  return _mm512_cmpge_epi32_mask((__m512i)a.part[0], (__m512i)b.part[0]);
#elif defined(__AVX2__)
  std::uint32_t m = 0;
  GRADWIRE_EACH m |= std::uint32_t(_mm256_movemask_ps((__m256)(a.part[p_] >= b.part[p_]))) << (8 * p_);
  return m;
#elif defined(__SSE2__)
  std::uint32_t m = 0;
  GRADWIRE_EACH m |= std::uint32_t(_mm_movemask_ps((__m128)(a.part[p_] >= b.part[p_]))) << (4 * p_);
  return m;
#else
  std::uint32_t m = 0;
  GRADWIRE_EACH for (int i = 0; i < kWidth; ++i) m |= std::uint32_t(a.part[p_][i] >= b.part[p_][i]) << (kWidth * p_ + i);
  return m;
#endif
}

static inline std::int32_t largest_lane(I a) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_epi32((__m512i)a.part[0]);
#else
  std::int32_t lane[kLanes];
  store(lane, a);
  std::int32_t best = lane[0];
  for (int i = 1; i < kLanes; ++i) best = lane[i] > best ? lane[i] : best;
  return best;
#endif
}

// The end of the law's lane tree: fold by halves.
static inline float fold(F a) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
  const __m512 whole = (__m512)a.part[0];
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(whole), _mm512_extractf32x8_ps(whole, 1));
#else
  const __m256 eight = _mm256_add_ps((__m256)a.part[0], (__m256)a.part[1]);
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
#else
  float lane[kLanes];
  store(lane, a);
  for (int half = kLanes / 2; half; half /= 2)
    for (int i = 0; i < half; ++i) lane[i] = lane[i] + lane[i + half];
  return lane[0];
#endif
}

#if defined(__clang__)
#define GRADWIRE_SHUFFLE(v, ...) __builtin_shufflevector(v, v, __VA_ARGS__)
#else
#define GRADWIRE_SHUFFLE(v, ...) __builtin_shuffle(v, NativeI{__VA_ARGS__})
#endif

// Lane i gets that of i ^ kDistance.
template <int kDistance>
static inline F exchange(F a) {
  F r = a;
#if defined(__AVX512F__)
  const __m512 v = (__m512)a.part[0];
  if constexpr (kDistance == 1) r.part[0] = (NativeF)_mm512_permute_ps(v, 0xB1);
  if constexpr (kDistance == 2) r.part[0] = (NativeF)_mm512_permute_ps(v, 0x4E);
  if constexpr (kDistance == 4) r.part[0] = (NativeF)_mm512_shuffle_f32x4(v, v, 0xB1);
  if constexpr (kDistance == 8) r.part[0] = (NativeF)_mm512_shuffle_f32x4(v, v, 0x4E);
#else
  GRADWIRE_EACH {
    if constexpr (kDistance >= kWidth) {
      r.part[p_] = a.part[p_ ^ (kDistance / kWidth)];
    } else {
#if defined(__AVX2__)
      if constexpr (kDistance == 1) r.part[p_] = (NativeF)_mm256_permute_ps((__m256)a.part[p_], 0xB1);
      if constexpr (kDistance == 2) r.part[p_] = (NativeF)_mm256_permute_ps((__m256)a.part[p_], 0x4E);
      if constexpr (kDistance == 4)
        r.part[p_] = (NativeF)_mm256_permute2f128_ps((__m256)a.part[p_], (__m256)a.part[p_], 1);
#else
      if constexpr (kDistance == 1) r.part[p_] = GRADWIRE_SHUFFLE(a.part[p_], 1, 0, 3, 2);
      if constexpr (kDistance == 2) r.part[p_] = GRADWIRE_SHUFFLE(a.part[p_], 2, 3, 0, 1);
#endif
    }
  }
#endif
  return r;
}

// Lanes of less than 256 (words: 65536) in as many bytes, and back.
#if defined(__SSE2__)
static inline __m128i to_bytes(U a) {
#if defined(__AVX512F__)
  return _mm512_cvtepi32_epi8((__m512i)a.part[0]);
#elif defined(__AVX2__)
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a.part[0], (__m256i)a.part[1]), 0xD8);
  return _mm_packus_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
#else
  const __m128i low = _mm_packs_epi32((__m128i)a.part[0], (__m128i)a.part[1]);
  const __m128i high = _mm_packs_epi32((__m128i)a.part[2], (__m128i)a.part[3]);
  return _mm_packus_epi16(low, high);
#endif
}
static inline U from_bytes(__m128i bytes) {
  U r;
#if defined(__AVX512F__)
  r.part[0] = (NativeU)_mm512_cvtepu8_epi32(bytes);
#elif defined(__AVX2__)
  r.part[0] = (NativeU)_mm256_cvtepu8_epi32(bytes);
  r.part[1] = (NativeU)_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8));
#else
  const __m128i zero = _mm_setzero_si128();
  const __m128i low = _mm_unpacklo_epi8(bytes, zero), high = _mm_unpackhi_epi8(bytes, zero);
  r.part[0] = (NativeU)_mm_unpacklo_epi16(low, zero), r.part[1] = (NativeU)_mm_unpackhi_epi16(low, zero);
  r.part[2] = (NativeU)_mm_unpacklo_epi16(high, zero), r.part[3] = (NativeU)_mm_unpackhi_epi16(high, zero);
#endif
  return r;
}
#endif
static inline void store_bytes(std::uint8_t* p, U a) {
#if defined(__SSE2__)
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), to_bytes(a));
#else
  GRADWIRE_EACH {
    const NativeBytes b = __builtin_convertvector(a.part[p_], NativeBytes);
    std::memcpy(p + kWidth * p_, &b, sizeof b);
  }
#endif
}
static inline U load_bytes(const std::uint8_t* p) {
#if defined(__SSE2__)
  return from_bytes(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
#else
  U r;
  GRADWIRE_EACH {
    NativeBytes b;
    std::memcpy(&b, p + kWidth * p_, sizeof b);
    r.part[p_] = __builtin_convertvector(b, NativeU);
  }
  return r;
#endif
}
static inline void store_words(std::uint16_t* p, U a) {
#if defined(__AVX512F__)
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16((__m512i)a.part[0]));
#elif defined(__AVX2__)
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)a.part[0], (__m256i)a.part[1]), 0xD8);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
#else
  GRADWIRE_EACH {
    const NativeWords w = __builtin_convertvector(a.part[p_], NativeWords);
    std::memcpy(p + kWidth * p_, &w, sizeof w);
  }
#endif
}
static inline U load_words(const std::uint16_t* p) {
  U r;
#if defined(__AVX512F__)
  r.part[0] = (NativeU)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#elif defined(__AVX2__)
  GRADWIRE_EACH r.part[p_] =
      (NativeU)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + kWidth * p_)));
#else
  GRADWIRE_EACH {
    NativeWords w;
    std::memcpy(&w, p + kWidth * p_, sizeof w);
    r.part[p_] = __builtin_convertvector(w, NativeU);
  }
#endif
  return r;
}

// Codes of 4 bits, two a byte.
static inline void store_nibbles(std::uint8_t* p, U a) {
#if defined(__AVX512F__)
  const __m512i v = (__m512i)a.part[0];
  const __m128i pairs = _mm512_cvtepi64_epi8(_mm512_or_si512(v, _mm512_srli_epi64(v, 28)));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), pairs);
#elif defined(__SSE2__)
  const __m128i codes = to_bytes(a);
  const __m128i pairs = _mm_and_si128(_mm_or_si128(codes, _mm_srli_epi16(codes, 4)), _mm_set1_epi16(255));
  _mm_storel_epi64(reinterpret_cast<__m128i*>(p), _mm_packus_epi16(pairs, pairs));
#else
  std::uint8_t codes[kLanes];
  store_bytes(codes, a);
  for (int i = 0; i < kLanes / 2; ++i) p[i] = std::uint8_t(codes[2 * i] | codes[2 * i + 1] << 4);
#endif
}
static inline U load_nibbles(const std::uint8_t* p) {
#if defined(__AVX512F__)
  const __m512i pairs = _mm512_cvtepu8_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  U r;
  r.part[0] = (NativeU)_mm512_and_si512(_mm512_or_si512(pairs, _mm512_slli_epi64(pairs, 28)), _mm512_set1_epi32(15));
  return r;
#elif defined(__SSE2__)
  const __m128i pairs = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)), mask = _mm_set1_epi8(15);
  return from_bytes(_mm_unpacklo_epi8(_mm_and_si128(pairs, mask), _mm_and_si128(_mm_srli_epi16(pairs, 4), mask)));
#else
  std::uint8_t codes[kLanes];
  for (int i = 0; i < kLanes / 2; ++i) codes[2 * i] = p[i] & 15, codes[2 * i + 1] = std::uint8_t(p[i] >> 4);
  return load_bytes(codes);
#endif
}

// -a in the lanes whose bit is set.
static inline F negate_some(F a, std::uint32_t mask) {
#if defined(__AVX512F__)
  const __m512i v = (__m512i)a.part[0];
  a.part[0] = (NativeF)_mm512_mask_xor_epi32(v, __mmask16(mask), v, _mm512_set1_epi32(int(0x80000000u)));
  return a;
#else
  static constexpr std::uint32_t kBits[kLanes] = {1,   2,   4,    8,    16,   32,   64,    128,
                                                  256, 512, 1024, 2048, 4096, 8192, 16384, 32768};
  const U set = all(mask) & load(kBits);
  return floats(bits(a) ^ if_equal(set, all(0u), all(0u), all(0x80000000u)));
#endif
}

#if defined(__F16C__)
// Half precision by the machine's own instructions.
static inline U to_half(F a) {
#if defined(__AVX512F__)
  const __m256i h = _mm512_cvtps_ph((__m512)a.part[0], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  U r;
  r.part[0] = (NativeU)_mm512_cvtepu16_epi32(h);
  return r;
#else
  U r;
  GRADWIRE_EACH r.part[p_] =
      (NativeU)_mm256_cvtepu16_epi32(_mm256_cvtps_ph((__m256)a.part[p_], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
  return r;
#endif
}
static inline F from_half(U a) {
  std::uint16_t words[kLanes];
  store_words(words, a);
  F r;
#if defined(__AVX512F__)
  r.part[0] = (NativeF)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(words)));
#else
  GRADWIRE_EACH r.part[p_] =
      (NativeF)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(words + kWidth * p_)));
#endif
  return r;
}
#endif

static inline U lane_numbers() {
  static constexpr std::uint32_t n[kLanes] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  return load(n);
}

// Upper and lower halves of the products with a constant.
static inline void multiply_wide(U a, std::uint32_t m, U& high, U& low) {
#if defined(__SSE2__)
  GRADWIRE_EACH {
#if defined(__AVX512F__)
    const __m512i x = (__m512i)a.part[p_], c = _mm512_set1_epi32(int(m));
    const __m512i even = _mm512_mul_epu32(x, c), odd = _mm512_mul_epu32(_mm512_srli_epi64(x, 32), c);
    low.part[p_] = (NativeU)_mm512_mask_blend_epi32(0xAAAA, even, _mm512_slli_epi64(odd, 32));
    high.part[p_] = (NativeU)_mm512_mask_blend_epi32(0xAAAA, _mm512_srli_epi64(even, 32), odd);
#elif defined(__AVX2__)
    const __m256i x = (__m256i)a.part[p_], c = _mm256_set1_epi32(int(m));
    const __m256i even = _mm256_mul_epu32(x, c), odd = _mm256_mul_epu32(_mm256_srli_epi64(x, 32), c);
    low.part[p_] = (NativeU)_mm256_blend_epi32(even, _mm256_slli_epi64(odd, 32), 0xAA);
    high.part[p_] = (NativeU)_mm256_blend_epi32(_mm256_srli_epi64(even, 32), odd, 0xAA);
#else
    const __m128i x = (__m128i)a.part[p_], c = _mm_set1_epi32(int(m)), odds = _mm_set_epi32(-1, 0, -1, 0);
    const __m128i even = _mm_mul_epu32(x, c), odd = _mm_mul_epu32(_mm_srli_epi64(x, 32), c);
    low.part[p_] = (NativeU)_mm_or_si128(_mm_andnot_si128(odds, even), _mm_slli_epi64(odd, 32));
    high.part[p_] = (NativeU)_mm_or_si128(_mm_srli_epi64(even, 32), _mm_and_si128(odds, odd));
#endif
  }
#else
  GRADWIRE_EACH for (int i = 0; i < kWidth; ++i) {
    const std::uint64_t product = std::uint64_t(a.part[p_][i]) * m;
    high.part[p_][i] = std::uint32_t(product >> 32);
    low.part[p_][i] = std::uint32_t(product);
  }
#endif
}

static inline std::int64_t least(std::int64_t a, std::int64_t b) { return a < b ? a : b; }

}  // namespace gradwire::GRADWIRE_ISA
