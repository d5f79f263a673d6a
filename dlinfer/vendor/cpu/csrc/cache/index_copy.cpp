// dlinfer_cpu::index_copy_: torch's, where what stands behind the dimension lies in one piece in both tensors, as in a
// static cache of keys and values: [batch, heads, places, size].
//
// Roofline: source is read and self written once, so bound by memory. A decode step copies one row a head, less than a
// microsecond; torch's takes four, and wakes its threads for a prompt. Places are taken in their order, so that of
// several rows for one place the last stays. Other calls are torch's, and so are errors of shape.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstring>

#include "attention/arguments.h"
#include "chain/table.h"
#include "common/by_torch.h"
#include "threads/team.h"

namespace dlinfer::cache {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Below this many bytes a thread is done before another one has begun.
constexpr int64_t kCopiedPerThread = 64 << 10;

// Whether the dimensions after `dim` are contiguous.
bool in_one_piece(const Tensor& t, int64_t dim) {
  int64_t expected = 1;
  for (int64_t d = t.dim() - 1; d > dim; --d) {
    if (t.size(d) != 1 && t.stride(d) != expected) return false;
    expected *= t.size(d);
  }
  return true;
}

bool fits(const Tensor& self, int64_t dim, const Tensor& index, const Tensor& source) {
  if (!self.is_cpu() || !index.is_cpu() || !source.is_cpu() || self.scalar_type() != source.scalar_type()) return false;
  if (index.scalar_type() != ScalarType::Long || index.dim() != 1 || self.dim() != source.dim()) return false;
  if (dim < 0 || dim >= self.dim() || source.size(dim) != index.size(0) || source.numel() == 0) return false;
  for (int64_t d = 0; d < self.dim(); ++d) {
    if (d != dim && self.size(d) != source.size(d)) return false;
    if (self.size(d) > 1 && self.stride(d) == 0) return false;
  }
  return in_one_piece(self, dim) && in_one_piece(source, dim) && !attention::meet(self, source);
}

Tensor index_copy_(Tensor self, int64_t dim, Tensor index, Tensor source) {
  if (dim < 0) dim += self.dim();
  if (!fits(self, dim, index, source)) return by_torch("aten::index_copy_", self, dim, index, source);
  int64_t outer = 1, inner = self.element_size();
  for (int64_t d = 0; d < self.dim(); ++d) d < dim ? outer *= self.size(d) : d > dim ? inner *= self.size(d) : 0;
  const int64_t item = self.element_size(), count = index.size(0), places = self.size(dim);
  const int64_t to_pitch = self.stride(dim) * item, from_pitch = source.stride(dim) * item, step = index.stride(0);
  const auto* const at = static_cast<const int64_t*>(index.const_data_ptr());
  // Checks before anything is written.
  for (int64_t i = 0; i < count; ++i) {
    STD_TORCH_CHECK(at[i * step] >= 0 && at[i * step] < places, "index_copy_(): index ", at[i * step],
                    " is out of bounds for dimension ", dim, " with size ", places);
  }
  char* const to = static_cast<char*>(self.mutable_data_ptr());
  const char* const from = static_cast<const char*>(source.const_data_ptr());
  const int64_t grain = std::max<int64_t>(kCopiedPerThread / std::max<int64_t>(count * inner, 1), 1);
  parallel_for(0, outer, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      int64_t to_first = 0, from_first = 0;
      for (int64_t d = dim - 1, left = i; d >= 0; --d) {
        to_first += left % self.size(d) * self.stride(d) * item;
        from_first += left % self.size(d) * source.stride(d) * item;
        left /= self.size(d);
      }
      for (int64_t j = 0; j < count; ++j) {
        std::memcpy(to + to_first + at[j * step] * to_pitch, from + from_first + j * from_pitch, inner);
      }
    }
  });
  return self;
}

}  // namespace
}  // namespace dlinfer::cache

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("index_copy_(Tensor(a!) self, int dim, Tensor index, Tensor source) -> Tensor(a!)");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "index_copy_", TORCH_BOX(&dlinfer::cache::index_copy_));
}
