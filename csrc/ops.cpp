#include "ops.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <functional>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>

#include "parallel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace gradwire {
namespace {

constexpr std::int64_t kShare = 1 << 18;          // elements that make a thread worth starting
constexpr std::int64_t kBeyondCaches = 1 << 22;   // elements from which results are written past the caches

bool runs(const char* name) {
  const std::string set = name;
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  const bool halves = __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);  // a name that not every compiler knows
  const bool avx2 = halves && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  if (set == "avx2") return avx2;
  if (set == "avx512")
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#endif
  return set == "portable";
}

const Kernels* const kAll[] = {
    &portable::kernels,
#if defined(__x86_64__)
    &avx2::kernels,
    &avx512::kernels,
#endif
};

const Kernels* best() {
  const Kernels* chosen = nullptr;
  for (const Kernels* k : kAll)
    if (runs(k->name)) chosen = k;
  return chosen;
}

std::atomic<const Kernels*>& in_use() {
  static std::atomic<const Kernels*> kernels{best()};
  return kernels;
}
const Kernels& kernels() { return *in_use().load(std::memory_order_relaxed); }

bool is_aligned(const void* p) { return reinterpret_cast<std::uintptr_t>(p) % 64 == 0; }

struct Scratch {
  explicit Scratch(std::int64_t floats)
      : memory(static_cast<float*>(std::aligned_alloc(64, (std::size_t(floats) * 4 + 127) / 64 * 64))) {
    if (!memory) throw std::bad_alloc();
  }
  ~Scratch() { std::free(memory); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  float* memory;
};

struct OwnedFound : Found {
  OwnedFound() = default;
  OwnedFound(const OwnedFound&) = delete;
  OwnedFound& operator=(const OwnedFound&) = delete;
  ~OwnedFound() {
    std::free(magnitudes);
    std::free(positions);
  }
};

// Every magnitude of at least `bound`, stretch by stretch in the order of the tensor.
struct Candidates {
  static constexpr std::int64_t kStretch = 1 << 20;  // elements
  std::vector<OwnedFound> stretches;
  std::int64_t size = 0;

  Candidates(const float* x, std::int64_t count, std::uint32_t bound, std::int64_t expected, int threads)
      : stretches(std::size_t((count + kStretch - 1) / kStretch)) {
    const std::int64_t room = std::int64_t(double(expected) / double(count) * double(kStretch) * 1.1) + 1024;
    parallel(std::int64_t(stretches.size()), threads, 1, 1, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t s = first; s < last; ++s) {
        auto& found = stretches[std::size_t(s)];
        if (!grow(found, room) ||
            !kernels().find(x, s * kStretch, std::min(count, (s + 1) * kStretch), bound, found))
          throw std::bad_alloc();
      }
    });
    for (const auto& found : stretches) size += found.size;
  }

  template <class Each>
  void visit(const Each& each) const {
    for (std::size_t s = 0; s < stretches.size(); ++s)
      for (std::int64_t i = 0; i < stretches[s].size; ++i)
        each(stretches[s].magnitudes[i], std::int64_t(s) * kStretch + stretches[s].positions[i]);
  }
};

std::uint32_t order(float x) {
  std::uint32_t b;
  std::memcpy(&b, &x, 4);
  return b & 0x7FFFFFFFu;
}

struct Guess {
  std::uint32_t bound;    // that some more than the wanted number of magnitudes reach
  std::int64_t expected;  // how many do
  bool tied;              // many magnitudes are the bound itself
};

// Guessed from a sample of whole cache lines.
Guess guess_bound(const float* x, std::int64_t count, std::int64_t wanted) {
  constexpr std::int64_t kLine = 16;
  const std::int64_t lines = std::min<std::int64_t>(4096, count / (4 * kLine));
  if (lines < 64) return {0, count, false};
  std::vector<std::uint32_t> sample(std::size_t(lines * kLine));
  const std::int64_t stride = count / kLine / lines * kLine;
  for (std::int64_t i = 0; i < lines; ++i)
    for (std::int64_t j = 0; j < kLine; ++j) sample[std::size_t(i * kLine + j)] = order(x[i * stride + j]);
  // Neighbours are alike, so a line counts for less than 16 draws; a wrong guess costs time, never the result.
  const double mean = double(wanted) / double(count) * double(sample.size());
  const std::size_t rank = std::size_t(mean + 8 * std::sqrt(mean) + 16);
  if (rank >= sample.size() * 3 / 4) return {0, count, false};
  std::nth_element(sample.begin(), sample.begin() + std::ptrdiff_t(rank), sample.end(), std::greater<>());
  const std::int64_t expected = std::int64_t(double(rank) / double(sample.size()) * double(count));
  const auto ties = std::count(sample.begin(), sample.end(), sample[rank]);
  return {sample[rank], expected, ties > std::ptrdiff_t(sample.size() / 32)};
}

