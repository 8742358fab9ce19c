// Products of a matrix with a thin one. The matrix is read once; everything else stays in the caches. Sums are in no
// particular order and may be fused: these are the ops that promise a tolerance, not bytes.
#pragma once

#include "blocks.h"
#include "kernels.h"
#include "simd.h"

namespace gradwire::GRADWIRE_ISA {

constexpr int kRowTile = kWidth == 16 ? 6 : 2;
constexpr int kRankTile = kWidth == 4 ? 2 : 4;
constexpr std::int64_t kColumnTile = 2048;

template <int kRows, int kRanks>
static inline void thin_tile(const Matrix& a, std::int64_t row, int rank, std::int64_t first, std::int64_t stop) {
  F sum[kRows][kRanks];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
    for (int r = 0; r < kRanks; ++r) sum[i][r] = all(0.0f);
  const auto step = [&](std::int64_t j, auto fetch) GRADWIRE_LAMBDA {
    F q[kRanks];
#pragma GCC unroll 16
    for (int r = 0; r < kRanks; ++r) q[r] = fetch(a.right + (rank + r) * a.columns + j);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const F m = fetch(a.m + (row + i) * a.columns + j);
      // Rows lie pages apart, where the machine does not look ahead by itself.
      __builtin_prefetch(a.m + (row + i + kRows) * a.columns + j, 0, 2);
#pragma GCC unroll 16
      for (int r = 0; r < kRanks; ++r) sum[i][r] = multiply_add(m, q[r], sum[i][r]);
    }
  };
  std::int64_t j = first;
  for (; j + kLanes <= stop; j += kLanes) step(j, [](const float* p) { return load(p); });
  if (j < stop) step(j, [&](const float* p) { return load_some(p, stop - j); });
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
    for (int r = 0; r < kRanks; ++r) a.out[(row + i) * a.rank + rank + r] += fold(sum[i][r]);
}

template <int kRows>
static inline void thin_rows(const Matrix& a, std::int64_t row) {
  if (a.x) {
    float* m = const_cast<float*>(a.m);
    const std::int64_t end = (row + kRows) * a.columns;
    for (std::int64_t i = row * a.columns; i < end; i += kLanes)
      store_some(m + i, load_some(a.x + i, end - i) + load_some(a.residual + i, end - i), end - i);
  }
  for (std::int64_t i = row * a.rank; i < (row + kRows) * a.rank; ++i) a.out[i] = 0.0f;
  for (std::int64_t first = 0; first < a.columns; first += kColumnTile) {
    const std::int64_t stop = least(a.columns, first + kColumnTile);
    int rank = 0;
    for (; rank + kRankTile <= a.rank; rank += kRankTile) thin_tile<kRows, kRankTile>(a, row, rank, first, stop);
    for (; rank < a.rank; ++rank) thin_tile<kRows, 1>(a, row, rank, first, stop);
  }
}

static void thin_range(const Matrix& a, std::int64_t begin, std::int64_t end) {
  std::int64_t row = begin;
  for (; row + kRowTile <= end; row += kRowTile) thin_rows<kRowTile>(a, row);
  for (; row < end; ++row) thin_rows<1>(a, row);
}

// Adds kRows rows of M, each times its row of P, to kRanks rows of the transposed result (rank x columns).
template <int kRows, int kRanks>
static inline void transposed_tile(const Matrix& a, std::int64_t row, int rank, std::int64_t first, std::int64_t stop) {
  const float* m = a.m + row * a.columns;
  float* out = a.out + rank * a.columns;
  F p[kRows][kRanks];
#pragma GCC unroll 16
  for (int i = 0; i < kRows; ++i)
#pragma GCC unroll 16
    for (int r = 0; r < kRanks; ++r) p[i][r] = all(a.left[(row + i) * a.rank + rank + r]);
  const auto step = [&](std::int64_t j, std::int64_t left) GRADWIRE_LAMBDA {
    F sum[kRanks];
#pragma GCC unroll 16
    for (int r = 0; r < kRanks; ++r) sum[r] = load_some(out + r * a.columns + j, left);
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const F v = load_some(m + i * a.columns + j, left);
      __builtin_prefetch(m + (i + kRows) * a.columns + j, 0, 2);
#pragma GCC unroll 16
      for (int r = 0; r < kRanks; ++r) sum[r] = multiply_add(v, p[i][r], sum[r]);
    }
#pragma GCC unroll 16
    for (int r = 0; r < kRanks; ++r) store_some(out + r * a.columns + j, sum[r], left);
  };
  std::int64_t j = first;
  for (; j + kLanes <= stop; j += kLanes) step(j, std::int64_t{kLanes});
  if (j < stop) step(j, stop - j);
}

