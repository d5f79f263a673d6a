// dlinfer_cpu::fused_moe_bf12: moe/'s mixture of experts with weights that are packed without loss; its results, bit for
// bit. The experts of a layer are one matrix, a decode step reads the rows of those that are chosen.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>

#include "bf12/matrix.h"
#include "bf12/rows.h"
#include "bf12/table.h"
#include "chain/table.h"
#include "linear/linear.h"
#include "moe/mixture.h"

namespace dlinfer::bf12 {
namespace {

using moe::Layer;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// As moe/experts.h's Stack.
struct PackedStack {
  using Type = BFloat16;

  PackedStack(const Matrix& matrix, int64_t experts)
      : weight(matrix), experts(experts), rows(matrix.rows() / std::max<int64_t>(experts, 1)), columns(matrix.columns()) {}

  const void* at(int64_t expert, int64_t row) const { return weight.at(expert * rows + row); }
  float bias_of(int64_t, int64_t) const { return 0; }
  void block_sums(int64_t expert, int64_t row, int64_t count, Rows<const BFloat16> x, const void* next,
                  float* sums) const {
    weight.block_sums(expert * rows + row, count, x, next, sums);
  }

  PackedWeight weight;
  const void* bias = nullptr;
  int64_t experts, rows, columns;
};

Tensor fused_moe_bf12(Tensor hidden_states, Tensor gate_up_weights, Tensor down_weights, Tensor topk_weights,
                      Tensor topk_ids, bool renormalize, int64_t num_experts, int64_t intermediate_size) {
  STD_TORCH_CHECK(hidden_states.dim() == 2 && hidden_states.scalar_type() == ScalarType::BFloat16,
                  "fused_moe_bf12: hidden_states is a bfloat16 tensor [tokens, hidden]");
  const int64_t tokens = hidden_states.size(0), hidden = hidden_states.size(1);
  STD_TORCH_CHECK(hidden % kStrip == 0 && intermediate_size % kStrip == 0, "fused_moe_bf12: sizes of hidden (", hidden,
                  ") and intermediate (", intermediate_size, ") states are multiples of ", kStrip);
  STD_TORCH_CHECK(topk_ids.dim() == 2 && topk_weights.dim() == 2 && topk_ids.size(0) == tokens &&
                      topk_weights.size(0) == tokens && topk_ids.size(1) == topk_weights.size(1),
                  "fused_moe_bf12: topk_weights and topk_ids are [tokens, topk]");
  moe::check_ids(topk_ids, num_experts, "fused_moe_bf12");
  const Matrix gate_up(gate_up_weights, num_experts * 2 * intermediate_size, hidden);
  const Matrix down(down_weights, num_experts * hidden, intermediate_size);
  const auto product = [&](Layer layer, const Tensor& x, int64_t expert) {
    const Matrix& matrix = layer == Layer::kGateUp ? gate_up : down;
    const int64_t rows = matrix.rows() / num_experts;
    return linear(x, unpacked(matrix, expert * rows, rows), std::nullopt);
  };
  return moe::mix(hidden_states, {topk_weights, topk_ids, renormalize, {}}, PackedStack(gate_up, num_experts),
                  PackedStack(down, num_experts), moe::most_rows<BFloat16>(), product);
}

}  // namespace
}  // namespace dlinfer::bf12

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def(
      "fused_moe_bf12(Tensor hidden_states, Tensor gate_up_weights, Tensor down_weights, Tensor topk_weights, "
      "Tensor topk_ids, bool renormalize, int num_experts, int intermediate_size) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "fused_moe_bf12", TORCH_BOX(&dlinfer::bf12::fused_moe_bf12));
}
