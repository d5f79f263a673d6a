// A block's sums by AVX512-BF16, without AMX.
//
// A lane is a row of x. Each pair of neighbours in a row of the weight is broadcast to all lanes, and multiplied with
// 16 or 32 rows of packed x. So no sum is added up over lanes, and a row of x has the same bits in any lane.
//
// A third of the block has sums in 22 of the 32 registers. Alone it runs at 0.98 of the peak on Zen 4, and in a whole
// product of 512 rows at 0.92, where writing the results takes 3 % of the time.
#pragma once

#include "tiles/block.h"

#if defined(DLINFER_HAS_PANELS) && !defined(DLINFER_HAS_TILES)

#include <algorithm>
#include <cstdint>

#include "common/lanes.h"

namespace dlinfer::tiles {

// kRows rows of the weight times 16 * kTiles rows of x: sums[r * kPanel + c] (+)= dot(weight row first + r, x row c).
template <int kRows, int kTiles>
__attribute__((noinline)) void strip_sums(const Factors& of, int64_t first, bool add, Rows<const Byte> ahead,
                                          Rows<Byte> out, float* sums) {
  Floats found[kRows][kTiles];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; ++t) {
      found[r][t] = add ? load_as<Floats>(sums + r * kPanel + t * kTile) : Floats{};
    }
  }
  const int64_t stride = of.weight_stride;
  const Byte* weight = of.weight + first * stride;
  const Byte* x = of.x;
  for (int64_t step = 0; step < of.steps; ++step) {
    for (int64_t r = 0; r < ahead.count; ++r) {
      __builtin_prefetch(ahead.data + r * ahead.stride + step * kWidth, 0, 2);
    }
    if (step < out.count) __builtin_prefetch(out.data + step * out.stride, 1, 3);
#pragma GCC unroll 2
    for (int word = 0; word < kTile; ++word, x += kWidth, weight += 4) {
      __m512bh own[kTiles];
#pragma GCC unroll 2
      for (int t = 0; t < kTiles; ++t) own[t] = load_as<__m512bh>(x + t * of.x_next);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const __m512bh pair = (__m512bh)_mm512_set1_epi32(load_as<int32_t>(weight + r * stride));
#pragma GCC unroll 2
        for (int t = 0; t < kTiles; ++t) {
          found[r][t] = (Floats)_mm512_dpbf16_ps((__m512)found[r][t], own[t], pair);
        }
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int t = 0; t < kTiles; ++t) {
      _mm512_store_ps(sums + r * kPanel + t * kTile, (__m512)found[r][t]);
    }
  }
}

// A block: sums[r * kPanel + c] (+)= dot(weight row r, x row c) over its columns, c < 16 * kTiles. The block before it
// is finished first. Meanwhile two things are prefetched: the rows of `ahead`, as long as these, and the memory of
// `out`, where this block will be written.
template <Type kType, int kTiles, class Finish>
void block_sums(const Factors& of, bool add, Rows<const Byte> ahead, Rows<Byte> out, Finish& finish, float* sums) {
  static_assert(kType == Type::kBFloat16);
  constexpr int kRows = kPanel / 3 + 1, kLast = kPanel - 2 * kRows;
  while (finish.pending()) finish.advance();
  const auto third = [](auto rows, int64_t part) {
    const int64_t begin = rows.count * part / 3, end = rows.count * (part + 1) / 3;
    rows.data += begin * rows.stride;
    rows.count = end - begin;
    return rows;
  };
  strip_sums<kRows, kTiles>(of, 0, add, third(ahead, 0), third(out, 0), sums);
  strip_sums<kRows, kTiles>(of, kRows, add, third(ahead, 1), third(out, 1), sums + kRows * kPanel);
  strip_sums<kLast, kTiles>(of, 2 * kRows, add, third(ahead, 2), third(out, 2), sums + 2 * kRows * kPanel);
}

}  // namespace dlinfer::tiles

#endif
