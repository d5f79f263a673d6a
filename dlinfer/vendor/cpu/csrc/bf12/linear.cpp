// dlinfer_cpu::linear_bf12 and linear_bf12_silu_and_mul: the linear layers of linear/ with a weight that is packed
// without loss. Results have the bits that linear/ gives for the plain weight, except where linear/ adds up in another
// order. It leaves more rows than max_inputs() (limits.h) to tiles/ or torch's product. It leaves a bias with gaps to
// torch's product; here such a bias is copied.
//
// Few rows of x meet rows of the weight that were unpacked into a cache, and where tiles/ has instructions many rows do
// as well. Elsewhere the weight is unpacked into memory for more rows than few_rows.h takes, and linear/ does the rest.
// That memory is used again by the next such layer.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>

#include "bf12/matrix.h"
#include "bf12/rows.h"
#include "bf12/table.h"
#include "chain/table.h"
#include "common/by_torch.h"
#include "linear/arguments.h"
#include "linear/gated.h"
#include "linear/limits.h"
#include "linear/linear.h"
#include "linear/panels.h"
#include "linear/tile_results.h"
#include "tiles/work.h"

namespace dlinfer::bf12 {
namespace {

using layers::MaybeTensor;
using layers::Tensor;
using torch::headeronly::ScalarType;

const BFloat16* data(const Tensor& t) { return static_cast<const BFloat16*>(t.const_data_ptr()); }

void check(const Tensor& x, const Tensor& weight, const MaybeTensor& bias, int64_t out_features) {
  STD_TORCH_CHECK(x.dim() >= 1 && x.scalar_type() == ScalarType::BFloat16, "linear_bf12: x is a bfloat16 tensor");
  STD_TORCH_CHECK(weight.is_cpu(), "linear_bf12: weight is not on the CPU");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == out_features && bias->is_cpu() &&
                            bias->scalar_type() == ScalarType::BFloat16),
                  "linear_bf12: bias is a bfloat16 tensor [out_features = ", out_features, "]");
}

void multiply(const PackedWeight& weight, Rows<const BFloat16> x, int64_t columns, const BFloat16* bias, BFloat16* out) {
  const int64_t rows = block_rows<BFloat16>(columns), features = weight.rows();
  const int64_t blocks = (features + rows - 1) / rows;
  for_panels(x.count, blocks, weight.bytes(rows), [&](int64_t c, int64_t inputs, int64_t begin, int64_t end) {
    const Rows<const BFloat16> some{x.data + c * x.stride, x.stride, inputs};
    for (int64_t i = begin; i < end; ++i) {
      const int64_t r = i * rows;
      block<kPanelInputs>(weight, r, std::min(rows, features - r), some, bias ? bias + r : nullptr,
                          {out + c * features + r, features, inputs}, i + 1 < end);
    }
  });
}

#if defined(DLINFER_HAS_PANELS)
struct Source {
  const Matrix& matrix;
  Exponents exponents;
};

void unpack_rows(const void* source, int64_t first, int64_t count, int64_t column, int64_t width, int64_t stride,
                 tiles::Byte* to) {
  static_assert(tiles::kDepthUnit * tiles::kWidth == kGroup * sizeof(BFloat16));
  const auto& [matrix, exponents] = *static_cast<const Source*>(source);
  const int64_t begin = column / sizeof(BFloat16), numbers = width / sizeof(BFloat16);
  for (int64_t row = 0; row < count; row += kStrip, to += kStrip * stride) {
    const int64_t strip = (first + row) / kStrip;
    Exceptions exceptions = matrix.exceptions(strip);
    exceptions.skip(begin);
    unpack_strip(matrix.group(strip, begin), exponents, begin, numbers, exceptions, reinterpret_cast<uint16_t*>(to),
                 stride / sizeof(BFloat16));
  }
}

