// dlinfer_cpu::prefill_attention and paged_prefill_attention: queries of several sequences over keys and values that
// stand packed, or in the pages of the cache (prefill_pieces.h).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "attention/arguments.h"
#include "attention/paged_prefill.h"
#include "attention/prefill_pieces.h"
#include "chain/table.h"

namespace dlinfer::prefill {
namespace {

using attention::apart;
using attention::numbers;
using attention::whole_numbers;

constexpr int64_t kFar = int64_t(1) << 30;  // no key is so far from a query

void run_apart(Call call, const Tensor& given, const Tensor& k, const Tensor& v, const Tensor& out) {
  const Tensor q = apart(given, out);
  call.q_row = q.stride(0), call.q_head = q.stride(1);
  run(call, q, k, v, out);
}

// The shared part of both ops. k and v: [..., key heads, size].
Call call_of(const Tensor& q, const Tensor& k, const Tensor& v, const std::vector<int64_t>& ends,
             const std::vector<int64_t>& lengths, const Tensor& out, double scale, bool causal, int64_t window_left,
             int64_t window_right, double softcap, const MaybeTensor& slopes, const MaybeTensor& sinks) {
  STD_TORCH_CHECK(q.dim() == 3 && out.dim() == 3, "prefill attention: q and attn_output have 3 dimensions");
  for (const Tensor* t : {&q, &k, &v, &out}) {
    STD_TORCH_CHECK(t->scalar_type() == q.scalar_type(), "prefill attention: one dtype");
    STD_TORCH_CHECK(t->size(t->dim() - 1) <= 1 || t->stride(t->dim() - 1) == 1,
                    "prefill attention: the last dimension's elements are neighbours");
  }
  Call call;
  const int64_t last = k.dim() - 1;
  call.heads = q.size(1), call.kv_heads = k.size(last - 1), call.size = q.size(2), call.size_v = v.size(last);
  STD_TORCH_CHECK(call.kv_heads > 0 && call.heads % call.kv_heads == 0 && k.size(last) == call.size &&
                      v.size(last - 1) == call.kv_heads && out.size(0) == q.size(0) && out.size(1) == call.heads &&
                      out.size(2) == call.size_v,
                  "prefill attention: sizes of q, keys, values and attn_output differ");
  call.group = call.heads / call.kv_heads;
  call.out_row = out.stride(0), call.out_head = out.stride(1);
  call.k_slot = k.stride(last - 2), call.k_head = k.stride(last - 1);
  call.v_slot = v.stride(last - 2), call.v_head = v.stride(last - 1);
  int64_t highest = window_right < 0 ? kFar : std::min(window_right, kFar);
  call.shape = {float(scale), float(softcap), slopes.has_value(),
                int32_t(window_left < 0 ? -kFar : -std::min(window_left, kFar)), int32_t(causal ? 0 : highest)};
  call.slopes = numbers(slopes), call.sinks = numbers(sinks);
  for (const auto* given : {&call.slopes, &call.sinks}) {
    STD_TORCH_CHECK(given->empty() || int64_t(given->size()) == call.heads, "prefill attention: one number a head");
  }
  STD_TORCH_CHECK(ends.size() == lengths.size(), "prefill attention: one end and one length a sequence");
  int64_t begin = 0;
  for (size_t s = 0; s < ends.size(); ++s) {
    STD_TORCH_CHECK(ends[s] >= begin && ends[s] <= q.size(0), "prefill attention: queries of sequence ", s, " end at ",
                    ends[s], ", which is not between ", begin, " and ", q.size(0));
    STD_TORCH_CHECK(lengths[s] >= 0 && lengths[s] < kFar, "prefill attention: sequence ", s, " has ", lengths[s],
                    " keys");
    call.sequences.push_back({begin, ends[s] - begin, lengths[s], 0, nullptr});
    begin = ends[s];
  }
  return call;
}

void prefill_attention(Tensor q, Tensor k, Tensor v, Tensor q_ends, Tensor kv_seqlens, Tensor attn_output,
                       double softmax_scale, bool causal, int64_t window_left, int64_t window_right,
                       double logit_softcapping, MaybeTensor alibi_slopes, MaybeTensor sinks) {
  STD_TORCH_CHECK(k.dim() == 3 && v.dim() == 3 && k.size(0) == v.size(0),
                  "prefill_attention: k and v have 3 dimensions and as many tokens");
  Call call = call_of(q, k, v, whole_numbers(q_ends), whole_numbers(kv_seqlens), attn_output, softmax_scale, causal,
                      window_left, window_right, logit_softcapping, alibi_slopes, sinks);
  call.block_size = std::numeric_limits<int64_t>::max(), call.k_block = call.v_block = 0;
  int64_t slot = 0;
  for (Sequence& sequence : call.sequences) {
    sequence.first_slot = slot;
    slot += sequence.keys;
  }
  STD_TORCH_CHECK(slot <= k.size(0), "prefill_attention: sequences have ", slot, " keys, and k has ", k.size(0));
  run_apart(std::move(call), q, k, v, attn_output);
}

}  // namespace

void attend_pages(const Tensor& q, const Tensor& k_cache, const Tensor& v_cache, const Tensor& block_offsets,
                  const std::vector<int64_t>& q_ends, const std::vector<int64_t>& kv_seqlens, const Tensor& attn_output,
                  double softmax_scale, bool causal, int64_t window_left, int64_t window_right,
                  double logit_softcapping, const MaybeTensor& alibi_slopes, const MaybeTensor& sinks) {
  STD_TORCH_CHECK(k_cache.dim() == 4 && v_cache.dim() == 4 && k_cache.size(1) == v_cache.size(1) && k_cache.size(1) > 0,
                  "paged_prefill_attention: caches have 4 dimensions and one block size");
  Call call = call_of(q, k_cache, v_cache, q_ends, kv_seqlens, attn_output, softmax_scale, causal, window_left,
                      window_right, logit_softcapping, alibi_slopes, sinks);
  call.block_size = k_cache.size(1), call.k_block = k_cache.stride(0), call.v_block = v_cache.stride(0);
  call.blocks = whole_numbers(block_offsets);
  const int64_t columns = block_offsets.size(1), blocks = std::min(k_cache.size(0), v_cache.size(0));
  STD_TORCH_CHECK(block_offsets.size(0) == int64_t(call.sequences.size()),
                  "paged_prefill_attention: one row of blocks a sequence");
  for (size_t s = 0; s < call.sequences.size(); ++s) {
    Sequence& sequence = call.sequences[s];
    STD_TORCH_CHECK(sequence.keys <= columns * call.block_size, "paged_prefill_attention: sequence ", s, " has ",
                    sequence.keys, " keys, and blocks for ", columns * call.block_size);
    sequence.blocks = call.blocks.data() + s * columns;
    if (sequence.queries == 0) continue;
    const int64_t oldest = std::max<int64_t>(sequence.keys - sequence.queries + call.shape.lowest, 0);
    for (int64_t c = oldest / call.block_size; c * call.block_size < sequence.keys; ++c) {
      STD_TORCH_CHECK(sequence.blocks[c] >= 0 && sequence.blocks[c] < blocks, "paged_prefill_attention: block index ",
                      sequence.blocks[c], " of sequence ", s, " is outside of the cache of ", blocks, " blocks");
    }
  }
  run_apart(std::move(call), q, k_cache, v_cache, attn_output);
}

namespace {

void paged_prefill_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_offsets, Tensor q_ends,
                             Tensor kv_seqlens, Tensor attn_output, double softmax_scale, bool causal,
                             int64_t window_left, int64_t window_right, double logit_softcapping,
                             MaybeTensor alibi_slopes, MaybeTensor sinks) {
  attend_pages(q, k_cache, v_cache, block_offsets, whole_numbers(q_ends), whole_numbers(kv_seqlens), attn_output,
               softmax_scale, causal, window_left, window_right, logit_softcapping, alibi_slopes, sinks);
}

}  // namespace
}  // namespace dlinfer::prefill

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def(
      "prefill_attention(Tensor q, Tensor k, Tensor v, Tensor q_ends, Tensor kv_seqlens, Tensor(a!) attn_output, "
      "float softmax_scale, bool causal, int window_left, int window_right, float logit_softcapping, "
      "Tensor? alibi_slopes, Tensor? sinks) -> ()");
  library.def(
      "paged_prefill_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_offsets, Tensor q_ends, "
      "Tensor kv_seqlens, Tensor(a!) attn_output, float softmax_scale, bool causal, int window_left, "
      "int window_right, float logit_softcapping, Tensor? alibi_slopes, Tensor? sinks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "prefill_attention", TORCH_BOX(&dlinfer::prefill::prefill_attention));
  dlinfer::chain::put(library, "paged_prefill_attention", TORCH_BOX(&dlinfer::prefill::paged_prefill_attention));
}
