// dlinfer_cpu::fused_moe and dlinfer_cpu::fused_moe_clamped: for each token the weighted sum of its experts' MLPs.
//
// Weights are read where they lie, those of the chosen experts only, each once for all its tokens. Experts with few
// rows are computed together (experts.h); one with many is computed like two linear layers (linear/), by all threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <type_traits>
#include <vector>

#include "chain/table.h"
#include "common/result_memory.h"
#include "common/with_type.h"
#include "linear/few_rows.h"
#include "linear/linear.h"
#include "linear/many_rows.h"
#include "moe/experts.h"
#include "threads/team.h"

namespace dlinfer::moe {
namespace {

using MaybeTensor = std::optional<Tensor>;

// An expert of more rows than these is taken as two linear layers, which pass it on to torch's product. Measured on an
// AMD EPYC of the Zen 4 kind, with as many experts as a cache does not hold (benchmarks/moe.py): in bfloat16 ours is
// ahead up to 128 rows and as fast at 256, while oneDNN has to make a product for each new number of rows, which costs
// 0.5 ms; torch's float16 is four times slower than ours at any number. With AMX tiles, not measured for experts, what
// is surely bound by reading.
template <class T>
int64_t most_rows() {
  if constexpr (std::is_same_v<T, BFloat16>) {
#if defined(DLINFER_HAS_TILES)
    if (tiles_granted()) return 8;
#endif
#if defined(__AVX512BF16__)
    return 256;
#elif defined(__x86_64__)
    return 64;
#endif
  }
#if defined(DLINFER_HAS_HALF)
  if constexpr (std::is_same_v<T, Half>) return 1 << 20;
#else
  if constexpr (std::is_same_v<T, Half>) return 0;
#endif
#if defined(__AVX512F__)
  return 64;
#else
  return 16;
#endif
}

// Tokens that are computed at a time, so that their rows and activations take no more memory than these need.
constexpr int64_t kTokens = 2048;

constexpr int64_t kBytesGathered = 512 << 10;  // by a thread, at least: copying that takes as long as its start
constexpr int64_t kElementsActivated = 32 << 10;

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
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <class T>
Stack<T> stack(const Tensor& weight, const MaybeTensor& bias) {
  return {data<T>(weight), weight.stride(0), weight.stride(1), weight.size(1), weight.size(2),
          bias ? data<T>(*bias) : nullptr, bias ? bias->stride(0) : 0};
}

template <class T>
Tensor packed(int64_t rows, int64_t columns, const Tensor& like) {
  return empty_strided({rows, columns}, {columns, 1}, like.scalar_type(), sizeof(T));
}

// With a cache line more between two rows: else those of a power of two columns share places in the first-level cache,
// and a tile's eight rows of x push each other out of it. That is a fifth of the time of 64 float32 rows of 1024.
template <class T>
Tensor spaced(int64_t rows, int64_t columns, const Tensor& like) {
  constexpr int64_t kLine = 64 / sizeof(T);
  const int64_t stride = (columns + kLine - 1) / kLine * kLine + kLine;
  return empty_strided({rows, columns}, {stride, 1}, like.scalar_type(), sizeof(T));
}

template <class T>
Rows<T> rows_of(Tensor& t) {
  return {static_cast<T*>(t.mutable_data_ptr()), t.stride(0), t.size(0)};
}

// The hidden states of each choice, `first` being the first token's.
template <class T>
void gather(const Tensor& hidden, int64_t first, const Routing& routing, Rows<T> to) {
  const int64_t size = hidden.size(1), stride = hidden.stride(1);
  const T* const from = data<T>(hidden) + first * hidden.stride(0);
  const int64_t grain = std::max<int64_t>(kBytesGathered / std::max<int64_t>(size * int64_t(sizeof(T)), 1), 1);
  parallel_for(0, to.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const T* const row = from + routing.token[i] * hidden.stride(0);
      T* const copy = to.data + i * to.stride;
      if (stride == 1) {
        std::copy_n(row, size, copy);
      } else {
        for (int64_t c = 0; c < size; ++c) copy[c] = row[c * stride];
      }
    }
  });
}

// gate_up: [rows, 2 * intermediate].
template <class T>
void activate(const Tensor& gate_up, Activation activation, Rows<T> to) {
  const int64_t size = gate_up.size(1) / 2;
  const int64_t grain = std::max<int64_t>(kElementsActivated / std::max<int64_t>(size, 1), 1);
  parallel_for(0, to.count, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* const gate = data<T>(gate_up) + row * 2 * size;
      for (int64_t i = 0; i < size; i += kLanes) {
        const int64_t count = std::min<int64_t>(kLanes, size - i);
        const Floats value = activation(widen_part(gate + i, count), widen_part(gate + size + i, count));
        for (int64_t lane = 0; lane < count; ++lane) to.data[row * to.stride + i + lane] = T(value[lane]);
      }
    }
  });
}

// The most rows of an expert that experts.h takes: none where a weight's columns lie apart, which is torch's to read.
template <class T>
int64_t most_rows(const Call& call) {
  return dense_rows(call.gate_up) && dense_rows(call.down) ? most_rows<T>() : 0;
}

// The tokens `begin` to `end`.
template <class T>
void run(const Call& call, int64_t begin, int64_t end, Rows<T> out) {
  const Routing routing = route(call.ids, call.weights, begin, end, call.gate_up.size(0), call.renormalize);
  const int64_t choices = routing.token.size();
  Tensor rows = spaced<T>(choices, call.hidden.size(1), call.hidden);
  Tensor activations = spaced<T>(choices, call.down.size(2), call.hidden);
  gather(call.hidden, begin, routing, rows_of<T>(rows));

  std::vector<Tensor> kept;  // results as long as they are read
  std::vector<const T*> results(routing.shares.size(), nullptr);
  for (size_t i = 0; i < results.size(); ++i) {
    const Share& share = routing.shares[i];
    if (share.count() <= most_rows<T>(call)) continue;
    const auto of = [&](const Tensor& stack) { return torch::stable::select(stack, 0, share.expert); };
    const MaybeTensor bias = call.gate_up_bias ? MaybeTensor(of(*call.gate_up_bias)) : std::nullopt;
    Tensor activated = torch::stable::narrow(activations, 0, share.begin, share.count());
    activate(linear(torch::stable::narrow(rows, 0, share.begin, share.count()), of(call.gate_up), bias),
             call.activation, rows_of<T>(activated));
    kept.push_back(linear(activated, of(call.down), std::nullopt));
    results[i] = data<T>(kept.back());
  }
  const Stack<T> gate_up = stack<T>(call.gate_up, call.gate_up_bias), down = stack<T>(call.down, call.down_bias);
  const Rows<T> given = rows_of<T>(rows);
  Experts<T>(gate_up, down, routing, call.activation, {given.data, given.stride, given.count},
             rows_of<T>(activations), std::move(results), out)
      .run();
}

Tensor run(const Call& call) {
  check(call);
  const int64_t tokens = call.hidden.size(0), hidden = call.hidden.size(1);
  const auto run_as = [&]<class T>(T) {
    Tensor out = packed<T>(tokens, hidden, call.hidden);
    const int64_t chunks = (tokens + kTokens - 1) / kTokens;
    for (int64_t i = 0; i < chunks; ++i) {
      const int64_t begin = tokens * i / chunks, end = tokens * (i + 1) / chunks;
      run<T>(call, begin, end, {static_cast<T*>(out.mutable_data_ptr()) + begin * hidden, hidden, end - begin});
    }
    return out;
  };
  return with_type(call.hidden.scalar_type(), "fused_moe", run_as);
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
