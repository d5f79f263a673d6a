// Matrices in GGUF's blocks, for code that takes a weight block of rows by block of rows, as few_rows.h does.
//
// Some rows of the weight are unpacked into the first-level cache, a chunk of columns at a time, where few_rows.h's tiles
// read them. Their sums are taken in one order: a row of x gives the same bits whatever rows stand beside it.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "gguf/formats.h"
#include "linear/few_rows.h"

namespace dlinfer::gguf {

template <class T>
class Matrix {
 public:
  using Type = T;

  Matrix(const uint8_t* data, int64_t rows, int64_t columns, const Format<T>& format)
      : data_(data), rows_(rows), columns_(columns), row_bytes_(columns / format.numbers * format.bytes),
        unpack_(format.unpack) {}

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int64_t bytes(int64_t rows) const { return rows * row_bytes_; }
  const uint8_t* at(int64_t row) const { return data_ + row * row_bytes_; }

  void unpack_row(int64_t row, T* to) const { unpack_(at(row), 0, columns_, to); }

  // As few_rows.h's.
  void block_sums(int64_t first, int64_t count, Rows<const T> x, const void*, float* sums) const {
    std::fill_n(sums, x.count * kBlockRows, 0.0f);
    // Many rows of x do not stay in the first-level cache, so all rows of the weight meet a chunk of them in turn.
    const int64_t columns = x.count > kTileInputs ? kChunk : columns_;
    for (int64_t column = 0; column < columns_; column += columns) {
      for (int64_t row = 0; row < count; row += kStrip) {
        strip_sums(first + row, std::min(kStrip, count - row), column, std::min(column + columns, columns_), x,
                   sums + row);
      }
    }
  }

 private:
  static constexpr int64_t kStrip = 4, kChunk = kColumns<T>;
  static_assert(kChunk % 256 == 0);

  void strip_sums(int64_t first, int64_t count, int64_t begin, int64_t end, Rows<const T> x, float* sums) const {
    constexpr int64_t kStride = kChunk + 64 / sizeof(T);  // rows apart from each other in the cache
    alignas(64) T unpacked[kStrip * kStride];
    for (int64_t column = begin; column < end; column += kChunk) {
      const int64_t width = std::min(kChunk, end - column), ahead = width * row_bytes_ / columns_;
      for (int64_t r = 0; r < count; ++r) {
        const uint8_t* const row = at(first + r);
        const uint8_t* const now = row + column * row_bytes_ / columns_;
        // Memory brings the next strip meanwhile: rows are too short for the processor to foresee where others begin.
        for (int64_t line = 0; line < ahead; line += 64) __builtin_prefetch(now + kStrip * row_bytes_ + line, 0, 2);
        unpack_(row, column, width, unpacked + r * kStride);
      }
      multiply(unpacked, kStride, count, column, width, x, sums);
    }
  }

  static void multiply(const T* weight, int64_t stride, int64_t count, int64_t column, int64_t width, Rows<const T> x,
                       float* sums) {
    const int64_t most = tile_inputs(x.count), passes = (x.count + most - 1) / most;
    for (int64_t pass = 0, c = 0, next_c; pass < passes; ++pass, c = next_c) {
      next_c = (pass + 1) * x.count / passes;  // passes take about equally many
      const auto& tiles = kTiles<T, Asks::kNever>[next_c - c - 1];
      for (int64_t r = 0, done; r < count; r += done) {
        const bool full = r + tiles.rows <= count;
        done = full ? tiles.rows : 1;
        (full ? tiles.full : tiles.one)(weight + r * stride, stride, x.data + c * x.stride + column, x.stride, width, {}, 0,
                                        sums + c * kBlockRows + r);
      }
    }
  }

  const uint8_t* data_;
  int64_t rows_, columns_, row_bytes_;
  Unpack<T> unpack_;
};

// The matrices of a packed weight, one behind the other. Raises where their sizes do not make up the tensor's.
template <class T>
std::vector<Matrix<T>> matrices(const torch::stable::Tensor& packed, const std::vector<int64_t>& types,
                                const std::vector<int64_t>& rows, int64_t columns) {
  using torch::headeronly::ScalarType;
  STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte && packed.is_contiguous() && packed.is_cpu(),
                  "gguf: a packed weight is a contiguous uint8 tensor on the CPU");
  STD_TORCH_CHECK(types.size() == rows.size(), "gguf: ", types.size(), " types, ", rows.size(), " numbers of rows");
  const auto* at = static_cast<const uint8_t*>(packed.const_data_ptr());
  int64_t left = packed.numel();
  std::vector<Matrix<T>> found;
  for (size_t i = 0; i < types.size(); ++i) {
    const Format<T> format = gguf::format<T>(types[i]);
    STD_TORCH_CHECK(format.unpack && rows[i] >= 0 && columns % format.numbers == 0, "gguf: ", rows[i], " rows of ",
                    columns, " numbers of type ", types[i]);
    found.emplace_back(at, rows[i], columns, format);
    at += found.back().bytes(rows[i]);
    left -= found.back().bytes(rows[i]);
  }
  STD_TORCH_CHECK(left == 0, "gguf: a packed weight of ", packed.numel(), " bytes has ", left, " too many");
  return found;
}

}  // namespace dlinfer::gguf
