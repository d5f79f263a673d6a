// Prefill attention over pages of the cache, for other kernels of this library to call.
#pragma once

#include <cstdint>
#include <vector>

#include "attention/arguments.h"

namespace dlinfer::prefill {

// As the op paged_prefill_attention. q_ends, kv_seqlens: a number for each sequence. Raises for sizes that differ.
void attend_pages(const attention::Tensor& q, const attention::Tensor& k_cache, const attention::Tensor& v_cache,
                  const attention::Tensor& block_offsets, const std::vector<int64_t>& q_ends,
                  const std::vector<int64_t>& kv_seqlens, const attention::Tensor& attn_output, double softmax_scale,
                  bool causal, int64_t window_left, int64_t window_right, double logit_softcapping,
                  const attention::MaybeTensor& alibi_slopes, const attention::MaybeTensor& sinks);

}  // namespace dlinfer::prefill