// All candidates, which are above a bound, and the first elements at the bound, in order; false if those are too few.
bool take_ties(const float* x, std::int64_t count, std::uint32_t bound, const Candidates& above, std::int64_t wanted,
               std::int64_t* out) {
  constexpr std::int64_t kChunk = 1 << 16;
  const std::int64_t missing = wanted - above.size;
  std::vector<std::int64_t> ties;
  for (std::int64_t begin = 0; begin < count && std::int64_t(ties.size()) < missing; begin += kChunk) {
    OwnedFound found;
    if (!kernels().find(x, begin, std::min(count, begin + kChunk), bound, found)) throw std::bad_alloc();
    for (std::int64_t i = 0; i < found.size && std::int64_t(ties.size()) < missing; ++i)
      if (found.magnitudes[i] == bound) ties.push_back(begin + found.positions[i]);
  }
  if (std::int64_t(ties.size()) < missing) return false;
  auto next = ties.begin();
  above.visit([&](std::uint32_t, std::int64_t index) {
    while (next != ties.end() && *next < index) *out++ = *next++;
    *out++ = index;
  });
  std::copy(next, ties.end(), out);
  return true;
}

// A bound that is surely low enough, by counting the upper bits of everything.
std::uint32_t counted_bound(const float* x, std::int64_t count, std::int64_t wanted, int threads) {
  constexpr std::size_t kBins = 1 << 15;
  std::vector<std::int64_t> total(kBins);
  std::mutex guard;
  parallel(count, threads, 8 * kShare, 16, [&](std::int64_t begin, std::int64_t end) {
    std::vector<std::int64_t> counts(kBins);
    kernels().histogram(x, begin, end, counts.data());
    const std::lock_guard<std::mutex> lock(guard);
    std::transform(counts.begin(), counts.end(), total.begin(), total.begin(), std::plus<>());
  });
  std::int64_t reached = 0;
  for (std::size_t bin = kBins; bin-- > 0;)
    if ((reached += total[bin]) >= wanted) return std::uint32_t(bin << 16);
  return 0;
}

}  // namespace

bool grow(Found& found, std::int64_t at_least) {
  const std::int64_t capacity = std::max(at_least, found.capacity * 2);
  auto* magnitudes = static_cast<std::uint32_t*>(std::realloc(found.magnitudes, std::size_t(capacity) * 4));
  if (magnitudes) found.magnitudes = magnitudes;
  auto* positions = static_cast<std::uint32_t*>(std::realloc(found.positions, std::size_t(capacity) * 4));
  if (positions) found.positions = positions;
  if (!magnitudes || !positions) return false;
  found.capacity = capacity;
  return true;
}

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Kernels* k : kAll)
    if (runs(k->name)) names.emplace_back(k->name);
  return names;
}

std::string instruction_set() { return kernels().name; }

void use_instruction_set(const std::string& name) {
  for (const Kernels* k : kAll)
    if (name == k->name && runs(k->name)) {
      in_use() = k;
      return;
    }
  throw std::invalid_argument("this machine does not run '" + name + "'");
}

std::int64_t encode_blocks(Encode& a, int threads) {
  const std::int64_t group = a.format.kind == Kind::ternary ? 5 : 1, unit = a.format.block * group;
  a.streamed = a.rest && a.count >= kBeyondCaches && is_aligned(a.rest);
  std::atomic<std::int64_t> bad{0};
  // Shares start at whole bytes and cache lines of codes.
  parallel((a.count + unit - 1) / unit, threads, std::max<std::int64_t>(1, kShare / unit),
           std::max<std::int64_t>(1, 512 / a.format.block), [&](std::int64_t begin, std::int64_t end) {
             const Scratch scratch(4 * a.format.block + 64);
             bad += kernels().encode(a, begin, end, scratch.memory);
           });
  return bad;
}