// The product by tiles, each panel of the weight unpacked as it is needed.
void multiply_in_tiles(const Matrix& matrix, Rows<const BFloat16> x, const BFloat16* bias, bool gated, BFloat16* out) {
  const Source source{matrix, Exponents(matrix.base())};
  const Rows<const tiles::Byte> memory{matrix.strip(0), matrix.strip_bytes() / kStrip, matrix.rows()};
  const tiles::Panels panels{memory, gated, unpack_rows, &source};
  const int64_t features = panels.features();
  tiles::multiply<tiles::Type::kBFloat16, tiles::BFloat16Job>(
      tiles::as_bytes(x), matrix.columns() * sizeof(BFloat16), {{panels, bias, {out, features, x.count}}});
}
#endif

Tensor linear_bf12(Tensor x, Tensor weight, MaybeTensor bias, int64_t out_features) {
  check(x, weight, bias, out_features);
  const int64_t columns = x.size(x.dim() - 1), inputs = layers::leading_count(x);
  const Matrix matrix(weight, out_features, columns);
  if (inputs > max_packed_inputs() && !tiles_take(ScalarType::BFloat16, inputs)) return linear(x, unpacked(matrix), bias);
  x = layers::with_even_rows(x);
  if (bias && !layers::dense_rows(*bias)) bias = torch::stable::contiguous(*bias);
  Tensor out = layers::empty_result(x, out_features);
#if defined(DLINFER_HAS_PANELS)
  if (tiles_take(ScalarType::BFloat16, inputs)) {
    multiply_in_tiles(matrix, {data(x), layers::row_stride(x), inputs}, bias ? data(*bias) : nullptr, false,
                      static_cast<BFloat16*>(out.mutable_data_ptr()));
    return out;
  }
#endif
  multiply(PackedWeight(matrix), {data(x), layers::row_stride(x), inputs}, columns, bias ? data(*bias) : nullptr,
           static_cast<BFloat16*>(out.mutable_data_ptr()));
  return out;
}

Tensor linear_bf12_silu_and_mul(Tensor x, Tensor weight, MaybeTensor bias, int64_t out_features) {
  check(x, weight, bias, out_features);
  STD_TORCH_CHECK(out_features % 2 == 0, "linear_bf12_silu_and_mul: weight is [2 * intermediate, in_features]");
  const int64_t columns = x.size(x.dim() - 1), inputs = layers::leading_count(x), features = out_features / 2;
  const Matrix matrix(weight, out_features, columns);
  if ((inputs > max_packed_inputs() && !tiles_take(ScalarType::BFloat16, inputs)) || features % kStrip != 0) {
    return by_torch("dlinfer_cpu::silu_and_mul", linear_bf12(x, weight, bias, out_features));
  }
  x = layers::with_even_rows(x);
  if (bias && !layers::dense_rows(*bias)) bias = torch::stable::contiguous(*bias);
  Tensor out = layers::empty_result(x, features);
#if defined(DLINFER_HAS_PANELS)
  if (tiles_take(ScalarType::BFloat16, inputs)) {
    multiply_in_tiles(matrix, {data(x), layers::row_stride(x), inputs}, bias ? data(*bias) : nullptr, true,
                      static_cast<BFloat16*>(out.mutable_data_ptr()));
    return out;
  }
#endif
  multiply_gated(PackedWeight(matrix), {data(x), layers::row_stride(x), inputs}, columns,
                 bias ? data(*bias) : nullptr, static_cast<BFloat16*>(out.mutable_data_ptr()));
  return out;
}

}  // namespace
}  // namespace dlinfer::bf12

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("linear_bf12(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor");
  library.def("linear_bf12_silu_and_mul(Tensor x, Tensor weight, Tensor? bias, int out_features) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  using dlinfer::chain::put_linear;
  using dlinfer::chain::Weight;
  put_linear(library, "linear_bf12", TORCH_BOX(&dlinfer::bf12::linear_bf12));
  put_linear(library, "linear_bf12_silu_and_mul", TORCH_BOX(&dlinfer::bf12::linear_bf12_silu_and_mul), Weight::kHalves);
}
