// The rows of a tensor, along its last dimension, whatever lies between them.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <utility>

namespace dlinfer {

// The rows of a tensor: number i * inner + j begins at i * outer_stride + j * inner_stride.
class RowStarts {
 public:
  // Empty if the elements of a row are not adjacent, or if two strides do not describe the rows' places.
  static std::optional<RowStarts> of(const torch::stable::Tensor& t) {
    RowStarts starts;
    const int64_t last = t.dim() - 1;
    if (t.size(last) > 1 && t.stride(last) != 1) return std::nullopt;
    int64_t outer = 1;
    for (int64_t d = last - 1; d >= 0; --d) {
      const int64_t size = t.size(d), stride = t.stride(d);
      if (size == 1) continue;
      if (starts.inner_ == 1) {
        starts.inner_ = size;
        starts.inner_stride_ = stride;
      } else if (outer == 1 && stride == starts.inner_ * starts.inner_stride_) {
        starts.inner_ *= size;
      } else if (outer == 1) {
        outer = size;
        starts.outer_stride_ = stride;
      } else if (stride == outer * starts.outer_stride_) {
        outer *= size;
      } else {
        return std::nullopt;
      }
    }
    return starts;
  }

  int64_t operator[](int64_t row) const { return row / inner_ * outer_stride_ + row % inner_ * inner_stride_; }

 private:
  int64_t inner_ = 1, inner_stride_ = 0, outer_stride_ = 0;
};

// A tensor's rows in place if two strides describe them, else those of a copy.
template <class T>
class TensorRows {
 public:
  explicit TensorRows(torch::stable::Tensor t) : tensor_(std::move(t)) {
    auto starts = RowStarts::of(tensor_);
    if (!starts) {
      tensor_ = torch::stable::contiguous(tensor_);
      starts = RowStarts::of(tensor_);
    }
    starts_ = *starts;
    data_ = static_cast<const T*>(tensor_.const_data_ptr());
  }

  const T* operator[](int64_t row) const { return data_ + starts_[row]; }

 private:
  torch::stable::Tensor tensor_;
  RowStarts starts_;
  const T* data_;
};

}  // namespace dlinfer
