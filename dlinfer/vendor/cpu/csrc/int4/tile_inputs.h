// A strip of a weight of 4 bits times many rows of x, with the matrix instructions of AMX.
//
// A widened strip is a tile's right operand as it is: each register of the panel has 16 columns' words, and 16 such
// registers are a tile. Left stand 16 rows of x. x is bfloat16 with PairTiles, and rounded to int8 with RoundedTiles.
//
// Roofline: 16 multiplications of tiles take 256 cycles, and the 64 registers of sums that they give take as long to be
// scaled and added. So a strip's sums are added while the next ones are multiplied.
#pragma once

#include "common/tile_registers.h"

#if defined(DLINFER_HAS_TILES) && defined(__AMX_INT8__)
#define DLINFER_HAS_INT4_TILES 1

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>
#include <vector>

#include "int4/layer.h"
#include "int4/rounded.h"
#include "threads/team.h"

namespace dlinfer::int4 {

// Rows of x strip by strip: in each strip the rows follow each other, filled up with zeros to whole tiles.
template <class Tiles>
class TileInputs {
 public:
  static constexpr int64_t kTileBytes = 64;        // of a row
  static constexpr int64_t kMostRows = 2 * kTile;  // that are multiplied at once

  TileInputs(const Layer& layer, int64_t count)
      : count(count),
        strips(layer.strips()),
        rows(kMostRows),
        whole_rows_((count + kTile - 1) / kTile * kTile),
        sums_(count * strips * int64_t(sizeof(float))),
        scales_(count * strips * int64_t(sizeof(float))) {
    begins_.reserve(strips + 1);
    begins_.push_back(0);
    for (int64_t strip = 0; strip < strips; ++strip) begins_.push_back(begins_.back() + steps(span_of(layer, strip)));
    numbers_.emplace(begins_.back() * whole_rows_ * kTileBytes);
  }

  // Tiles along a strip.
  static int64_t steps(const Span& span) {
    return (span.depth + kTile * Tiles::kRowsOfX - 1) / (kTile * Tiles::kRowsOfX);
  }
  int64_t stride(int64_t strip) const { return (begins_[strip + 1] - begins_[strip]) * kTileBytes; }
  const char* at(int64_t row, int64_t strip) const {
    return numbers_->template as<char>() + begins_[strip] * whole_rows_ * kTileBytes + row * stride(strip);
  }
  const float* sums(int64_t row, int64_t strip) const { return sums_.template as<float>() + row * strips + strip; }
  const float* scales(int64_t row, int64_t strip) const { return scales_.template as<float>() + row * strips + strip; }

  template <class T>
  void pack(const T* data, int64_t stride_of_x, const Layer& layer) {
    parallel_for(0, whole_rows_, kRowsPerThread, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        for (int64_t strip = 0; strip < strips; ++strip) {
          const Span span = span_of(layer, strip);
          char* const to = const_cast<char*>(at(row, strip));
          int64_t filled = 0;
          if (row < count) {
            const T* const from = data + row * stride_of_x + span.begin;
            float *const sum = const_cast<float*>(sums(row, strip)), *const scale = const_cast<float*>(scales(row, strip));
            if constexpr (Tiles::kRounds) {
              RoundedInputs::round(from, span.depth, reinterpret_cast<uint32_t*>(to), 1, sum, scale);
              filled = (span.depth + 3) / 4 * 4;
            } else {
              static_assert(std::is_same_v<T, BFloat16>);
              filled = span.depth * int64_t(sizeof(T));
              std::memcpy(to, from, filled);
              *sum = sum_of(from, span.depth);
            }
          }
          std::memset(to + filled, 0, stride(strip) - filled);
        }
      }
    });
  }

  int64_t count, strips, rows;

 private:
  static constexpr int64_t kRowsPerThread = 8;

  int64_t whole_rows_;
  std::vector<int64_t> begins_;  // in tiles
  std::optional<Scratch> numbers_;
  Scratch sums_, scales_;
};

