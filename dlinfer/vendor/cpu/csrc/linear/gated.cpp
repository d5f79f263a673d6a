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
#include "common/widen.h"
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

// Blocks of one half that follow each other before the other half's: as many as there is room for the sums of. Of few
// rows of x the weight is what takes the time, and memory gives two long streams sooner than many that change places.
constexpr int64_t stretch(int64_t inputs) { return std::max<int64_t>(kPanelInputs / inputs, 1); }

// out: [x.count, features], weight: [2 * features, columns], bias: as long or null.
template <class T>
void run(Rows<const T> x, int64_t columns, Rows<const T> weight, const T* bias, T* out) {
  const int64_t features = weight.count / 2, rows = block_rows<T>(columns);
  const T* const halves[] = {weight.data, weight.data + features * weight.stride};
  const auto count = [&](int64_t block) { return std::min(rows, features - block * rows); };
  const auto at = [&](int half, int64_t block) { return halves[half] + block * rows * weight.stride; };
  // Some rows of a block's sums, with what is added to each, rounded.
  const auto value = [&](const float* sums, int half, int64_t first, int64_t lanes) {
    Floats added{};
    if (bias) {
      const T* const from = bias + half * features + first;
      added = lanes == kLanes ? widen(from) : widen_part(from, lanes);
    }
    return rounded<T>(load_as<Floats>(sums) + added);
  };

  const auto take = [&](int64_t c, int64_t inputs, int64_t begin, int64_t end) {
    const Rows<const T> some{x.data + c * x.stride, x.stride, inputs};
    const int64_t longest = stretch(inputs), block_size = inputs * kBlockRows;
    float sums[2][kPanelInputs * kBlockRows];
    for (int64_t first = begin, last; first < end; first = last) {
      last = std::min(first + longest, end);
      for (int half : {0, 1}) {
        const T* const other = half == 0 ? at(1, first) : last < end ? at(0, last) : nullptr;
        for (int64_t i = first; i < last; ++i) {
          block_sums(Rows<const T>{at(half, i), weight.stride, count(i)}, some, columns,
                     i + 1 < last ? at(half, i + 1) : other, sums[half] + (i - first) * block_size);
        }
      }
      for (int64_t row = 0; row < inputs; ++row) {
        for (int64_t i = first; i < last; ++i) {
          T* const to = out + (c + row) * features + i * rows;
          const int64_t from = (i - first) * block_size + row * kBlockRows;
          for (int64_t r = 0; r < count(i); r += kLanes) {
            const int64_t lanes = std::min<int64_t>(count(i) - r, kLanes);
            const Floats gate = value(sums[0] + from + r, 0, i * rows + r, lanes);
            const Floats result = rounded<T>(gate * sigmoid(gate)) * value(sums[1] + from + r, 1, i * rows + r, lanes);
            lanes == kLanes ? narrow(to + r, result) : narrow_part(to + r, result, lanes);
          }
        }
      }
    }
  };
  for_panels(x.count, (features + rows - 1) / rows, 2 * rows * columns * int64_t(sizeof(T)), take);
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
  dlinfer::chain::put_linear(library, "linear_silu_and_mul", TORCH_BOX(&dlinfer::gated_linear::linear_silu_and_mul),
                             dlinfer::chain::Weight::kHalves);
}
