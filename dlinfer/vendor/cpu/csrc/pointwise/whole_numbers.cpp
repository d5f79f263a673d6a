// dlinfer_cpu::add_whole and add_whole_: sums of whole numbers, as a model counts its tokens and their positions.
//
// A layer's step has a few of them, each of one number or of one a token. Other kernels for them would end a chain, so
// this saves calls from Python.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <type_traits>

#include "chain/table.h"
#include "common/result_memory.h"

namespace dlinfer::pointwise {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Calls f with a number of the tensor's type.
template <class F>
void with_whole(const Tensor& t, F&& f) {
  switch (t.scalar_type()) {
    case ScalarType::Long:
      return f(int64_t());
    case ScalarType::Int:
      return f(int32_t());
    default:
      STD_TORCH_CHECK(false, "add_whole: int64 or int32 are needed");
  }
}

// x + y. y has x's shape, or is one number with at most as many dimensions.
Tensor add_whole(Tensor x, Tensor y) {
  bool same = x.dim() == y.dim();
  for (int64_t d = 0; same && d < x.dim(); ++d) same = x.size(d) == y.size(d);
  STD_TORCH_CHECK(same || (y.numel() == 1 && y.dim() <= x.dim()), "add_whole: y is of x's shape, or one number");
  STD_TORCH_CHECK(x.scalar_type() == y.scalar_type(), "add_whole: x and y are of one dtype");
  if (!x.is_contiguous()) x = torch::stable::contiguous(x);
  if (!y.is_contiguous()) y = torch::stable::contiguous(y);
  Tensor out = empty_packed_like(x);
  with_whole(x, [&]<class T>(T) {
    using Wrapping = std::make_unsigned_t<T>;
    const auto *a = static_cast<const Wrapping*>(x.const_data_ptr()), *b = static_cast<const Wrapping*>(y.const_data_ptr());
    auto* const to = static_cast<Wrapping*>(out.mutable_data_ptr());
    const int64_t step = same ? 1 : 0;
    for (int64_t i = 0; i < x.numel(); ++i) to[i] = a[i] + b[i * step];
  });
  return out;
}

// Adds a number to all of x, in place.
Tensor add_whole_(Tensor x, int64_t y) {
  STD_TORCH_CHECK(x.is_contiguous(), "add_whole_: x is contiguous");
  with_whole(x, [&]<class T>(T) {
    using Wrapping = std::make_unsigned_t<T>;
    auto* const to = static_cast<Wrapping*>(x.mutable_data_ptr());
    for (int64_t i = 0; i < x.numel(); ++i) to[i] += Wrapping(y);
  });
  return x;
}

}  // namespace
}  // namespace dlinfer::pointwise

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("add_whole(Tensor x, Tensor y) -> Tensor");
  library.def("add_whole_(Tensor(a!) x, SymInt y) -> Tensor(a!)");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "add_whole", TORCH_BOX(&dlinfer::pointwise::add_whole));
  dlinfer::chain::put(library, "add_whole_", TORCH_BOX(&dlinfer::pointwise::add_whole_));
}
