// dlinfer_cpu::weight_quant_matmul: a linear layer whose weight is of 4 bits, as AWQ packs it. weight_quant_matmul_int8
// rounds x to 8 bits where the processor multiplies those faster. In mxfp4_matmul four bits are a float.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "chain/table.h"
#include "common/invariance.h"
#include "common/result_memory.h"
#include "common/with_type.h"
#include "int4/layer.h"
#include "int4/product.h"

namespace dlinfer::int4 {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

Kind kind_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return kKind<float>;
    case ScalarType::BFloat16:
      return kKind<BFloat16>;
    case ScalarType::Half:
      return kKind<Half>;
    default:
      STD_TORCH_CHECK(false, "weight_quant_matmul: ", name, " is no float32, bfloat16 or float16 tensor");
  }
}

// Whether neighbours along the last dimension are neighbours in memory.
Tensor with_dense_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.size(last) <= 1 || t.stride(last) == 1 ? t : torch::stable::contiguous(t);
}

// Rows of x as they lie: the next begins `stride` numbers on.
struct Rows {
  const Tensor& tensor;
  int64_t stride, count;
};

template <class Tiles, Numbers kNumbers, class T>
void multiply(Layer layer, const Rows& x, void* out) {
  if (layer.has_wide_rows()) layer.strip_rows = Tiles::kWideStripRows;
  Inputs<Tiles> inputs(layer, x.count);
  inputs.pack(static_cast<const T*>(x.tensor.const_data_ptr()), x.stride, layer);
  Product<Tiles, kNumbers>(layer, inputs, out, kKind<T>).run();
}

// Whether strips have an even number of rows, or are the only ones: x then is taken in pairs where it can.
[[maybe_unused]] bool has_pairs(const Layer& layer) { return layer.group % 2 == 0 || layer.group >= layer.in; }

#if defined(DLINFER_HAS_INT4_TILES)
constexpr int64_t kTileRows = 5;  // of x; fewer are bound by reading the weight

template <class Tiles, Numbers kNumbers, class T>
void multiply_tiles(const Layer& layer, const Rows& x, void* out) {
  TileInputs<Tiles> inputs(layer, x.count);
  inputs.pack(static_cast<const T*>(x.tensor.const_data_ptr()), x.stride, layer);
  Product<Tiles, kNumbers, TileInputs<Tiles>>(layer, inputs, out, kKind<T>).run();
}
#endif

#if defined(DLINFER_HAS_INT4_ROUNDED)
constexpr int64_t kRoundedTileRows = kMostRows + 1;  // fewer are faster without tiles, by 1.2 to 2 times

bool can_round(const Layer& layer) { return layer.group % RoundedTiles::kRowsOfX == 0 || layer.group >= layer.in; }

template <class T>
void multiply_rounded(const Layer& layer, const Rows& x, void* out) {
#if defined(DLINFER_HAS_INT4_TILES)
  if (x.count >= kRoundedTileRows && tiles_granted()) {
    return multiply_tiles<RoundedTiles, Numbers::kWhole, T>(layer, x, out);
  }
#endif
  RoundedInputs inputs(layer, x.count);
  inputs.pack(static_cast<const T*>(x.tensor.const_data_ptr()), x.stride, layer);
  Product<RoundedTiles, Numbers::kWhole, RoundedInputs>(layer, inputs, out, kKind<T>).run();
}
#endif

// rounds: x may be rounded to 8 bits, where that is faster.
template <Numbers kNumbers>
void multiply(const Layer& layer, const Rows& x, void* out, [[maybe_unused]] bool rounds) {
  with_type(x.tensor.scalar_type(), "weight_quant_matmul", [&](auto example) {
    using T = decltype(example);
#if defined(DLINFER_HAS_INT4_ROUNDED)
    if constexpr (kNumbers == Numbers::kWhole) {
      if (rounds && can_round(layer)) return multiply_rounded<T>(layer, x, out);
    }
#endif
#if defined(DLINFER_HAS_INT4_TILES)
    if constexpr (std::is_same_v<T, BFloat16>) {
      if ((x.count >= kTileRows || batch_invariant()) && tiles_granted()) {
        return multiply_tiles<PairTiles, kNumbers, T>(layer, x, out);
      }
    }
#endif
#if defined(DLINFER_HAS_INT4_PAIRS)
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (has_pairs(layer)) return multiply<PairTiles, kNumbers, T>(layer, x, out);
    }
#endif
    multiply<FloatTiles, kNumbers, T>(layer, x, out);
  });
}

