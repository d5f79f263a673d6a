// Small tensors of numbers that attention ops read before they begin: lengths, tables of blocks, one number a head.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <vector>

namespace dlinfer::attention {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// The numbers of an int32 or int64 tensor of at most two dimensions, row by row.
inline std::vector<int64_t> whole_numbers(const Tensor& t) {
  std::vector<int64_t> found(t.numel());
  const int64_t columns = t.dim() == 2 ? t.size(1) : 1, inner = t.dim() == 2 ? t.stride(1) : 0;
  const int64_t outer = t.dim() ? t.stride(0) : 0;
  for (int64_t i = 0; i < t.numel(); ++i) {
    const int64_t at = i / columns * outer + i % columns * inner;
    found[i] = t.scalar_type() == ScalarType::Int ? static_cast<const int32_t*>(t.const_data_ptr())[at]
                                                  : static_cast<const int64_t*>(t.const_data_ptr())[at];
  }
  return found;
}

// The numbers of a float32 vector; empty without a vector.
inline std::vector<float> numbers(const MaybeTensor& t) {
  if (!t) return {};
  STD_TORCH_CHECK(t->dim() == 1 && t->scalar_type() == ScalarType::Float,
                  "attention: slopes and sinks are vectors of float32");
  std::vector<float> found(t->size(0));
  for (int64_t i = 0; i < t->size(0); ++i) found[i] = static_cast<const float*>(t->const_data_ptr())[i * t->stride(0)];
  return found;
}

// Whether two tensors may share memory: their ranges from first to last element overlap.
inline bool meet(const Tensor& one, const Tensor& other) {
  const auto end_of = [](const Tensor& t) {
    int64_t last = 0;
    for (int64_t d = 0; d < t.dim(); ++d) last += (t.size(d) - 1) * t.stride(d);
    return static_cast<const char*>(t.const_data_ptr()) + (last + 1) * t.element_size();
  };
  return one.numel() > 0 && other.numel() > 0 && one.const_data_ptr() < end_of(other) &&
         other.const_data_ptr() < end_of(one);
}

// q, or a copy of it if `out` shares its memory in another place than the same head of the same row. A head of out is
// written as soon as that head of q has been read. Both have 3 dimensions.
inline Tensor apart(const Tensor& q, const Tensor& out) {
  const bool same = q.const_data_ptr() == out.const_data_ptr() && q.stride(0) == out.stride(0) &&
                    q.stride(1) == out.stride(1);
  return !same && meet(q, out) ? torch::stable::clone(q) : q;
}

}  // namespace dlinfer::attention
