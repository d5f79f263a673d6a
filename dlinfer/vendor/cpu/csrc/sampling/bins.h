// The numbers of a span in many bins at once: how many fall into each, and what they weigh.
#pragma once

#include <vector>

#include "sampling/measure.h"

namespace dlinfer::sampling {

constexpr int kBins = 512;
constexpr int64_t kPart = 32;  // blocks that are put into bins of their own, which then are added up

using Ints = int32_t __attribute__((vector_size(kLanes * sizeof(float))));

struct Span {
  float low, high;  // both belong to it

  Words holds(Floats x) const { return (Words)(x >= all_lanes(low)) & (Words)(x <= all_lanes(high)); }
};

// Bin 0 has the largest numbers. The larger of two numbers is never in a later bin, since every rounding here keeps
// order: so the numbers of a bin are a span again.
struct Bins {
  Span span;
  float factor;

  // of: from a number to a larger one.
  explicit Bins(Span of) : span(of) {
    const double exact = (kBins - 1) / (double(of.high) - of.low);
    factor = float(std::min(exact, double(std::numeric_limits<float>::max())));
  }

  Ints of(Floats x) const { return __builtin_convertvector((all_lanes(span.high) - x) * all_lanes(factor), Ints); }
};

// Appends the lanes of x that a mask has to `to`, which has room for all of them; says how many they are.
inline int append(float* to, Floats x, Words mask) {
#if defined(__AVX512F__)
  const __mmask16 chosen = _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(chosen, (__m512)x));  // to memory itself it is slow on Zen 4
  return __builtin_popcount(chosen);
#else
  int count = 0;
  for (int lane = 0; lane < kLanes; ++lane) {
    to[count] = x[lane];
    count += mask[lane] & 1;
  }
  return count;
#endif
}

// Adds a block's numbers. Roofline: a number in the span takes an addition to memory, some three cycles. The others are
// passed over in registers, without a branch, which would be predicted wrong for half of them.
template <class T>
void put_block(const T* block, int64_t size, float largest, const Bins& bins, Amount* amounts) {
  float inside[kBlock + kLanes];
  int64_t count = 0;
  for (int64_t i = 0; i < size; i += kLanes) {
    const Floats x = wide_part(block, i, size);
    count += append(inside + count, x, bins.span.holds(x));
  }
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats x = wide_part(inside, i, count);
    int32_t bin[kLanes];
    float e[kLanes];
    const Ints which = bins.of(x);
    const Floats weights = exp_of_negative(x - all_lanes(largest));
    std::memcpy(bin, &which, sizeof bin);
    std::memcpy(e, &weights, sizeof e);
    for (int lane = 0; lane < std::min<int64_t>(kLanes, count - i); ++lane) amounts[bin[lane]] += {1, e[lane]};
  }
}

template <class T>
std::vector<Amount> put_into(const Bins& bins, const Row<T>& row, float largest) {
  const int64_t parts = (row.blocks() + kPart - 1) / kPart;
  std::vector<Amount> amounts(parts * kBins);
  parallel_for(0, parts, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin * kPart; i < std::min(row.blocks(), end * kPart); ++i) {
      if (row.tops[i] < bins.span.low) continue;
      put_block(row.block(i), row.size(i), largest, bins, amounts.data() + i / kPart * kBins);
    }
  });
  for (int64_t i = kBins; i < int64_t(amounts.size()); ++i) amounts[i % kBins] += amounts[i];
  amounts.resize(kBins);
  return amounts;
}

// From the smallest to the largest number in a bin that has some.
template <class T>
Span extent(const Bins& bins, int bin, const Row<T>& row) {
  Floats low = all_lanes(kInfinity), high = all_lanes(-kInfinity);
  for (int64_t block = 0; block < row.blocks(); ++block) {
    if (row.tops[block] < bins.span.low) continue;
    const T* const from = row.block(block);
    const int64_t size = row.size(block);
    for (int64_t i = 0; i < size; i += kLanes) {
      const Floats x = wide_part(from, i, size);
      const auto in = (bins.span.holds(x) & (Words)(bins.of(x) == bin)) != 0;
      low = in && x < low ? x : low;
      high = in && x > high ? x : high;
    }
  }
  Span found{low[0], high[0]};
  for (int lane = 1; lane < kLanes; ++lane) {
    found = {std::min(found.low, low[lane]), std::max(found.high, high[lane])};
  }
  return found;
}

}  // namespace dlinfer::sampling