void decode_blocks(Decode& a, int threads) {
  a.streamed = a.count >= kBeyondCaches && is_aligned(a.out);
  parallel((a.count + a.format.block - 1) / a.format.block, threads, std::max<std::int64_t>(1, kShare / a.format.block),
           std::max<std::int64_t>(1, 512 / a.format.block), [&](std::int64_t begin, std::int64_t end) {
             const Scratch scratch(a.format.block + 64);
             kernels().decode(a, begin, end, scratch.memory);
           });
}

std::int64_t accumulate(const float* x, const float* residual, float decay, float* e, std::int64_t count, int threads) {
  const bool streamed = e && count >= kBeyondCaches && is_aligned(e);
  std::atomic<std::int64_t> bad{0};
  parallel(count, threads, kShare, 64, [&](std::int64_t begin, std::int64_t end) {
    bad += kernels().accumulate(x, residual, decay, e, streamed, begin, end);
  });
  return bad;
}

std::int64_t divide(float* x, float by, std::int64_t count, int threads) {
  std::atomic<std::int64_t> bad{0};
  parallel(count, threads, kShare, 64,
           [&](std::int64_t begin, std::int64_t end) { bad += kernels().divide(x, by, begin, end); });
  return bad;
}

void clean(const float* x, float* e, std::int64_t count) { kernels().clean(x, e, count); }

void random_bits(const RandomKey& key, std::int64_t* out, std::int64_t count, int threads) {
  parallel(count, threads, kShare, 64,
           [&](std::int64_t begin, std::int64_t end) { kernels().random(key, out, begin, end); });
}

void pack_bits(const std::int64_t* codes, int bits, std::int64_t count, std::uint8_t* out) {
  kernels().pack(codes, bits, count, out);
}

void unpack_bits(const std::uint8_t* data, std::int64_t bytes, int bits, std::int64_t count, std::int64_t* out) {
  kernels().unpack(data, bytes, bits, count, out);
}

void select_top(const float* x, std::int64_t count, std::int64_t wanted, std::int64_t* out, int threads) {
  if (wanted <= 0) return;
  const Guess guess = guess_bound(x, count, wanted);
  // Without the ties, of which there may be as many as elements; the first ones are found faster than collected.
  auto candidates = std::make_unique<Candidates>(x, count, guess.bound + guess.tied, guess.expected, threads);
  if (guess.tied && candidates->size < wanted && take_ties(x, count, guess.bound, *candidates, wanted, out)) return;
  if (candidates->size < wanted) {
    candidates.reset();
    candidates = std::make_unique<Candidates>(x, count, counted_bound(x, count, wanted, threads), 2 * wanted, threads);
  }
  // The smallest magnitude that is kept, eleven or ten bits at a time from the top, and how many of its ties are.
  std::uint32_t smallest = 0;
  std::int64_t missing = wanted;
  for (int shift : {20, 10, 0}) {
    const int width = shift == 20 ? 11 : 10;
    std::vector<std::int64_t> counts(std::size_t{1} << width);
    const std::uint32_t prefix = smallest >> shift >> width;
    candidates->visit([&](std::uint32_t magnitude, std::int64_t) {
      if (magnitude >> shift >> width == prefix) ++counts[magnitude >> shift & ((1u << width) - 1)];
    });
    std::uint32_t bin = (1u << width) - 1;
    while (counts[bin] < missing) missing -= counts[bin--];
    smallest |= bin << shift;
  }
  candidates->visit([&](std::uint32_t magnitude, std::int64_t index) {
    if (magnitude > smallest || (magnitude == smallest && missing-- > 0)) *out++ = index;
  });
}

std::vector<std::int64_t> select_at_least(const float* x, std::int64_t count, float tau, int threads) {
  const Candidates candidates(x, count, order(tau), 0, threads);
  std::vector<std::int64_t> out;
  out.reserve(std::size_t(candidates.size));
  candidates.visit([&](std::uint32_t, std::int64_t index) { out.push_back(index); });
  return out;
}

void select_block_top(const float* x, std::int64_t count, std::int64_t each, std::int64_t block, std::int64_t* out,
                      int threads) {
  parallel((count + block - 1) / block, threads, std::max<std::int64_t>(1, kShare / block / 8), 1,
           [&](std::int64_t begin, std::int64_t end) {
             kernels().block_top(x, count, each, block, begin, end, out);
           });
}

