// dlinfer_cpu::paged_decode_attention: one query of each sequence over keys and values where they lie in the cache
// (decode_pieces.h).
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <numeric>
#include <vector>

#include "attention/arguments.h"
#include "attention/decode_pieces.h"
#include "attention/paged_prefill.h"
#include "chain/table.h"
#include "common/invariance.h"

namespace dlinfer::decode {
namespace {

using attention::numbers;
using attention::whole_numbers;

void paged_decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_offsets, Tensor kv_seqlens,
                            Tensor attn_output, double softmax_scale, int64_t window_left, double logit_softcapping,
                            MaybeTensor alibi_slopes, MaybeTensor sinks) {
  if (batch_invariant()) {
    std::vector<int64_t> ends(q.dim() ? q.size(0) : 0);
    std::iota(ends.begin(), ends.end(), 1);
    return prefill::attend_pages(q, k_cache, v_cache, block_offsets, ends, whole_numbers(kv_seqlens), attn_output,
                                 softmax_scale, true, window_left, 0, logit_softcapping, alibi_slopes, sinks);
  }
  STD_TORCH_CHECK(q.dim() == 3 && k_cache.dim() == 4 && v_cache.dim() == 4 && attn_output.dim() == 3,
                  "paged_decode_attention: q and attn_output have 3 dimensions, caches 4");
  for (const Tensor* t : {&q, &k_cache, &v_cache, &attn_output}) {
    STD_TORCH_CHECK(t->scalar_type() == q.scalar_type(), "paged_decode_attention: one dtype");
    STD_TORCH_CHECK(t->size(t->dim() - 1) <= 1 || t->stride(t->dim() - 1) == 1,
                    "paged_decode_attention: the last dimension's elements are neighbours");
  }
  Call call;
  call.sequences = q.size(0), call.heads = q.size(1), call.kv_heads = k_cache.size(2);
  call.size = q.size(2), call.size_v = v_cache.size(3), call.block_size = k_cache.size(1);
  STD_TORCH_CHECK(call.kv_heads > 0 && call.heads % call.kv_heads == 0 && k_cache.size(3) == call.size &&
                      v_cache.size(1) == call.block_size && v_cache.size(2) == call.kv_heads &&
                      attn_output.size(0) == call.sequences && attn_output.size(1) == call.heads &&
                      attn_output.size(2) == call.size_v,
                  "paged_decode_attention: sizes of q, caches and attn_output differ");
  call.group = call.heads / call.kv_heads;
  call.q_row = q.stride(0), call.q_head = q.stride(1), call.q_group = call.group * call.q_head;
  call.out_row = attn_output.stride(0), call.out_head = attn_output.stride(1);
  call.out_group = call.group * call.out_head;
  call.k_block = k_cache.stride(0), call.k_slot = k_cache.stride(1), call.k_head = k_cache.stride(2);
  call.v_block = v_cache.stride(0), call.v_slot = v_cache.stride(1), call.v_head = v_cache.stride(2);
  call.scale = float(softmax_scale), call.softcap = float(logit_softcapping);
  call.slopes = numbers(alibi_slopes), call.sinks = numbers(sinks);
  call.lengths = whole_numbers(kv_seqlens), call.blocks = whole_numbers(block_offsets);
  call.columns = block_offsets.size(1);
  STD_TORCH_CHECK(int64_t(call.lengths.size()) == call.sequences && block_offsets.size(0) == call.sequences,
                  "paged_decode_attention: one length and one row of blocks a sequence");
  const int64_t blocks = std::min(k_cache.size(0), v_cache.size(0));
  for (int64_t s = 0; s < call.sequences; ++s) {
    const int64_t length = call.lengths[s], first = window_left < 0 ? 0 : std::max<int64_t>(length - 1 - window_left, 0);
    STD_TORCH_CHECK(length >= 0 && length <= call.columns * call.block_size, "paged_decode_attention: sequence ", s,
                    " has ", length, " keys, and blocks for ", call.columns * call.block_size);
    call.first.push_back(first);
    for (int64_t c = first / call.block_size; c * call.block_size < length; ++c) {
      const int64_t block = call.blocks[s * call.columns + c];
      STD_TORCH_CHECK(block >= 0 && block < blocks, "paged_decode_attention: block index ", block, " of sequence ", s,
                            " is outside of the cache of ", blocks, " blocks");
    }
  }
  run(call, q, k_cache, v_cache, attn_output);
}

}  // namespace
}  // namespace dlinfer::decode

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def(
      "paged_decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_offsets, Tensor kv_seqlens, "
      "Tensor(a!) attn_output, float softmax_scale, int window_left, float logit_softcapping, Tensor? alibi_slopes, "
      "Tensor? sinks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "paged_decode_attention", TORCH_BOX(&dlinfer::decode::paged_decode_attention));
}
