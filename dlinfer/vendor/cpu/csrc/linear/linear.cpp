// dlinfer_cpu::linear and dlinfer_cpu::linears: torch's linear, with kernels of our own where they are ahead of torch's
// (limits.h). One is for few rows, as many as dlinfer_cpu::linear_max_inputs tells. Two are for more rows: one with
// AMX, and one for float32 arithmetic. dlinfer_cpu::linear_takes tells whether so many rows are ours.
//
// Only torch's stable ABI is used: its headers compile in a second where ATen's take five. Threads are our team's
// (threads/team.h), so that no OpenMP runtime is linked.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <type_traits>
#include <vector>

#include "chain/table.h"
#include "common/by_torch.h"
#include "common/result_memory.h"
#include "linear/arguments.h"
#include "linear/few_rows.h"
#include "linear/float_blocks.h"
#include "linear/limits.h"
#include "linear/linear.h"
#include "linear/panels.h"
#include "linear/tile_results.h"
#include "threads/team.h"
#include "tiles/work.h"

namespace dlinfer {
namespace {

using namespace layers;
using torch::headeronly::ScalarType;

template <class T>
struct Job {
  Rows<const T> weight;
  const T* bias;
  Rows<T> out;
};

template <class T>
void run(Rows<const T> x, int64_t columns, const std::vector<Job<T>>& jobs) {
  const int64_t rows = block_rows<T>(columns);
  const auto blocks = [rows](const Job<T>& job) { return (job.weight.count + rows - 1) / rows; };
  int64_t total = 0;
  for (const auto& job : jobs) total += blocks(job);

  for_panels(x.count, total, rows * columns * int64_t(sizeof(T)), [&](int64_t c, int64_t inputs, int64_t begin, int64_t end) {
    const Rows<const T> some{x.data + c * x.stride, x.stride, inputs};
    int64_t before = 0;
    for (const auto& job : jobs) {
      const int64_t last = std::min(end - before, blocks(job));
      for (int64_t i = std::max<int64_t>(begin - before, 0); i < last; ++i) {
        const int64_t r = i * rows;
        const PlainWeight<T> weight(job.weight, columns);
        block<kPanelInputs>(weight, r, std::min(rows, job.weight.count - r), some, job.bias ? job.bias + r : nullptr,
                            {job.out.data + c * job.out.stride + r, job.out.stride, inputs}, i + 1 < last);
      }
      before += blocks(job);
    }
  });
}

template <class T>
void run_as(const Tensor& x, int64_t inputs, const std::vector<Tensor>& weights, const std::vector<MaybeTensor>& biases,
            const std::vector<Tensor>& outs) {
  const auto data = [](const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); };
  const int64_t columns = x.size(x.dim() - 1);
  std::vector<Job<T>> jobs;
  jobs.reserve(weights.size());
  for (size_t i = 0; i < weights.size(); ++i) {
    const int64_t count = weights[i].size(0);
    jobs.push_back({{data(weights[i]), weights[i].stride(0), count},
                    biases[i] ? data(*biases[i]) : nullptr,
                    {static_cast<T*>(outs[i].mutable_data_ptr()), count, inputs}});
  }
  const int64_t stride = row_stride(x);
#if defined(DLINFER_HAS_FLOAT_BLOCKS)
  if constexpr (kTakesBlocks<T>) {
    if (inputs > max_inputs(x.scalar_type())) return float_blocks::multiply<T>({data(x), stride, inputs}, columns, jobs);
  }
#endif
#if defined(DLINFER_HAS_PANELS)
  if constexpr (std::is_same_v<T, BFloat16>) {
    if (inputs > max_inputs(ScalarType::BFloat16)) {
      std::vector<tiles::BFloat16Job> tile_jobs;
      tile_jobs.reserve(jobs.size());
      for (const auto& [weight, bias, out] : jobs) tile_jobs.push_back({{tiles::as_bytes(weight)}, bias, out});
      return tiles::multiply<tiles::Type::kBFloat16>(tiles::as_bytes<BFloat16>({data(x), stride, inputs}),
                                                     columns * sizeof(BFloat16), tile_jobs);
    }
  }
#endif
  run<T>({data(x), stride, inputs}, columns, jobs);
}

std::vector<Tensor> linears(Tensor x, std::vector<Tensor> weights, std::vector<MaybeTensor> biases) {
  STD_TORCH_CHECK(weights.size() == biases.size(), "linears: ", weights.size(), " weights, ", biases.size(), " biases");
  bool ours = true;
  for (size_t i = 0; i < weights.size(); ++i) {
    check(x, weights[i], biases[i]);
    if (batch_invariant()) {  // torch's product, which reads any strides, has another order for another number of rows
      if (!dense_rows(weights[i])) weights[i] = torch::stable::contiguous(weights[i]);
      if (biases[i] && !dense_rows(*biases[i])) biases[i] = torch::stable::contiguous(*biases[i]);
    }
    ours = ours && fits_kernel(weights[i], biases[i]);
  }
  const int64_t inputs = leading_count(x);

  std::vector<Tensor> outs;
  outs.reserve(weights.size());
  if (!ours || !takes_inputs(x.scalar_type(), inputs)) {
    STD_TORCH_CHECK(!batch_invariant(), "linears: no batch-invariant product of this dtype or device");
    for (size_t i = 0; i < weights.size(); ++i) outs.push_back(by_torch("aten::linear", x, weights[i], biases[i]));
    return outs;
  }

  for (const auto& weight : weights) outs.push_back(empty_result(x, weight.size(0)));
  x = with_even_rows(x);
  switch (x.scalar_type()) {
    case ScalarType::Float:
      run_as<float>(x, inputs, weights, biases, outs);
      break;
    case ScalarType::BFloat16:
      run_as<BFloat16>(x, inputs, weights, biases, outs);
      break;
#if defined(DLINFER_HAS_HALF)
    case ScalarType::Half:
      run_as<Half>(x, inputs, weights, biases, outs);
      break;
#endif
    default:
      STD_TORCH_CHECK(false, "linears: max_inputs and this switch disagree");
  }
  return outs;
}

}  // namespace

Tensor linear(Tensor x, Tensor weight, MaybeTensor bias) {
  return linears(std::move(x), {std::move(weight)}, {std::move(bias)})[0];
}

}  // namespace dlinfer

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
  library.def("linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]");
  library.def("linear_max_inputs(ScalarType dtype) -> int");
  library.def("linear_takes(ScalarType dtype, int rows) -> bool");
  library.def("empty_strided(int[] size, int[] stride, ScalarType dtype, int item_bytes) -> Tensor");
  library.def("results_escape(bool on) -> ()");
  library.def("set_batch_invariant(bool on) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CompositeExplicitAutograd, library) {
  library.impl("empty_strided", TORCH_BOX(&dlinfer::empty_strided));
  dlinfer::chain::put(library, "results_escape", TORCH_BOX(&dlinfer::set_results_escape));
  library.impl("linear_max_inputs", TORCH_BOX(&dlinfer::max_inputs));
  library.impl("linear_takes", TORCH_BOX(&dlinfer::takes_inputs));
  library.impl("set_batch_invariant", TORCH_BOX(&dlinfer::set_batch_invariant));
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put_linear(library, "linear", TORCH_BOX(&dlinfer::linear));
  dlinfer::chain::put_linear(library, "linears", TORCH_BOX(&dlinfer::linears));
}
