// dlinfer_cpu::linear_silu_and_mul: a linear layer of twice as many features and silu_and_mul behind it, as one kernel.
// Where the product is neither few_rows.h's nor that of tiles/, it is the two of them.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <type_traits>

#include "chain/table.h"
#include "common/by_torch.h"
#include "linear/arguments.h"
#include "linear/gated.h"
#include "linear/limits.h"
#include "linear/linear.h"
#include "linear/tile_results.h"
#include "tiles/work.h"

namespace dlinfer::gated_linear {
namespace {

using layers::MaybeTensor;
using layers::Tensor;
using torch::headeronly::ScalarType;

Tensor linear_silu_and_mul(Tensor x, Tensor weight, MaybeTensor bias) {
  layers::check(x, weight, bias);
  STD_TORCH_CHECK(weight.size(0) % 2 == 0, "linear_silu_and_mul: weight is [2 * intermediate, in_features]");
  const int64_t inputs = layers::leading_count(x), columns = x.size(x.dim() - 1);
  const bool few = inputs <= max_inputs(x.scalar_type());
  if (!layers::fits_kernel(weight, bias) || !(few || tiles_take(x.scalar_type(), inputs))) {
    return by_torch("dlinfer_cpu::silu_and_mul", linear(x, weight, bias));
  }
  x = layers::with_even_rows(x);
  Tensor out = layers::empty_result(x, weight.size(0) / 2);
  const auto run_as = [&]<class T>(T) {
    const auto data = [](const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); };
#if defined(DLINFER_HAS_PANELS)
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (!few) {
        const Rows<const T> rows{data(weight), weight.stride(0), weight.size(0)};
        const tiles::Panels panels{tiles::as_bytes(rows), true};
        const Rows<T> to{static_cast<T*>(out.mutable_data_ptr()), panels.features(), inputs};
        return tiles::multiply<tiles::Type::kBFloat16, tiles::BFloat16Job>(
            tiles::as_bytes<T>({data(x), layers::row_stride(x), inputs}), columns * sizeof(T),
            {{panels, bias ? data(*bias) : nullptr, to}});
      }
    }
#endif
    const PlainWeight<T> given({data(weight), weight.stride(0), weight.size(0)}, columns);
    multiply_gated(given, {data(x), layers::row_stride(x), inputs}, columns, bias ? data(*bias) : nullptr,
                   static_cast<T*>(out.mutable_data_ptr()));
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
