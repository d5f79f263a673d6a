// Products of few_rows.h with a packed weight, whose bits are those of the plain weight: each sum is taken in its order.
//
// Of few rows of x the weight is unpacked in registers, on its way from memory. For more there are not enough of them: rows
// of the weight are unpacked into the first-level cache, where few_rows.h's tiles read them.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <utility>

#include "bf12/unpack.h"
#include "common/processor.h"
#include "linear/few_rows.h"

namespace dlinfer::bf12 {

// Of what is unpacked in registers. On Zen 4 hints into the second level, from farther on, take 0.75 of the time of those
// into the first for one row of x, and 0.63 for four.
constexpr Hints kZen5Hints{4 << 10, 3}, kHints{12 << 10, 2};

// The most rows of x for this kernel, all in one tile: their sums and the strip's numbers fill the registers.
constexpr int kPackedInputs = kLanes == 16 ? 4 : 1;

// sums[c * kBlockRows + r] += dot(row r of a strip, x row c) over `count` columns from `first` on, a multiple of kGroup
// both. from: where they lie. exceptions: those of the strip from there on.
template <Hints kFetched, int kInputs>
void packed_tile(const uint8_t* from, const Exponents& exponents, int64_t first, int64_t count, Exceptions exceptions,
                 const BFloat16* x, int64_t stride, float* sums) {
  using Op = Operands<BFloat16>;
  static_assert(Op::kStep == kShorts);
  Floats accumulators[kInputs * kStrip]{};

  // Of neighbours of all rows of the strip, numbers(row), and those of x beside them.
  const auto add = [&](const auto& numbers, const BFloat16* columns) __attribute__((always_inline)) {
    typename Op::Operand weight[kStrip];
#pragma GCC unroll 4
    for (int row = 0; row < kStrip; ++row) weight[row] = Op::of((Words)numbers(row));
#pragma GCC unroll 8
    for (int c = 0; c < kInputs; ++c) {
      const auto input = Op::load(columns + c * stride);
#pragma GCC unroll 4
      for (int row = 0; row < kStrip; ++row) {
        Floats& sum = accumulators[c * kStrip + row];
        sum = Op::dot(sum, weight[row], input);
      }
    }
  };

  Exception one;
  bool is_there = exceptions.next(first + count, one);
  for (int64_t at = 0; at < count; at += kGroup, from += kStrip * kGroupBytes) {
    const BFloat16* const columns = x + at;
#pragma GCC unroll 12
    for (int line = 0; line < kStrip * kGroupBytes; line += 64) fetch<kFetched>(from + line);
    const uint8_t* const group = from;
    if (is_there && one.column < first + at + kGroup) [[unlikely]] {
      uint16_t numbers[kStrip * kGroup];
      for (int row = 0; row < kStrip; ++row) unpack_group(from + row * kGroupBytes, exponents, numbers + row * kGroup);
      do {
        numbers[one.row * kGroup + one.column - first - at] = one.bits;
        is_there = exceptions.next(first + count, one);
      } while (is_there && one.column < first + at + kGroup);
      for (int i = 0; i < kGroup; i += kShorts) {
        add([&](int row) { return load_as<Shorts>(numbers + row * kGroup + i); }, columns + i);
      }
    } else {
      for_parts([&](auto part) __attribute__((always_inline)) {
        // Read again for each part: there are no registers to keep the shared numbers, and the compiler would try.
        const uint8_t* from = group;
        asm("" : "+r"(from));
        add([&](int row) __attribute__((always_inline)) {
          return unpack_part<part>(from + row * kGroupBytes, exponents);
        }, columns + part * kShorts);
      });
    }
  }
  add_sums<kStrip, kInputs>(accumulators, sums);
}

using PackedTile = void (*)(const uint8_t*, const Exponents&, int64_t, int64_t, Exceptions, const BFloat16*, int64_t,
                            float*);

template <Hints kFetched>
constexpr auto kPackedTiles = []<int... I>(std::integer_sequence<int, I...>) {
  return std::array<PackedTile, sizeof...(I)>{packed_tile<kFetched, I + 1>...};
}(std::make_integer_sequence<int, kPackedInputs>());

// As few_rows.h's PlainWeight, with blocks that begin at a multiple of kStrip.
class PackedWeight {
 public:
  using Type = BFloat16;

  explicit PackedWeight(const Matrix& matrix) : matrix_(matrix), exponents_(matrix.base()) {}

