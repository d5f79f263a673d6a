// dlinfer_cpu::fused_moe and dlinfer_cpu::fused_moe_clamped: for each token the weighted sum of its experts' MLPs.
//
// Weights are read where they lie, those of the chosen experts only, each once for all its tokens.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <utility>

#include "chain/table.h"
#include "common/with_type.h"
#include "linear/linear.h"
#include "moe/mixture.h"

namespace dlinfer::moe {
namespace {

using MaybeTensor = std::optional<Tensor>;

struct Call {
  const char* op;
  Tensor hidden, gate_up, down, weights, ids;
  MaybeTensor gate_up_bias, down_bias;
  bool renormalize;
  Activation activation;
};

bool dense_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.size(last) <= 1 || t.stride(last) == 1;
}

void check(const Call& call) {
  const int64_t hidden = call.hidden.size(1), intermediate = call.down.size(2), experts = call.gate_up.size(0);
  STD_TORCH_CHECK(call.gate_up.size(1) == 2 * intermediate && call.gate_up.size(2) == hidden &&
                      call.down.size(0) == experts && call.down.size(1) == hidden,
                  "fused_moe: sizes of hidden_states, gate_up_weights and down_weights differ");
  STD_TORCH_CHECK(call.ids.size(0) == call.hidden.size(0) && call.weights.size(0) == call.hidden.size(0) &&
                      call.ids.size(1) == call.weights.size(1),
                  "fused_moe: topk_weights and topk_ids are [tokens, topk]");
  for (const Tensor* t : {&call.gate_up, &call.down}) {
    STD_TORCH_CHECK(t->scalar_type() == call.hidden.scalar_type(), "fused_moe: one dtype");
  }
  const auto check_bias = [&](const MaybeTensor& bias, const Tensor& weight) {
    STD_TORCH_CHECK(!bias || (bias->size(0) == weight.size(0) && bias->size(1) == weight.size(1) &&
                              bias->scalar_type() == weight.scalar_type() && dense_rows(*bias)),
                    "fused_moe: a bias is [experts, out], of its weight's dtype, its rows without gaps");
  };
  check_bias(call.gate_up_bias, call.gate_up);
  check_bias(call.down_bias, call.down);
  check_ids(call.ids, experts, call.op);
}

template <class T>
Stack<T> stack(const Tensor& weight, const MaybeTensor& bias) {
  return {data<T>(weight), weight.stride(0), weight.stride(1), weight.size(0), weight.size(1), weight.size(2),
          bias ? data<T>(*bias) : nullptr, bias ? bias->stride(0) : 0};
}

// The most rows of an expert that experts.h takes: none where a weight's columns lie apart, which is torch's to read.
template <class T>
int64_t most_rows_of(const Call& call) {
  return dense_rows(call.gate_up) && dense_rows(call.down) ? most_rows<T>() : 0;
}

Tensor run(const Call& call) {
  check(call);
  const auto product = [&](Layer layer, const Tensor& x, int64_t expert) {
    const auto of = [&](const Tensor& stack) { return torch::stable::select(stack, 0, expert); };
    if (layer == Layer::kDown) return linear(x, of(call.down), std::nullopt);
    return linear(x, of(call.gate_up), call.gate_up_bias ? MaybeTensor(of(*call.gate_up_bias)) : std::nullopt);
  };
  return with_type(call.hidden.scalar_type(), "fused_moe", [&]<class T>(T) {
    const Choice choice{call.weights, call.ids, call.renormalize, call.activation};
    return mix(call.hidden, choice, stack<T>(call.gate_up, call.gate_up_bias), stack<T>(call.down, call.down_bias),
               most_rows_of<T>(call), product);
  });
}

Tensor fused_moe(Tensor hidden_states, Tensor gate_up_weights, Tensor down_weights, Tensor topk_weights,
                 Tensor topk_ids, bool renormalize) {
  return run({"fused_moe", std::move(hidden_states), std::move(gate_up_weights), std::move(down_weights),
              std::move(topk_weights), std::move(topk_ids), std::nullopt, std::nullopt, renormalize, {}});
}

Tensor fused_moe_clamped(Tensor hidden_states, Tensor gate_up_weights, Tensor gate_up_bias, Tensor down_weights,
                         Tensor down_bias, Tensor topk_weights, Tensor topk_ids, double alpha, double limit) {
  STD_TORCH_CHECK(limit > 0, "fused_moe_clamped: limit is positive, got ", limit);
  const auto dense = [](Tensor bias) { return dense_rows(bias) ? bias : torch::stable::contiguous(bias); };
  return run({"fused_moe_clamped", std::move(hidden_states), std::move(gate_up_weights), std::move(down_weights),
              std::move(topk_weights), std::move(topk_ids), dense(std::move(gate_up_bias)), dense(std::move(down_bias)), false,
              {float(alpha), float(limit)}});
}

}  // namespace
}  // namespace dlinfer::moe

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def(
      "fused_moe(Tensor hidden_states, Tensor gate_up_weights, Tensor down_weights, Tensor topk_weights, "
      "Tensor topk_ids, bool renormalize) -> Tensor");
  library.def(
      "fused_moe_clamped(Tensor hidden_states, Tensor gate_up_weights, Tensor gate_up_bias, Tensor down_weights, "
      "Tensor down_bias, Tensor topk_weights, Tensor topk_ids, float alpha, float limit) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "fused_moe", TORCH_BOX(&dlinfer::moe::fused_moe));
  dlinfer::chain::put(library, "fused_moe_clamped", TORCH_BOX(&dlinfer::moe::fused_moe_clamped));
}
