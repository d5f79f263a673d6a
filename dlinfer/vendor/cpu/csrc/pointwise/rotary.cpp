// dlinfer_cpu::apply_rotary_pos_emb: queries and keys rotated by position, in one pass over each.
//
// Roofline: a number is read and written once, with a handful of instructions on kLanes of them: bound by memory, where
// torch's five ops pass over it ten times. To the bit what they give: both products and their sum are rounded to the
// dtype.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <tuple>

#include "chain/table.h"
#include "common/narrow.h"
#include "common/result_memory.h"
#include "common/tensor_rows.h"
#include "common/with_type.h"
#include "threads/team.h"

namespace dlinfer::rotary {
namespace {

using torch::stable::Tensor;

// Below this many elements a thread is done before another one has begun.
constexpr int64_t kElementsPerThread = 32 << 10;

// The two halves of a head, kLanes of each: (a, b) * cos + (-b, a) * sin.
template <class T>
inline void rotate(Floats a, Floats b, Floats cos_a, Floats cos_b, Floats sin_a, Floats sin_b, Floats* out) {
  out[0] = rounded<T>(by_itself(a * cos_a)) - rounded<T>(by_itself(b * sin_a));
  out[1] = rounded<T>(by_itself(b * cos_b)) + rounded<T>(by_itself(a * sin_b));
}

template <class T>
void rotate_head(const T* x, const T* cos, const T* sin, int64_t half, T* to) {
  Floats out[2];
  int64_t i = 0;
  for (; i + kLanes <= half; i += kLanes) {
    rotate<T>(widen(x + i), widen(x + half + i), widen(cos + i), widen(cos + half + i), widen(sin + i),
              widen(sin + half + i), out);
    narrow(to + i, out[0]);
    narrow(to + half + i, out[1]);
  }
  if (const int64_t rest = half - i; rest > 0) {
    const auto load = [&](const T* from) { return widen_part(from + i, rest); };
    rotate<T>(load(x), load(x + half), load(cos), load(cos + half), load(sin), load(sin + half), out);
    narrow_part(to + i, out[0], rest);
    narrow_part(to + half + i, out[1], rest);
  }
}

void check(const Tensor& q, const Tensor& k, const Tensor& cos, const Tensor& sin) {
  STD_TORCH_CHECK(q.dim() >= 3 && k.dim() == q.dim() && q.size(q.dim() - 1) % 2 == 0 &&
                      k.size(k.dim() - 1) == q.size(q.dim() - 1),
                  "apply_rotary_pos_emb: q and k are [..., tokens, heads, head_size] of one even head_size");
  int64_t tokens = 1;
  for (int64_t d = 0; d + 2 < q.dim(); ++d) {
    STD_TORCH_CHECK(k.size(d) == q.size(d), "apply_rotary_pos_emb: q and k are of the same tokens");
    tokens *= q.size(d);
  }
  for (const Tensor* table : {&cos, &sin}) {
    STD_TORCH_CHECK(table->dim() >= 1 && table->size(table->dim() - 1) == q.size(q.dim() - 1) &&
                        table->numel() == tokens * q.size(q.dim() - 1),
                    "apply_rotary_pos_emb: cos and sin have a row of head_size for each token");
  }
  for (const Tensor* t : {&k, &cos, &sin}) {
    STD_TORCH_CHECK(t->scalar_type() == q.scalar_type(), "apply_rotary_pos_emb: one dtype");
  }
}

std::tuple<Tensor, Tensor> apply_rotary_pos_emb(Tensor q, Tensor k, Tensor cos, Tensor sin) {
  check(q, k, cos, sin);
  Tensor q_out = empty_packed_like(q), k_out = empty_packed_like(k);
  const int64_t size = q.size(q.dim() - 1), q_heads = q.size(q.dim() - 2), k_heads = k.size(k.dim() - 2);
  const int64_t tokens = cos.numel() / std::max<int64_t>(size, 1), q_rows = tokens * q_heads;
  with_type(q.scalar_type(), "apply_rotary_pos_emb", [&]<class T>(T) {
    const TensorRows<T> q_from(q), k_from(k), cosines(cos), sines(sin);
    T *const q_to = static_cast<T*>(q_out.mutable_data_ptr()), *const k_to = static_cast<T*>(k_out.mutable_data_ptr());
    const int64_t grain = std::max<int64_t>(kElementsPerThread / std::max<int64_t>(size, 1), 1);
    parallel_for(0, q_rows + tokens * k_heads, grain, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < std::min(end, q_rows); ++row) {
        const int64_t token = row / q_heads;
        rotate_head(q_from[row], cosines[token], sines[token], size / 2, q_to + row * size);
      }
      for (int64_t row = std::max(begin, q_rows) - q_rows; row < end - q_rows; ++row) {
        const int64_t token = row / k_heads;
        rotate_head(k_from[row], cosines[token], sines[token], size / 2, k_to + row * size);
      }
    });
  });
  return {q_out, k_out};
}

}  // namespace
}  // namespace dlinfer::rotary

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("apply_rotary_pos_emb(Tensor q, Tensor k, Tensor cos, Tensor sin) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "apply_rotary_pos_emb", TORCH_BOX(&dlinfer::rotary::apply_rotary_pos_emb));
}
