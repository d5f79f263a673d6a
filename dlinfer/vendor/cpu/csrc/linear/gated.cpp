// dlinfer_cpu::linear_silu_and_mul: a linear layer of twice as many features and silu_and_mul behind it, as one kernel.
//
// A thread computes some features of both halves, and what they give together, before it goes on: the layer's result,
// which for a prompt is twice the size of this one's, is never in memory. Both are rounded where the two kernels apart
// round, so the bits are theirs. Where the product is not few_rows.h's, it is the two of them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>

#include "chain/table.h"
#include "common/by_torch.h"
#include "common/narrow.h"
#include "common/sigmoid.h"
#include "linear/arguments.h"
#include "linear/few_rows.h"
#include "linear/limits.h"
#include "linear/linear.h"
#include "linear/panels.h"

namespace dlinfer::gated_linear {
namespace {

using layers::MaybeTensor;
using layers::Tensor;
using torch::headeronly::ScalarType;

// Sums of some rows of one half, with what is added to each, rounded.
template <class T>
struct Sums {
  float sums[kPanelInputs * kBlockRows];
  float bias[kBlockRows];

  Floats operator()(int64_t c, int64_t r) const {
    return rounded<T>(load_as<Floats>(sums + c * kBlockRows + r) + load_as<Floats>(bias + r));
  }
};

// out: [x.count, features], weight: [2 * features, columns], bias: as long or null.
template <class T>
void run(Rows<const T> x, int64_t columns, Rows<const T> weight, const T* bias, T* out) {
  const int64_t features = weight.count / 2, rows = block_rows<T>(columns);
  const int64_t bytes = 2 * rows * columns * int64_t(sizeof(T));
  const auto take = [&](int64_t c, int64_t inputs, int64_t begin, int64_t end) {
    const Rows<const T> some{x.data + c * x.stride, x.stride, inputs};
    Sums<T> gate, up;
    for (int64_t i = begin; i < end; ++i) {
      const int64_t first = i * rows, count = std::min(rows, features - first);
      const T* const gates = weight.data + first * weight.stride;
      const T* const ups = weight.data + (features + first) * weight.stride;
      const T* const next = i + 1 < end ? gates + count * weight.stride : nullptr;
      block_sums(Rows<const T>{gates, weight.stride, count}, some, columns, ups, gate.sums);
      block_sums(Rows<const T>{ups, weight.stride, count}, some, columns, next, up.sums);
      for (int64_t r = 0; r < kBlockRows; ++r) {
        gate.bias[r] = bias && r < count ? float(bias[first + r]) : 0.0f;
        up.bias[r] = bias && r < count ? float(bias[features + first + r]) : 0.0f;
      }
      for (int64_t row = 0; row < inputs; ++row) {
        T* const to = out + (c + row) * features + first;
        for (int64_t r = 0; r < count; r += kLanes) {
          const Floats wide = gate(row, r), value = rounded<T>(wide * sigmoid(wide)) * up(row, r);
          count - r >= kLanes ? narrow(to + r, value) : narrow_part(to + r, value, count - r);
        }
      }
    }
  };
  for_panels(x.count, (features + rows - 1) / rows, bytes, take);
}

Tensor linear_silu_and_mul(Tensor x, Tensor weight, MaybeTensor bias) {
  layers::check(x, weight, bias);
  STD_TORCH_CHECK(weight.size(0) % 2 == 0, "linear_silu_and_mul: weight is [2 * intermediate, in_features]");
  const int64_t inputs = layers::leading_count(x), columns = x.size(x.dim() - 1);
  if (!layers::fits_kernel(weight, bias) || inputs > max_inputs(x.scalar_type(), columns)) {
    return by_torch("dlinfer_cpu::silu_and_mul", linear(x, weight, bias));
  }
  x = layers::with_even_rows(x);
  Tensor out = layers::empty_result(x, weight.size(0) / 2);
  const auto run_as = [&]<class T>(T) {
    const auto data = [](const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); };
    run<T>({data(x), layers::row_stride(x), inputs}, columns, {data(weight), weight.stride(0), weight.size(0)},
           bias ? data(*bias) : nullptr, static_cast<T*>(out.mutable_data_ptr()));
  };
  if (x.scalar_type() == ScalarType::Float) run_as(float());
  if (x.scalar_type() == ScalarType::BFloat16) run_as(BFloat16());
#if defined(DLINFER_HAS_HALF)
  if (x.scalar_type() == ScalarType::Half) run_as(Half());
#endif
  return out;
}

}  // namespace
}  // namespace dlinfer::gated_linear

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("linear_silu_and_mul(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "linear_silu_and_mul", TORCH_BOX(&dlinfer::gated_linear::linear_silu_and_mul));
}
