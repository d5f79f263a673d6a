// Arguments of linear layers: checks, and a tensor for the result.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "common/result_memory.h"

namespace dlinfer::layers {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// A new tensor of x's leading dimensions and `features`, contiguous.
inline Tensor empty_result(const Tensor& x, int64_t features) {
  const auto leading = x.sizes();
  const int64_t rank = x.dim();
  std::vector<int64_t> sizes(leading.begin(), leading.end()), strides(rank, 1);
  sizes[rank - 1] = features;
  for (int64_t d = rank - 1; d > 0; --d) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return empty_strided(sizes, strides, x.scalar_type(), x.element_size());
}

inline void check(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  STD_TORCH_CHECK(x.dim() >= 1, "linear: x needs at least one dimension");
  STD_TORCH_CHECK(weight.dim() == 2, "linear: weight is [out_features, in_features], got ", weight.dim(),
                  " dimensions");
  STD_TORCH_CHECK(weight.size(1) == x.size(x.dim() - 1), "linear: x has ", x.size(x.dim() - 1),
                  " in_features, weight has ", weight.size(1));
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "linear: x and weight differ in dtype");
  if (!bias) return;
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), "linear: bias is [out_features = ",
                  weight.size(0), "]");
  STD_TORCH_CHECK(bias->scalar_type() == x.scalar_type(), "linear: x and bias differ in dtype");
}

// Whether neighbours along the last dimension are neighbours in memory.
inline bool dense_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.size(last) <= 1 || t.stride(last) == 1;
}

inline int64_t leading_count(const Tensor& x) {
  int64_t count = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) count *= x.size(d);
  return count;
}

inline bool fits_kernel(const Tensor& weight, const MaybeTensor& bias) {
  return weight.is_cpu() && dense_rows(weight) && (!bias || (bias->is_cpu() && dense_rows(*bias)));
}

// x with its rows at one distance from each other, a copy where they are not.
inline Tensor with_even_rows(const Tensor& x) {
  const bool rows_with_gaps = x.dim() == 2 && dense_rows(x);
  return rows_with_gaps || x.is_contiguous() ? x : torch::stable::contiguous(x);
}

// The distance of its rows.
inline int64_t row_stride(const Tensor& x) { return x.is_contiguous() ? x.size(x.dim() - 1) : x.stride(0); }

}  // namespace dlinfer::layers