template <int kRows>
static inline void transposed_rows(const Matrix& a, std::int64_t row, std::int64_t first, std::int64_t stop) {
  int rank = 0;
  for (; rank + kRankTile <= a.rank; rank += kRankTile) transposed_tile<kRows, kRankTile>(a, row, rank, first, stop);
  for (; rank < a.rank; ++rank) transposed_tile<kRows, 1>(a, row, rank, first, stop);
}

static void thin_transposed_range(const Matrix& a, std::int64_t begin, std::int64_t end) {
  // The columns of a tile, times the rank, stay in the first-level cache while all rows pass.
  const std::int64_t tile = a.rank <= 4 ? 2048 : a.rank <= 16 ? 512 : 256;
  for (std::int64_t first = begin; first < end; first += tile) {
    const std::int64_t stop = least(end, first + tile);
    for (int r = 0; r < a.rank; ++r) std::memset(a.out + r * a.columns + first, 0, std::size_t(stop - first) * 4);
    std::int64_t row = 0;
    for (; row + kRowTile <= a.rows; row += kRowTile) transposed_rows<kRowTile>(a, row, first, stop);
    for (; row < a.rows; ++row) transposed_rows<1>(a, row, first, stop);
  }
}

template <int kRows>
static inline void outer_rows(const Matrix& a, bool streamed, std::int64_t row) {
  const float* p = a.left + row * a.rank;
  for (std::int64_t j = 0; j < a.columns; j += kLanes) {
    const std::int64_t n = a.columns - j;
    F sum[kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) sum[i] = load_some(a.m + (row + i) * a.columns + j, n);
    for (int r = 0; r < a.rank; ++r) {
      const F q = load_some(a.right + r * a.columns + j, n);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) sum[i] = multiply_add(all(-p[i * a.rank + r]), q, sum[i]);
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      float* out = a.out + (row + i) * a.columns + j;
      if (streamed)
        stream(out, sum[i]);
      else
        store_some(out, sum[i], n);
    }
  }
}

static void outer_range(const Matrix& a, bool streamed, std::int64_t begin, std::int64_t end) {
  std::int64_t row = begin;
  for (; row + 4 <= end; row += 4) outer_rows<4>(a, streamed, row);
  for (; row < end; ++row) outer_rows<1>(a, streamed, row);
  if (streamed) end_of_streams();
}

// out = P Q^T, m -= out. A product at a time, in the order of the rank and never fused: the mean must be the same on
// every machine.
template <int kRows>
static inline void mean_rows(const Matrix& a, std::int64_t row) {
  const float* p = a.left + row * a.rank;
  float* e = const_cast<float*>(a.m);
  for (std::int64_t j = 0; j < a.columns; j += kLanes) {
    const std::int64_t n = a.columns - j;
    F sum[kRows];
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) sum[i] = all(0.0f);
    for (int r = 0; r < a.rank; ++r) {
      const F q = load_some(a.right + r * a.columns + j, n);
#pragma GCC unroll 16
      for (int i = 0; i < kRows; ++i) sum[i] = sum[i] + all(p[i * a.rank + r]) * q;
    }
#pragma GCC unroll 16
    for (int i = 0; i < kRows; ++i) {
      const std::int64_t at = (row + i) * a.columns + j;
      store_some(e + at, load_some(e + at, n) - sum[i], n);
      store_some(a.out + at, sum[i], n);
    }
  }
}

static void mean_range(const Matrix& a, std::int64_t begin, std::int64_t end) {
  std::int64_t row = begin;
  for (; row + 4 <= end; row += 4) mean_rows<4>(a, row);
  for (; row < end; ++row) mean_rows<1>(a, row);
}

}  // namespace gradwire::GRADWIRE_ISA