void select_random(const RandomKey& key, std::int64_t total, std::int64_t count, std::int64_t* out, int threads) {
  const std::int64_t each = total / count, longer = total % count;
  parallel(count, threads, kShare, 64, [&](std::int64_t begin, std::int64_t end) {
    kernels().random(key, out, begin, end);
    for (std::int64_t p = begin; p < end; ++p) {
      const std::int64_t start = p * each + std::min(p, longer), length = each + (p < longer);
      out[p] = start + ((out[p] * length) >> 32);
    }
  });
}

void scatter(float* out, std::int64_t count, const std::int64_t* indices, const float* values, std::int64_t n, bool add) {
  constexpr std::int64_t kAhead = 32;
  for (std::int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(out + indices[i + kAhead], 1);
    const std::int64_t at = indices[i];
    if (at < 0 || at >= count) throw std::out_of_range("an index is outside of the tensor");
    out[at] = add ? out[at] + values[i] : values[i];
  }
}

void gather(const float* x, std::int64_t count, const std::int64_t* indices, float* values, std::int64_t n) {
  constexpr std::int64_t kAhead = 32;
  for (std::int64_t i = 0; i < n; ++i) {
    if (i + kAhead < n) __builtin_prefetch(x + indices[i + kAhead]);
    const std::int64_t at = indices[i];
    if (at < 0 || at >= count) throw std::out_of_range("an index is outside of the tensor");
    values[i] = x[at];
  }
}

void pack_indices(const std::int64_t* indices, std::int64_t n, std::int64_t total, int width, std::uint8_t* out) {
  const std::int64_t upper_bits = n + ((total - n) >> width), upper_bytes = (upper_bits + 7) / 8;
  std::memset(out, 0, std::size_t(upper_bytes));
  std::vector<std::int64_t> lower(std::size_t(std::min<std::int64_t>(n, 4096)));
  std::uint8_t* low = out + upper_bytes;
  for (std::int64_t first = 0; first < n; first += 4096) {
    const std::int64_t stop = std::min(n, first + 4096);
    for (std::int64_t i = first; i < stop; ++i) {
      const std::int64_t v = indices[i] - i, at = (v >> width) + i;
      if (v < 0 || at >= upper_bits) throw std::out_of_range("indices must be sorted, distinct and below the total");
      out[at >> 3] = std::uint8_t(out[at >> 3] | 1u << (at & 7));
      lower[std::size_t(i - first)] = v;
    }
    kernels().pack(lower.data(), width, stop - first, low);
    low += (stop - first) * width / 8;  // 4096 codes of any width fill whole bytes
  }
}

std::int64_t unpack_indices(const std::uint8_t* data, std::int64_t total, std::int64_t n, int width,
                            std::int64_t* out) {
  const std::int64_t upper_bits = n + ((total - n) >> width), upper_bytes = (upper_bits + 7) / 8;
  const std::int64_t lower_bytes = (n * width + 7) / 8;
  kernels().unpack(data + upper_bytes, lower_bytes, width, n, out);
  std::int64_t rank = 0;
  for (std::int64_t first = 0; first < upper_bytes; first += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, data + first, std::size_t(std::min<std::int64_t>(8, upper_bytes - first)));
    if (upper_bits - 8 * first < 64) word &= (std::uint64_t{1} << (upper_bits - 8 * first)) - 1;
    for (; word; word &= word - 1, ++rank)
      if (rank < n) out[rank] |= (8 * first + __builtin_ctzll(word) - rank) << width;
  }
  if (rank != n) return rank;
  std::int64_t before = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    if (out[i] < before || out[i] > total - n) return -1;
    before = out[i];
    out[i] += i;
  }
  return n;
}

void rotate(const RandomKey& key, const float* x, std::int64_t count, std::int64_t block, bool inverse, float limit,
            float factor, float* out, int threads) {
  parallel((count + block - 1) / block, threads, std::max<std::int64_t>(1, kShare / block / 4), 1,
           [&](std::int64_t begin, std::int64_t end) {
             const Scratch scratch(block);
             kernels().rotate(key, x, count, block, inverse, limit, factor, out, begin, end, scratch.memory);
           });
}

