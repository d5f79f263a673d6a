// Shared by the kernels of 8-bit numbers: results, dtypes, and the order for few rows of x and a weight.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "common/lanes.h"
#include "common/result_memory.h"
#include "threads/team.h"

namespace dlinfer::eight_bit {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kBlockRows = 16;             // rows of a weight that a thread takes at once
constexpr int kTileInputs = 4;                 // rows of x that meet a row of the weight together
constexpr int64_t kBytesPerThread = 64 << 10;  // of a weight: below this a thread is done before another has begun

inline Tensor packed(const Tensor& like, int64_t last, ScalarType dtype, int64_t item_bytes) {
  const auto shape = like.sizes();
  std::vector<int64_t> sizes(shape.begin(), shape.end()), strides(sizes.size(), 1);
  sizes.back() = last;
  for (size_t d = sizes.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return empty_strided(sizes, strides, dtype, item_bytes);
}

inline Tensor dense(Tensor t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <class T>
T* out_data(Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Calls `function` with a value of the dtype's type.
template <class Function>
void with_type(ScalarType dtype, const Function& function) {
  switch (dtype) {
    case ScalarType::Float:
      return function(float());
    case ScalarType::BFloat16:
      return function(BFloat16());
    case ScalarType::Half:
      return function(Half());
    default:
      STD_TORCH_CHECK(false, "eight_bit: no kernel for this dtype");
  }
}

inline int64_t item_bytes(ScalarType dtype) { return dtype == ScalarType::Float ? 4 : 2; }

inline int64_t block_grain(int64_t columns) {
  return std::max<int64_t>(kBytesPerThread / std::max<int64_t>(kBlockRows * columns, 1), 1);
}

// out[c, r] = sums[c * kRows + r] * ..., rounded, plus the bias, rounded again.
template <class T>
T with_bias(float value, const T* bias, int64_t row) {
  const T rounded(value);
  return bias ? T(float(rounded) + float(bias[row])) : rounded;
}

// Calls `tile(rows, first row, c, inputs, sums)` for all tiles of a weight and rows of x, and `store(c, r, sum)`.
template <class Tile, class Store>
void for_tiles(int64_t rows, int64_t inputs, int64_t columns, const Tile& tile, const Store& store) {
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  parallel_for(0, blocks, block_grain(columns), [&](int64_t begin, int64_t end) {
    float sums[4 * kTileInputs];
    const int64_t last = std::min(end * kBlockRows, rows);
    for (int64_t first = begin * kBlockRows; first < last; first += kBlockRows) {
      const int64_t block_end = std::min(first + kBlockRows, last);
      for (int64_t c = 0; c < inputs; c += kTileInputs) {
        const int64_t some = std::min<int64_t>(kTileInputs, inputs - c);
        for (int64_t r = first; r < block_end;) {
          const int64_t together = r + 4 <= block_end ? 4 : 1;
          tile(together, r, c, some, sums);
          for (int64_t i = 0; i < some; ++i) {
            for (int64_t j = 0; j < together; ++j) store(c + i, r + j, sums[i * together + j]);
          }
          r += together;
        }
      }
    }
  });
}

}  // namespace dlinfer::eight_bit
