#include "crc32.h"

#include <array>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#define GRADWIRE_X86 1
#include <immintrin.h>
#endif

namespace gradwire {
namespace {

constexpr std::uint32_t kPolynomial = 0xEDB88320u;  // reflected

using Tables = std::array<std::array<std::uint32_t, 256>, 8>;

constexpr Tables make_tables() {
  Tables t{};
  for (std::uint32_t i = 0; i < 256; ++i) {
    std::uint32_t c = i;
    for (int bit = 0; bit < 8; ++bit) c = (c >> 1) ^ ((c & 1) ? kPolynomial : 0);
    t[0][i] = c;
  }
  for (std::size_t s = 1; s < 8; ++s)
    for (std::uint32_t i = 0; i < 256; ++i) t[s][i] = (t[s - 1][i] >> 8) ^ t[0][t[s - 1][i] & 0xFF];
  return t;
}

constexpr Tables kTables = make_tables();

// Eight bytes a turn, by table. `crc` is the inverted register in and out.
std::uint32_t by_table(std::uint32_t crc, const unsigned char* p, std::size_t n) {
  for (; n >= 8; n -= 8, p += 8) {
    const std::uint32_t lo = crc ^ (std::uint32_t(p[0]) | std::uint32_t(p[1]) << 8 | std::uint32_t(p[2]) << 16 |
                                    std::uint32_t(p[3]) << 24);
    crc = kTables[7][lo & 0xFF] ^ kTables[6][(lo >> 8) & 0xFF] ^ kTables[5][(lo >> 16) & 0xFF] ^
          kTables[4][lo >> 24] ^ kTables[3][p[4]] ^ kTables[2][p[5]] ^ kTables[1][p[6]] ^ kTables[0][p[7]];
  }
  for (; n; --n, ++p) crc = (crc >> 8) ^ kTables[0][(crc ^ *p) & 0xFF];
  return crc;
}

#ifdef GRADWIRE_X86
// Folds 64 bytes a turn with carry-less products (Gopal et al., "Fast CRC computation for generic polynomials
// using PCLMULQDQ", 2009). Needs n >= 64 and n % 16 == 0. The constants are x^k mod P, reflected, for the fold
// distances 512 + 64, 512, 128 + 64, 128 and 64 bits, then Barrett's P and floor(x^64 / P).
__attribute__((target("pclmul,sse4.1"))) __m128i fold(__m128i acc, __m128i next, __m128i k) {
  const __m128i lo = _mm_clmulepi64_si128(acc, k, 0x00);
  const __m128i hi = _mm_clmulepi64_si128(acc, k, 0x11);
  return _mm_xor_si128(_mm_xor_si128(lo, hi), next);
}

__attribute__((target("pclmul,sse4.1"))) std::uint32_t by_folding(std::uint32_t crc, const unsigned char* p,
                                                                  std::size_t n) {
  const auto load = [](const unsigned char* q) __attribute__((target("pclmul,sse4.1"))) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(q));
  };
  const __m128i k_512 = _mm_set_epi64x(0x01c6e41596, 0x0154442bd4);
  const __m128i k_128 = _mm_set_epi64x(0x00ccaa009e, 0x01751997d0);
  const __m128i k_64 = _mm_set_epi64x(0, 0x0163cd6124);
  const __m128i barrett = _mm_set_epi64x(0x01f7011641, 0x01db710641);
  const __m128i mask32 = _mm_setr_epi32(~0, 0, ~0, 0);

  __m128i x0 = _mm_xor_si128(load(p), _mm_cvtsi32_si128(static_cast<int>(crc)));
  __m128i x1 = load(p + 16), x2 = load(p + 32), x3 = load(p + 48);
  for (p += 64, n -= 64; n >= 64; p += 64, n -= 64) {
    x0 = fold(x0, load(p), k_512);
    x1 = fold(x1, load(p + 16), k_512);
    x2 = fold(x2, load(p + 32), k_512);
    x3 = fold(x3, load(p + 48), k_512);
  }
  x0 = fold(x0, x1, k_128);
  x0 = fold(x0, x2, k_128);
  x0 = fold(x0, x3, k_128);
  for (; n >= 16; p += 16, n -= 16) x0 = fold(x0, load(p), k_128);

  // 128 -> 64 -> 32 bits.
  x1 = _mm_clmulepi64_si128(x0, k_128, 0x10);
  x0 = _mm_xor_si128(_mm_srli_si128(x0, 8), x1);
  x1 = _mm_clmulepi64_si128(_mm_and_si128(x0, mask32), k_64, 0x00);
  x0 = _mm_xor_si128(_mm_srli_si128(x0, 4), x1);
  x1 = _mm_clmulepi64_si128(_mm_and_si128(x0, mask32), barrett, 0x10);
  x1 = _mm_clmulepi64_si128(_mm_and_si128(x1, mask32), barrett, 0x00);
  return static_cast<std::uint32_t>(_mm_extract_epi32(_mm_xor_si128(x0, x1), 1));
}
#endif

}  // namespace

std::uint32_t crc32(std::uint32_t crc, const unsigned char* data, std::size_t size) {
  crc = ~crc;
#ifdef GRADWIRE_X86
  static const bool folds = __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
  if (folds && size >= 64) {
    const std::size_t head = size & ~std::size_t{15};
    crc = by_folding(crc, data, head);
    data += head;
    size -= head;
  }
#endif
  return ~by_table(crc, data, size);
}

}  // namespace gradwire