template <class Tiles>
class TileStrip {
 public:
  // kept: of row m and nibble i at m * kNibbles + i.
  TileStrip(const TileInputs<Tiles>& x, int64_t strip, int64_t first, int64_t rows, const Floats* scales,
            const Floats* less, Floats* kept)
      : x_(x), strip_(strip), first_(first), rows_(rows), scales_(scales), less_(less), kept_(kept) {}
  ~TileStrip() { add(); }

  // All rows, and the two nibbles of a panel, whose registers are filled up to whole tiles.
  void multiply(const Floats* panel, int64_t steps, int nibble) {
    for (int64_t row = 0; row < rows_; row += x_.kMostRows) {
      const int64_t count = std::min(rows_ - row, x_.kMostRows);
      const char* const from = x_.at(first_ + row, strip_);
      const int64_t stride = x_.stride(strip_);
      const bool both = count > kTile;
      both ? sum<2>(from, stride, panel, steps) : sum<1>(from, stride, panel, steps);
      add();
      side_ = 1 - side_;
      both ? store<2>(sums_[side_]) : store<1>(sums_[side_]);
      row_ = row, count_ = count, nibble_ = nibble;
    }
  }

 private:
  template <int kHalves>
  static void sum(const char* x, int64_t stride, const Floats* panel, int64_t steps) {
    constexpr int64_t kPanelStride = 2 * sizeof(Floats);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; ++step, x += 64, panel += 2 * kTile) {
      // Tiles are zeroed as common/tile_registers.h explains.
      _tile_loadd(6, panel, kPanelStride);
      _tile_loadd(7, panel + 1, kPanelStride);
      _tile_loadd(4, x, stride);
      if constexpr (Tiles::kRounds) {
        _tile_dpbsud(0, 4, 6);
        _tile_dpbsud(1, 4, 7);
      } else {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
      }
      _tile_zero(4);
      if constexpr (kHalves == 2) {
        _tile_loadd(5, x + kTile * stride, stride);
        if constexpr (Tiles::kRounds) {
          _tile_dpbsud(2, 5, 6);
          _tile_zero(6);
          _tile_dpbsud(3, 5, 7);
        } else {
          _tile_dpbf16ps(2, 5, 6);
          _tile_zero(6);
          _tile_dpbf16ps(3, 5, 7);
        }
        _tile_zero(5);
      } else {
        _tile_zero(6);
      }
      _tile_zero(7);
    }
  }

  // sums[2 * m + i]: of row m and nibble i.
  template <int kHalves>
  static void store(Floats* sums) {
    constexpr int64_t kStride = 2 * sizeof(Floats);
    _tile_stored(0, sums, kStride);
    _tile_stored(1, sums + 1, kStride);
    if constexpr (kHalves == 2) {
      _tile_stored(2, sums + 2 * kTile, kStride);
      _tile_stored(3, sums + 2 * kTile + 1, kStride);
    }
  }

  // Adds the sums of the rows before, which are stored.
  void add() {
    const Floats* sums = sums_[side_];
    for (int64_t m = row_; m < row_ + count_; ++m, sums += 2) {
      const Floats sum_of_x = all_lanes(*x_.sums(first_ + m, strip_));
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        Floats& kept = kept_[m * kNibbles + nibble_ + i];
        const Floats scale = scales_[nibble_ + i], less = less_[nibble_ + i];
        if constexpr (Tiles::kRounds) {
          const Floats exact = multiply_add((Floats)_mm512_cvtepi32_ps((__m512i)sums[i]), less, sum_of_x);
          kept = multiply_add(kept, exact, scale * all_lanes(*x_.scales(first_ + m, strip_)));
        } else {
          kept = multiply_add(kept, scale, multiply_add(sums[i], less, sum_of_x));
        }
      }
    }
    count_ = 0;
  }

  const TileInputs<Tiles>& x_;
  const int64_t strip_, first_, rows_;
  const Floats *const scales_, *const less_;
  Floats* const kept_;
  Floats sums_[2][2 * TileInputs<Tiles>::kMostRows];
  int side_ = 0;
  int64_t row_ = 0, count_ = 0;  // of the sums that are stored
  int nibble_ = 0;
};

}  // namespace dlinfer::int4

#endif
