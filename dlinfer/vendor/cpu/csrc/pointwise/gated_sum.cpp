// dlinfer_cpu::gated_sum: x + sigmoid(gate) * y, with a gate for each row, as a shared expert's result is added.
//
// Roofline: three numbers of memory for a multiplication and an addition, so bound by memory. A decoding step's rows are
// in a cache, and take less than 1 us; what this saves is the way to a compiled loop, which leads through Python.
//
// Each of the three is rounded to the dtype, as torch's kernels do it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>

#include "chain/table.h"
#include "common/narrow.h"
#include "common/result_memory.h"
#include "common/sigmoid.h"
#include "common/tensor_rows.h"
#include "common/with_type.h"
#include "threads/team.h"

namespace dlinfer::pointwise {
namespace {

using torch::stable::Tensor;

// Below this many elements a thread is done before another one has begun.
constexpr int64_t kSummedPerThread = 32 << 10;

template <class T>
void gated_sum_row(const T* x, float gate, const T* y, int64_t count, T* out) {
  const Floats by = rounded<T>(sigmoid(all_lanes(gate)));
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) narrow(out + i, widen(x + i) + rounded<T>(by * widen(y + i)));
  if (const int64_t rest = count - i; rest > 0) {
    narrow_part(out + i, widen_part(x + i, rest) + rounded<T>(by * widen_part(y + i, rest)), rest);
  }
}

Tensor gated_sum(Tensor x, Tensor gate, Tensor y) {
  const int64_t last = x.dim() - 1;
  bool fits = last >= 0 && gate.dim() == x.dim() && y.dim() == x.dim() && gate.size(last) == 1;
  fits = fits && gate.scalar_type() == x.scalar_type() && y.scalar_type() == x.scalar_type();
  for (int64_t d = 0; fits && d <= last; ++d) {
    fits = y.size(d) == x.size(d) && (d == last || gate.size(d) == x.size(d));
  }
  STD_TORCH_CHECK(fits, "gated_sum: x and y are of one shape, gate has one number for each of their rows, one dtype");
  Tensor out = empty_packed_like(x);
  const int64_t count = x.size(last), rows = count == 0 ? 0 : x.numel() / count;
  const int64_t grain = std::max<int64_t>(kSummedPerThread / std::max<int64_t>(count, 1), 1);
  with_type(x.scalar_type(), "gated_sum", [&]<class T>(T) {
    const TensorRows<T> xs(x), gates(gate), ys(y);
    T* const to = static_cast<T*>(out.mutable_data_ptr());
    parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        gated_sum_row<T>(xs[row], float(gates[row][0]), ys[row], count, to + row * count);
      }
    });
  });
  return out;
}

}  // namespace
}  // namespace dlinfer::pointwise

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("gated_sum(Tensor x, Tensor gate, Tensor y) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "gated_sum", TORCH_BOX(&dlinfer::pointwise::gated_sum));
}