  int64_t rows() const { return matrix_.rows(); }
  int64_t bytes(int64_t rows) const { return rows * matrix_.strip_bytes() / kStrip; }
  const void* at(int64_t row) const { return matrix_.strip(row / kStrip); }

  void block_sums(int64_t first, int64_t count, Rows<const BFloat16> x, const void* next, float* sums) const {
    std::fill_n(sums, x.count * kBlockRows, 0.0f);
    if (x.count <= kPackedInputs && matrix_.columns() % kGroup == 0) {
      sums_in_registers(first, count, x, sums);
    } else {
      sums_in_cache(first, count, x, next, sums);
    }
  }

 private:
  static constexpr int64_t kChunk = kColumns<BFloat16>;
  static_assert(kChunk % kGroup == 0 && kBlockRows % kStrip == 0);

  void sums_in_registers(int64_t first, int64_t count, Rows<const BFloat16> x, float* sums) const {
    const auto& tiles = is_zen5_or_later() ? kPackedTiles<kZen5Hints> : kPackedTiles<kHints>;
    for (int64_t row = 0; row < count; row += kStrip) {
      const int64_t strip = (first + row) / kStrip;
      Exceptions exceptions = matrix_.exceptions(strip);
      for (int64_t column = 0; column < matrix_.columns(); column += kChunk) {
        const int64_t width = std::min(kChunk, matrix_.columns() - column);
        tiles[x.count - 1](matrix_.group(strip, column), exponents_, column, width, exceptions, x.data + column, x.stride,
                           sums + row);
        exceptions.skip(column + width);
      }
    }
  }

  // A region, a strip's rows and a chunk's columns, is unpacked and meets all rows of x. Meanwhile the region after the
  // next is prefetched: memory would be too late for the next.
  void sums_in_cache(int64_t first, int64_t count, Rows<const BFloat16> x, const void* next, float* sums) const {
    constexpr int64_t kStride = kChunk + kGroup / 4;
    alignas(64) uint16_t unpacked[kStrip * kStride];
    const int64_t strip = first / kStrip;
    for (int64_t column = 0; column < matrix_.columns(); column += kChunk) {
      const int64_t width = std::min(kChunk, matrix_.columns() - column);
      for (int64_t i = 0; i < strips(count); ++i) {
        Exceptions exceptions = matrix_.exceptions(strip + i);
        exceptions.skip(column);
        unpack_strip(matrix_.group(strip + i, column), exponents_, column, width, exceptions, unpacked, kStride);
        const Rows<const BFloat16> weight{reinterpret_cast<const BFloat16*>(unpacked), kStride, kStrip};
        const auto* const ahead = static_cast<const char*>(region(strip, strips(count), i + 2, column, next));
        multiply(weight, column, width, x, ahead, sums + i * kStrip);
      }
    }
  }

  // Where region `i` of a chunk begins, which may be one of the next chunk's, or of the next block's; null is nowhere.
  const void* region(int64_t strip, int64_t strips, int64_t i, int64_t column, const void* next) const {
    if (i < strips) return matrix_.group(strip + i, column);
    if (column + kChunk < matrix_.columns()) return matrix_.group(strip + std::min(i - strips, strips - 1), column + kChunk);
    return next ? static_cast<const uint8_t*>(next) + (i - strips) * matrix_.strip_bytes() : nullptr;
  }

  static void multiply(Rows<const BFloat16> weight, int64_t column, int64_t width, Rows<const BFloat16> x,
                       const char* fetched, float* sums) {
    constexpr int64_t kStep = Operands<BFloat16>::kStep;
    const int64_t most = tile_inputs(x.count), passes = (x.count + most - 1) / most;
    Ahead ahead{reinterpret_cast<const char*>(weight.data), 0};
    if (fetched) ahead = {fetched, kStep * kGroupBytes / kGroup};
    for (int64_t pass = 0, c = 0, next_c; pass < passes; ++pass, c = next_c) {
      next_c = (pass + 1) * x.count / passes;  // passes take about equally many
      const auto& tiles = kTiles<BFloat16, Asks::kAsTold>[next_c - c - 1];
      for (int64_t r = 0; r < weight.count; r += tiles.rows) {
        const int64_t told = touches(tiles.rows, pass, passes);
        tiles.full(weight.data + r * weight.stride, weight.stride, x.data + c * x.stride + column, x.stride, width,
                   ahead, told, sums + c * kBlockRows + r);
        ahead.line += told * (width / kStep) * ahead.step;
      }
    }
  }

  const Matrix& matrix_;
  const Exponents exponents_;
};

}  // namespace dlinfer::bf12
