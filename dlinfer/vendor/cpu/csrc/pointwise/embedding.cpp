// dlinfer_cpu::embedding: rows of a table, as aten.embedding gives them; of the arguments that a gradient needs none is
// read.
//
// Roofline: each row is read and written once, so bound by memory. A decoding step takes one row a sequence, less than
// a microsecond. In a decode step this takes 6 us and torch's kernel 300, for code that no cache holds any more once the
// weights have been read. A table whose rows have gaps between neighbours is copied, which graphs leave to torch.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "chain/table.h"
#include "common/result_memory.h"
#include "threads/team.h"

namespace dlinfer::pointwise {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Below this many bytes a thread is done before another one has begun.
constexpr int64_t kCopiedPerThread = 64 << 10;

Tensor embedding(Tensor weight, Tensor indices, int64_t, bool, bool) {
  const ScalarType type = indices.scalar_type();
  STD_TORCH_CHECK(weight.dim() == 2 && (type == ScalarType::Long || type == ScalarType::Int),
                  "embedding: a table of two dimensions and places of int64 or int32 are needed");
  if (weight.size(1) > 1 && weight.stride(1) != 1) weight = torch::stable::contiguous(weight);
  if (!indices.is_contiguous()) indices = torch::stable::contiguous(indices);
  std::vector<int64_t> shape(indices.sizes().begin(), indices.sizes().end());
  shape.push_back(weight.size(1));
  Tensor out = empty_packed(shape, weight.scalar_type(), weight.element_size());
  const int64_t item = weight.element_size(), rows = weight.size(0), pitch = weight.stride(0) * item;
  const int64_t bytes = weight.size(1) * item, count = indices.numel();
  const char* const from = static_cast<const char*>(weight.const_data_ptr());
  char* const to = static_cast<char*>(out.mutable_data_ptr());
  const void* const places = indices.const_data_ptr();
  const bool wide = type == ScalarType::Long;
  const int64_t grain = std::max<int64_t>(kCopiedPerThread / std::max<int64_t>(bytes, 1), 1);
  parallel_for(0, count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const int64_t row = wide ? static_cast<const int64_t*>(places)[i] : static_cast<const int32_t*>(places)[i];
      STD_TORCH_CHECK(row >= 0 && row < rows, "embedding: index out of range in self: ", row, " of ", rows, " rows");
      if (bytes > 0) std::memcpy(to + i * bytes, from + row * pitch, bytes);  // else there may be no memory
    }
  });
  return out;
}

}  // namespace
}  // namespace dlinfer::pointwise

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def(
      "embedding(Tensor weight, Tensor indices, SymInt padding_idx=-1, bool scale_grad_by_freq=False, "
      "bool sparse=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "embedding", TORCH_BOX(&dlinfer::pointwise::embedding));
}