void products(Product what, const std::vector<Matrix>& matrices, int threads) {
  // Large matrices are divided over the threads one after another; small ones are handed out whole.
  std::vector<const Matrix*> small;
  for (const Matrix& m : matrices) {
    if (m.rows * m.columns < 2 * kShare) {
      small.push_back(&m);
      continue;
    }
    const bool by_column = what == Product::thin_transposed;
    const std::int64_t units = by_column ? m.columns : m.rows, size = m.rows * m.columns / units;
    const bool streamed = m.rows * m.columns >= kBeyondCaches && m.columns % 16 == 0 && is_aligned(m.out);
    // Strips of columns are read row by row: narrow ones would read the matrix in scraps.
    const std::int64_t least = by_column ? std::min<std::int64_t>(1024, m.columns / std::max(threads, 1)) : 1;
    parallel(units, threads, std::max(least, kShare / size), 16,
             [&](std::int64_t begin, std::int64_t end) {
               if (what == Product::thin) kernels().thin(m, begin, end);
               if (what == Product::thin_transposed) kernels().thin_transposed(m, begin, end);
               if (what == Product::outer) kernels().outer(m, streamed, begin, end);
               if (what == Product::mean) kernels().mean(m, begin, end);
             });
  }
  std::int64_t elements = 1;
  for (const Matrix* m : small) elements += m->rows * m->columns;
  const std::int64_t several = std::max<std::int64_t>(1, kShare * std::int64_t(small.size()) / elements);
  parallel(std::int64_t(small.size()), threads, several, 1, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const Matrix& m = *small[std::size_t(i)];
      if (what == Product::thin) kernels().thin(m, 0, m.rows);
      if (what == Product::thin_transposed) kernels().thin_transposed(m, 0, m.columns);
      if (what == Product::outer) kernels().outer(m, false, 0, m.rows);
      if (what == Product::mean) kernels().mean(m, 0, m.rows);
    }
  });
}

void orthogonalize(const Factor& factor, double shift, double least) {
  // Cholesky's decomposition of the Gram matrix, twice: the second time mends what the first one rounds off.
  const std::int64_t n = factor.rows;
  const int r = factor.rank;
  const std::size_t size = std::size_t(r) * std::size_t(r);
  std::vector<double> w(std::size_t(n) * std::size_t(r)), gram(size), upper(size), row(static_cast<std::size_t>(r));
  for (std::size_t i = 0; i < w.size(); ++i) w[i] = double(factor.in[i]);
  for (int round = 0; round < 2; ++round) {
    std::fill(gram.begin(), gram.end(), 0.0);
    for (std::int64_t i = 0; i < n; ++i) {
      const double* from = w.data() + i * r;
      for (int a = 0; a < r; ++a) {
        double* sums = gram.data() + a * r;
        for (int b = 0; b < r; ++b) sums[b] += from[a] * from[b];
      }
    }
    double trace = 0.0;
    for (int a = 0; a < r; ++a) trace += gram[std::size_t(a * r + a)];
    for (int a = 0; a < r; ++a) gram[std::size_t(a * r + a)] += shift * trace + least;
    // gram = L L^T, L in the lower half.
    for (int a = 0; a < r; ++a)
      for (int b = 0; b <= a; ++b) {
        double sum = gram[std::size_t(a * r + b)];
        for (int k = 0; k < b; ++k) sum -= gram[std::size_t(a * r + k)] * gram[std::size_t(b * r + k)];
        gram[std::size_t(a * r + b)] = a == b ? std::sqrt(sum) : sum / gram[std::size_t(b * r + b)];
      }
    // The inverse of L, transposed: row k, column a.
    std::fill(upper.begin(), upper.end(), 0.0);
    for (int k = 0; k < r; ++k)
      for (int a = k; a < r; ++a) {
        double sum = a == k ? 1.0 : 0.0;
        for (int b = k; b < a; ++b) sum -= gram[std::size_t(a * r + b)] * upper[std::size_t(k * r + b)];
        upper[std::size_t(k * r + a)] = sum / gram[std::size_t(a * r + a)];
      }
    for (std::int64_t i = 0; i < n; ++i) {
      double* to = w.data() + i * r;
      std::fill(row.begin(), row.end(), 0.0);
      for (int k = 0; k < r; ++k)
        for (int a = 0; a < r; ++a) row[std::size_t(a)] += to[k] * upper[std::size_t(k * r + a)];
      std::copy(row.begin(), row.end(), to);
    }
  }
  for (std::size_t i = 0; i < w.size(); ++i) factor.out[i] = float(w[i]);
}

}  // namespace gradwire
