// dlinfer_cpu::linear_gguf: the linear layers of linear/ with a weight in GGUF's blocks, which are unpacked into x's
// dtype. More rows of x than few_rows.h takes have the weight unpacked into memory, and linear/ does the rest. That memory
// is used again by the next such layer. embedding_gguf and unpack_gguf: rows of such a weight.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <optional>
#include <vector>

#include "chain/table.h"
#include "common/result_memory.h"
#include "common/with_type.h"
#include "gguf/matrix.h"
#include "linear/arguments.h"
#include "linear/limits.h"
#include "linear/linear.h"
#include "linear/panels.h"
#include "threads/team.h"

namespace dlinfer::gguf {
namespace {

using layers::MaybeTensor;
using layers::Tensor;
using torch::headeronly::ScalarType;

constexpr int64_t kNumbersPerThread = 64 << 10;

// out: `stride` numbers from the beginning of a row to that of the next.
template <class T>
void unpack(const std::vector<Matrix<T>>& matrices, T* out) {
  for (const auto& matrix : matrices) {
    const int64_t columns = matrix.columns(), grain = std::max<int64_t>(kNumbersPerThread / std::max<int64_t>(columns, 1), 1);
    parallel_for(0, matrix.rows(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) matrix.unpack_row(row, out + row * columns);
    });
    out += matrix.rows() * columns;
  }
}

Tensor unpack_gguf(Tensor weight, std::vector<int64_t> types, std::vector<int64_t> rows, int64_t columns,
                   ScalarType dtype) {
  return with_type(dtype, "unpack_gguf", [&](auto number) {
    using T = decltype(number);
    const auto found = matrices<T>(weight, types, rows, columns);
    Tensor out = empty_packed({std::accumulate(rows.begin(), rows.end(), int64_t(0)), columns}, dtype, sizeof(T));
    unpack<T>(found, static_cast<T*>(out.mutable_data_ptr()));
    return out;
  });
}

template <class T>
void multiply(const std::vector<Matrix<T>>& matrices, Rows<const T> x, const T* bias, Rows<T> out) {
  const int64_t rows = block_rows<T>(matrices[0].columns());
  const auto blocks = [rows](const Matrix<T>& matrix) { return (matrix.rows() + rows - 1) / rows; };
  int64_t total = 0, bytes = 0;
  for (const auto& matrix : matrices) {
    total += blocks(matrix);
    bytes = std::max(bytes, matrix.bytes(rows));
  }
  for_panels(x.count, total, bytes, [&](int64_t c, int64_t inputs, int64_t begin, int64_t end) {
    const Rows<const T> some{x.data + c * x.stride, x.stride, inputs};
    int64_t before = 0, feature = 0;
    for (const auto& matrix : matrices) {
      const int64_t last = std::min(end - before, blocks(matrix));
      for (int64_t i = std::max<int64_t>(begin - before, 0); i < last; ++i) {
        const int64_t r = i * rows, to = feature + r;
        block<kPanelInputs>(matrix, r, std::min(rows, matrix.rows() - r), some, bias ? bias + to : nullptr,
                            {out.data + c * out.stride + to, out.stride, inputs}, false);
      }
      before += blocks(matrix);
      feature += matrix.rows();
    }
  });
}

int64_t most_inputs(ScalarType dtype) {
  constexpr int64_t kFewest = 32;  // to unpack a weight into memory pays for more rows than torch's product needs
  return std::max(max_inputs(dtype), kFewest);
}

Tensor linear_gguf(Tensor x, Tensor weight, MaybeTensor bias, std::vector<int64_t> types, std::vector<int64_t> rows) {
  STD_TORCH_CHECK(x.dim() >= 1, "linear_gguf: x needs at least one dimension");
  const int64_t columns = x.size(x.dim() - 1), inputs = layers::leading_count(x);
  const int64_t features = std::accumulate(rows.begin(), rows.end(), int64_t(0));
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == features && bias->is_cpu() &&
                            bias->scalar_type() == x.scalar_type()),
                  "linear_gguf: bias is a tensor of x's dtype [out_features = ", features, "]");
  if (inputs > most_inputs(x.scalar_type())) {
    return linear(x, unpack_gguf(weight, types, rows, columns, x.scalar_type()), bias);
  }
  return with_type(x.scalar_type(), "linear_gguf", [&](auto number) {
    using T = decltype(number);
    const auto found = matrices<T>(weight, types, rows, columns);
    x = layers::with_even_rows(x);
    if (bias && !layers::dense_rows(*bias)) bias = torch::stable::contiguous(*bias);
    Tensor out = layers::empty_result(x, features);
    if (features == 0) return out;
    multiply<T>(found, {static_cast<const T*>(x.const_data_ptr()), layers::row_stride(x), inputs},
                bias ? static_cast<const T*>(bias->const_data_ptr()) : nullptr,
                {static_cast<T*>(out.mutable_data_ptr()), features, inputs});
    return out;
  });
}

Tensor embedding_gguf(Tensor indices, Tensor weight, int64_t type, int64_t rows, int64_t columns, ScalarType dtype) {
  const ScalarType place = indices.scalar_type();
  STD_TORCH_CHECK(place == ScalarType::Long || place == ScalarType::Int, "embedding_gguf: indices are int64 or int32");
  if (!indices.is_contiguous()) indices = torch::stable::contiguous(indices);
  std::vector<int64_t> shape(indices.sizes().begin(), indices.sizes().end());
  shape.push_back(columns);
  return with_type(dtype, "embedding_gguf", [&](auto number) {
    using T = decltype(number);
    const auto matrix = matrices<T>(weight, {type}, {rows}, columns)[0];
    Tensor out = empty_packed(shape, dtype, sizeof(T));
    auto* const to = static_cast<T*>(out.mutable_data_ptr());
    const void* const places = indices.const_data_ptr();
    const int64_t grain = std::max<int64_t>(kNumbersPerThread / std::max<int64_t>(columns, 1), 1);
    parallel_for(0, indices.numel(), grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        const int64_t row =
            place == ScalarType::Long ? static_cast<const int64_t*>(places)[i] : static_cast<const int32_t*>(places)[i];
        STD_TORCH_CHECK(row >= 0 && row < rows, "embedding_gguf: index out of range in self: ", row, " of ", rows, " rows");
        matrix.unpack_row(row, to + i * columns);
      }
    });
    return out;
  });
}

}  // namespace
}  // namespace dlinfer::gguf

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("linear_gguf(Tensor x, Tensor weight, Tensor? bias, int[] types, int[] rows) -> Tensor");
  library.def("unpack_gguf(Tensor weight, int[] types, int[] rows, int columns, ScalarType dtype) -> Tensor");
  library.def("embedding_gguf(Tensor indices, Tensor weight, int type, int rows, int columns, ScalarType dtype) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put_linear(library, "linear_gguf", TORCH_BOX(&dlinfer::gguf::linear_gguf));
  library.impl("unpack_gguf", TORCH_BOX(&dlinfer::gguf::unpack_gguf));
  dlinfer::chain::put(library, "embedding_gguf", TORCH_BOX(&dlinfer::gguf::embedding_gguf));
}
