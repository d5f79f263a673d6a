// dlinfer_cpu::moe_gating_topk_softmax: the softmax of each token's logits over all experts, and its largest.
//
// Roofline: a row is read once and stays in the first-level cache. It takes some 25 instructions for exp of kLanes
// logits, and for each logit a comparison with the least that is kept, which few logits pass. That is 0.3 us for 128
// experts, less than a hundredth of what the experts take that it chooses. torch's softmax and topk, a call each, take
// 20 us for it.
//
// Sums are taken in the same order for every row, so a token's experts do not depend on its batch. Of equal
// probabilities the first expert's is taken. A row with NaN, or whose largest logit is infinite, has NaN for
// probabilities, as in torch, and names experts all the same.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <vector>

#include "chain/table.h"
#include "common/result_memory.h"
#include "common/tensor_rows.h"
#include "common/with_type.h"
#include "threads/team.h"

namespace dlinfer::moe {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Below this many logits a thread is done before another one has begun.
constexpr int64_t kLogitsPerThread = 8 << 10;

float largest_of(const std::vector<float>& row, int64_t experts) {
  float largest = -std::numeric_limits<float>::infinity();
  for (int64_t e = 0; e < experts; ++e) largest = row[e] > largest ? row[e] : largest;
  return largest;
}

// Replaces `row` by exp of the distance to its maximum; returns their sum. kLanes more numbers follow the experts'.
template <class T>
float exponentials(const T* logits, int64_t experts, std::vector<float>& row) {
  for (int64_t e = 0; e < experts; ++e) row[e] = float(logits[e]);
  const Floats largest = all_lanes(largest_of(row, experts));
  Floats sums{};
  for (int64_t e = 0; e < experts; e += kLanes) {
    const Floats value = exp_of_negative(load_as<Floats>(row.data() + e) - largest);
    std::memcpy(row.data() + e, &value, sizeof value);
    for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, experts - e); ++lane) sums[lane] += value[lane];
  }
  sum_lanes<1>(&sums);
  return sums[0];
}

// The largest `count` of [begin, end), in falling order.
void choose(const std::vector<float>& row, int64_t begin, int64_t end, int64_t count, float* chosen, int64_t* ids) {
  int64_t kept = 0;
  for (int64_t e = begin; e < end; ++e) {
    const float value = row[e];
    if (kept == count && !(value > chosen[kept - 1])) continue;
    int64_t at = kept < count ? kept++ : kept - 1;
    for (; at > 0 && value > chosen[at - 1]; --at) chosen[at] = chosen[at - 1], ids[at] = ids[at - 1];
    chosen[at] = value, ids[at] = e;
  }
}

template <class T>
void run(const Tensor& logits, int64_t topk, int64_t groups, float* weights, int64_t* ids) {
  const int64_t experts = logits.size(logits.dim() - 1), rows = logits.numel() / experts;
  const int64_t size = experts / groups, share = topk / groups;
  const TensorRows<T> from(logits);
  parallel_for(0, rows, std::max<int64_t>(kLogitsPerThread / experts, 1), [&](int64_t begin, int64_t end) {
    std::vector<float> row(experts + kLanes);
    for (int64_t i = begin; i < end; ++i) {
      float* const chosen = weights + i * topk;
      const float sum = exponentials(from[i], experts, row);
      for (int64_t g = 0; g < groups; ++g) {
        choose(row, g * size, (g + 1) * size, share, chosen + g * share, ids + i * topk + g * share);
      }
      for (int64_t k = 0; k < topk; ++k) chosen[k] /= sum;
    }
  });
}

std::tuple<Tensor, Tensor> moe_gating_topk_softmax(Tensor router_logits, int64_t topk, int64_t n_groups) {
  const int64_t dims = router_logits.dim(), groups = std::max<int64_t>(n_groups, 1);
  STD_TORCH_CHECK(dims >= 1, "moe_gating_topk_softmax: router_logits needs at least one dimension");
  const int64_t experts = router_logits.size(dims - 1);
  STD_TORCH_CHECK(topk >= 1 && topk <= experts && topk % groups == 0 && experts % groups == 0,
                  "moe_gating_topk_softmax: topk = ", topk, " of ", experts, " experts in ", groups, " groups");
  const auto shape = router_logits.sizes();
  std::vector<int64_t> sizes(shape.begin(), shape.end());
  sizes.back() = topk;
  Tensor weights = empty_packed(sizes, ScalarType::Float, sizeof(float));
  Tensor ids = empty_packed(sizes, ScalarType::Long, sizeof(int64_t));
  with_type(router_logits.scalar_type(), "moe_gating_topk_softmax", [&]<class T>(T) {
    run<T>(router_logits, topk, groups, static_cast<float*>(weights.mutable_data_ptr()),
           static_cast<int64_t*>(ids.mutable_data_ptr()));
  });
  return {weights, ids};
}

}  // namespace
}  // namespace dlinfer::moe

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("moe_gating_topk_softmax(Tensor router_logits, int topk, int n_groups) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "moe_gating_topk_softmax", TORCH_BOX(&dlinfer::moe::moe_gating_topk_softmax));
}
