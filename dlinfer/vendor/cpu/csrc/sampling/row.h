// A row of logits in blocks, and the largest number of each: what lies below a threshold is passed over block by block.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "common/exponential.h"

namespace dlinfer::sampling {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

constexpr int64_t kBlock = 512;  // elements; as float32 they take 2 KB
constexpr int64_t kGroup = 8;    // blocks that one thread does in a row

template <class T>
struct Row {
  const T* data;
  int64_t count;
  const float* tops;  // of each block its largest number; NaN where it holds one

  int64_t blocks() const { return (count + kBlock - 1) / kBlock; }
  int64_t groups() const { return (blocks() + kGroup - 1) / kGroup; }
  const T* block(int64_t i) const { return data + i * kBlock; }
  int64_t size(int64_t i) const { return std::min(kBlock, count - i * kBlock); }
};

// kLanes numbers from place i of a block, and -inf behind its end.
template <class T>
inline Floats wide_part(const T* block, int64_t i, int64_t size) {
  if (i + kLanes <= size) return widen(block + i);
  Floats wide = all_lanes(-kInfinity);
  for (int lane = 0; i + lane < size; ++lane) wide[lane] = float(block[i + lane]);
  return wide;
}

inline bool any(Words mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  uint32_t all = 0;
  for (int lane = 0; lane < kLanes; ++lane) all |= mask[lane];
  return all != 0;
#endif
}

// The largest number of a block; NaN where it holds one.
template <class T>
float top_of(const T* block, int64_t size) {
  Floats best = all_lanes(-kInfinity);
  Words odd{};
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats x = wide_part(block, i, size);
    odd |= (Words)(x != x);
    best = larger(x, best);
  }
  if (any(odd)) return std::numeric_limits<float>::quiet_NaN();
  float top = best[0];
  for (int lane = 1; lane < kLanes; ++lane) top = std::max(top, best[lane]);
  return top;
}

// The largest number of a row and the first place that has it; NaN counts as the largest, as in torch.
struct Largest {
  float value;
  int64_t token;
};

template <class T>
Largest largest_of(const Row<T>& row) {
  int64_t block = 0;
  for (int64_t i = 0; i < row.blocks(); ++i) {
    if (std::isnan(row.tops[i])) {
      block = i;
      break;
    }
    if (row.tops[i] > row.tops[block]) block = i;
  }
  const float value = row.tops[block];
  const T* const from = row.block(block);
  int64_t i = 0;
  while (std::isnan(value) ? !std::isnan(float(from[i])) : float(from[i]) != value) ++i;
  return {value, block * kBlock + i};
}

}  // namespace dlinfer::sampling
