// dlinfer_cpu::scaled_dot_product_attention: torch's, where each query sees a range of keys. These are all keys, those
// before the query (is_causal), or those that a mask of booleans, or of zeros and minus infinities, leaves visible.
//
// Hidden keys are neither read nor multiplied. A prompt of 512 tokens in a static cache of 1024 places takes a quarter
// of all products, and a decode step a part of the cache's memory. One token goes the way of decode steps
// (decode_pieces.h), more that of prompts (prefill_pieces.h); the masks are read by visible.h. Other calls go
// to torch's own kernel.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "attention/decode_pieces.h"
#include "attention/prefill_pieces.h"
#include "attention/visible.h"
#include "chain/table.h"
#include "common/by_torch.h"
#include "common/result_memory.h"

namespace dlinfer::sdpa {
namespace {

using attention::Keys;
using attention::MaybeTensor;
using attention::ScalarType;
using attention::Tensor;
using attention::Visible;

struct Given {
  Tensor q, k, v;  // [batch, heads or key heads, queries or keys, size]
  MaybeTensor mask;
  double dropout;
  bool causal;
  std::optional<double> scale;
  bool grouped;

  int64_t batch() const { return q.size(0); }
  int64_t queries() const { return q.size(2); }
  int64_t keys() const { return k.size(2); }
};

Tensor by_torch(const Given& given) {
  return dlinfer::by_torch("aten::scaled_dot_product_attention", given.q, given.k, given.v, given.mask, given.dropout,
                           given.causal, given.scale, given.grouped);
}

// Whether the kernels read these tensors as they are. Calls that are no attention at all go to torch, which refuses
// them.
bool fits(const Given& given) {
  const ScalarType type = given.q.scalar_type();
  if (type != ScalarType::Float && type != ScalarType::BFloat16 && type != ScalarType::Half) return false;
  for (const Tensor* t : {&given.q, &given.k, &given.v}) {
    if (!t->is_cpu() || t->scalar_type() != type || t->dim() != 4 || t->size(0) != given.batch() || t->numel() == 0) {
      return false;
    }
    if (t->size(3) > 1 && t->stride(3) != 1) return false;
  }
  const int64_t heads = given.q.size(1), kv_heads = given.k.size(1);
  if (given.v.size(1) != kv_heads || given.v.size(2) != given.keys() || given.k.size(3) != given.q.size(3)) return false;
  if (given.grouped ? heads % kv_heads != 0 : heads != kv_heads) return false;
  if (given.keys() >= std::numeric_limits<int32_t>::max() || given.dropout != 0) return false;
  if (given.mask && (given.causal || !given.mask->is_cpu())) return false;
  return true;
}

// Of each query of each sequence; nothing where a mask says more than that.
std::optional<std::vector<Keys>> visible(const Given& given) {
  const int64_t queries = given.queries(), keys = given.keys();
  std::vector<Keys> found(given.batch() * queries, Keys{0, int32_t(keys)});
  if (given.mask) {
    const auto read = Visible::of(*given.mask);
    if (!read || given.mask->size(given.mask->dim() - 1) != keys) return std::nullopt;
    if ((read->batch() != 1 && read->batch() != given.batch()) || (read->queries() != 1 && read->queries() != queries)) {
      return std::nullopt;
    }
    for (int64_t i = 0; i < int64_t(found.size()); ++i) found[i] = (*read)(i / queries, i % queries);
  } else if (given.causal) {
    for (int64_t i = 0; i < int64_t(found.size()); ++i) found[i].end = int32_t(std::min(i % queries + 1, keys));
  }
  return found;
}

// Sizes and strides that both ways take, with a block for each sequence. out: [batch, queries, heads, size].
template <class Call>
Call call_of(const Given& given, const Tensor& out) {
  Call call{};
  call.heads = given.q.size(1), call.kv_heads = given.k.size(1), call.group = call.heads / call.kv_heads;
  call.size = given.q.size(3), call.size_v = given.v.size(3), call.block_size = given.keys();
  call.k_block = given.k.stride(0), call.k_head = given.k.stride(1), call.k_slot = given.k.stride(2);
  call.v_block = given.v.stride(0), call.v_head = given.v.stride(1), call.v_slot = given.v.stride(2);
  call.blocks.resize(given.batch());
  std::iota(call.blocks.begin(), call.blocks.end(), 0);
  return call;
}

// Whether queries are one token's: the only one's, or those of heads that stand as rows behind their key head, which
// see the same. So few are a group; more gain from being prompts.
constexpr int64_t kMostRows = 32;
bool is_one_token(const Given& given, const std::vector<Keys>& visible) {
  const int64_t queries = given.queries();
  if (queries == 1) return true;
  if (queries > kMostRows || given.q.size(1) != given.k.size(1)) return false;
  for (int64_t i = 0; i < int64_t(visible.size()); ++i) {
    const Keys &one = visible[i], &first = visible[i / queries * queries];
    if (one.begin != first.begin || one.end != first.end) return false;
  }
  return true;
}

void run_decode(const Given& given, const std::vector<Keys>& visible, float scale, const Tensor& out) {
  const int64_t queries = given.queries(), way = queries == 1 ? 1 : 2;  // the dimension along which a group stands in q
  auto call = call_of<decode::Call>(given, out);
  call.sequences = given.batch(), call.columns = 1, call.scale = scale, call.softcap = 0;
  call.heads *= queries, call.group *= queries;
  call.q_row = given.q.stride(0), call.out_row = out.stride(0);
  call.q_head = given.q.stride(way), call.out_head = out.stride(3 - way);
  call.q_group = way == 1 ? call.group * call.q_head : given.q.stride(1);
  call.out_group = way == 1 ? call.group * call.out_head : out.stride(2);
  for (int64_t b = 0; b < call.sequences; ++b) {
    call.first.push_back(visible[b * queries].begin), call.lengths.push_back(visible[b * queries].end);
  }
  decode::run(call, given.q, given.k, given.v, out);
}

void run_prefill(const Given& given, const std::vector<Keys>& visible, float scale, const Tensor& out) {
  const int64_t batch = given.batch(), queries = given.queries();
  Tensor q = given.q;
  // Queries are counted through the batch, so one stride has to lead from each to the next.
  if (batch > 1 && q.stride(0) != queries * q.stride(2)) {
    q = torch::stable::transpose(torch::stable::contiguous(torch::stable::transpose(q, 1, 2)), 1, 2);
  }
  auto call = call_of<prefill::Call>(given, out);
  call.q_row = q.stride(2), call.q_head = q.stride(1), call.out_row = out.stride(1), call.out_head = out.stride(2);
  call.shape = {scale, 0.0f, false, 0, 0};
  for (int64_t b = 0; b < batch; ++b) {
    call.sequences.push_back(
        {b * queries, queries, given.keys(), 0, call.blocks.data() + b, visible.data() + b * queries});
  }
  prefill::run(call, q, given.k, given.v, out);
}

Tensor scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, MaybeTensor attn_mask, double dropout_p,
                                    bool is_causal, std::optional<double> scale, bool enable_gqa) {
  const Given given{std::move(query), std::move(key),  std::move(value), std::move(attn_mask),
                    dropout_p,        is_causal,       scale,            enable_gqa};
  const auto ranges = fits(given) ? visible(given) : std::nullopt;
  if (!ranges) return by_torch(given);
  const bool one_token = is_one_token(given, *ranges);
  const Tensor out = empty_packed({given.batch(), given.queries(), given.q.size(1), given.v.size(3)},
                                  given.q.scalar_type(), given.q.element_size());
  const float factor = float(scale ? *scale : 1 / std::sqrt(double(given.q.size(3))));
  (one_token ? run_decode : run_prefill)(given, *ranges, factor, out);
  return torch::stable::transpose(out, 1, 2);
}

}  // namespace
}  // namespace dlinfer::sdpa

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def(
      "scaled_dot_product_attention(Tensor query, Tensor key, Tensor value, Tensor? attn_mask=None, "
      "float dropout_p=0.0, bool is_causal=False, *, float? scale=None, bool enable_gqa=False) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "scaled_dot_product_attention", TORCH_BOX(&dlinfer::sdpa::scaled_dot_product_attention));
}