void check(const Tensor& x, const Tensor& qweight, const Tensor& scales, const MaybeTensor& offset,
           const MaybeTensor& bias, int64_t group) {
  STD_TORCH_CHECK(x.dim() >= 1 && qweight.dim() == 2 && scales.dim() == 2 && (!offset || offset->dim() == 2) &&
                      (!bias || bias->dim() == 1),
                  "weight_quant_matmul: a number of dimensions is wrong");
  const int64_t in = qweight.size(0), out = scales.size(1), groups = (in + group - 1) / group;
  STD_TORCH_CHECK(x.size(x.dim() - 1) == in, "weight_quant_matmul: x has ", x.size(x.dim() - 1),
                  " in_features, qweight has ", in);
  STD_TORCH_CHECK(qweight.size(1) * kNibbles == out && scales.size(0) == groups,
                  "weight_quant_matmul: scales are [groups = ", groups, ", out_features = ", qweight.size(1) * kNibbles, "]");
  STD_TORCH_CHECK(!offset || (offset->size(0) == groups && offset->size(1) == qweight.size(1)),
                  "weight_quant_matmul: offset is [groups = ", groups, ", words = ", qweight.size(1), "]");
  STD_TORCH_CHECK(!bias || bias->size(0) == out, "weight_quant_matmul: bias is [out_features = ", out, "]");
  STD_TORCH_CHECK(qweight.scalar_type() == ScalarType::Int && (!offset || offset->scalar_type() == ScalarType::Int),
                  "weight_quant_matmul: qweight and offset are int32");
  STD_TORCH_CHECK(qweight.is_cpu() && scales.is_cpu() && (!offset || offset->is_cpu()) && (!bias || bias->is_cpu()),
                  "weight_quant_matmul: not all tensors are on the CPU");
}

template <Numbers kNumbers>
Tensor product(Tensor x, Tensor qweight, Tensor scales, MaybeTensor offset, MaybeTensor bias, int64_t group_size,
               bool rounds) {
  const int64_t group = group_size > 0 ? group_size : std::max<int64_t>(qweight.size(0), 1);
  check(x, qweight, scales, offset, bias, group);
  const Kind kind = kind_of(x, "x"), scales_kind = kind_of(scales, "scales");
  const int64_t rank = x.dim(), in = qweight.size(0), out_features = scales.size(1);

  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end()), strides(rank, 1);
  sizes[rank - 1] = out_features;
  int64_t rows = 1;
  for (int64_t d = rank - 1; d > 0; --d) {
    strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
    rows *= sizes[d - 1];
  }
  Tensor out = empty_strided(sizes, strides, x.scalar_type(), kind.bytes);
  if (rows == 0 || out_features == 0) return out;

  qweight = with_dense_rows(qweight);
  scales = with_dense_rows(scales);
  if (offset) offset = with_dense_rows(*offset);
  if (rank > 2 || rank == 1) {
    x = torch::stable::contiguous(x);
  } else {
    x = with_dense_rows(x);
  }
  std::unique_ptr<float[]> bias_numbers;
  if (bias) {
    const Tensor dense = torch::stable::contiguous(*bias);
    bias_numbers.reset(new float[out_features]);
    kind_of(dense, "bias").widen(dense.const_data_ptr(), 0, out_features, bias_numbers.get());
  }
  const auto words = [](const Tensor& t) { return static_cast<const uint32_t*>(t.const_data_ptr()); };
  const Layer layer{words(qweight),
                    qweight.stride(0),
                    scales.const_data_ptr(),
                    scales.stride(0),
                    scales_kind,
                    offset ? words(*offset) : nullptr,
                    offset ? offset->stride(0) : 0,
                    bias_numbers.get(),
                    in,
                    out_features,
                    group};
  multiply<kNumbers>(layer, Rows{x, rank == 2 ? x.stride(0) : in, rows}, out.mutable_data_ptr(), rounds);
  return out;
}

Tensor weight_quant_matmul(Tensor x, Tensor qweight, Tensor scales, MaybeTensor offset, MaybeTensor bias,
                           int64_t group_size) {
  return product<Numbers::kWhole>(x, qweight, scales, offset, bias, group_size, false);
}

Tensor weight_quant_matmul_int8(Tensor x, Tensor qweight, Tensor scales, MaybeTensor offset, MaybeTensor bias,
                                int64_t group_size) {
  return product<Numbers::kWhole>(x, qweight, scales, offset, bias, group_size, true);
}

Tensor mxfp4_matmul(Tensor x, Tensor qweight, Tensor scales, int64_t group_size) {
  return product<Numbers::kE2M1>(x, qweight, scales, std::nullopt, std::nullopt, group_size, false);
}

}  // namespace
}  // namespace dlinfer::int4

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def(
      "weight_quant_matmul(Tensor x, Tensor qweight, Tensor scales, Tensor? offset, Tensor? bias, int group_size) -> "
      "Tensor");
  library.def(
      "weight_quant_matmul_int8(Tensor x, Tensor qweight, Tensor scales, Tensor? offset, Tensor? bias, int group_size) "
      "-> Tensor");
  library.def("mxfp4_matmul(Tensor x, Tensor qweight, Tensor scales, int group_size) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put_linear(library, "weight_quant_matmul", TORCH_BOX(&dlinfer::int4::weight_quant_matmul));
  dlinfer::chain::put_linear(library, "weight_quant_matmul_int8", TORCH_BOX(&dlinfer::int4::weight_quant_matmul_int8));
  dlinfer::chain::put_linear(library, "mxfp4_matmul", TORCH_BOX(&dlinfer::int4::mxfp4_matmul));
}
