// dlinfer_cpu::linear and dlinfer_cpu::linears: torch's linear, with a kernel of our own for few rows.
//
// Only torch's stable ABI is used: its headers compile in a second where ATen's take five, and its parallel_for runs
// in torch's own thread pool without our linking an OpenMP runtime.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "few_rows.h"

namespace dlinfer {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// With more rows of x than this, torch's own linear is as fast, because then computing takes longer than reading.
// Measured on an AMD EPYC of the Zen 4 kind for each instruction set (benchmarks/linear.py). Where torch may compute
// faster than that, with AMX tiles or on other processors, the rows for which reading surely takes longer.
template <class T>
constexpr int kMaxInputs = 16;
#if defined(__x86_64__) && !defined(__AMX_BF16__)
template <>
constexpr int kMaxInputs<BFloat16> = 64;
template <>
constexpr int kMaxInputs<Half> = 64;
#endif
#if defined(__AVX512F__)
template <>
constexpr int kMaxInputs<float> = 32;
#endif

// Below this many bytes of weight a thread is done before another one has begun.
constexpr int64_t kBytesPerThread = 64 << 10;

Tensor empty_like_linear(const Tensor& x, const Tensor& weight) {
  const auto leading = x.sizes();
  const int64_t rank = x.dim();
  std::vector<int64_t> sizes(leading.begin(), leading.end()), strides(rank, 1);
  sizes[rank - 1] = weight.size(0);
  for (int64_t d = rank - 1; d > 0; --d) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  AtenTensorHandle made;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(rank, sizes.data(), strides.data(), dtype,
                                                         aoti_torch_device_type_cpu(), 0, &made));
  return Tensor(made);
}

Tensor torch_linear(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  namespace convert = torch::stable::detail;
  std::array<StableIValue, 3> stack{convert::from(x), convert::from(weight), convert::from(bias)};
  STABLE_TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::linear", "", stack.data(), TORCH_ABI_VERSION));
  return convert::to<Tensor>(stack[0]);
}

void check(const Tensor& x, const Tensor& weight, const MaybeTensor& bias) {
  STD_TORCH_CHECK(x.dim() >= 1, "linear: x needs at least one dimension");
  STD_TORCH_CHECK(weight.dim() == 2, "linear: weight is [out_features, in_features], got ", weight.dim(),
                  " dimensions");
  STD_TORCH_CHECK(weight.size(1) == x.size(x.dim() - 1), "linear: x has ", x.size(x.dim() - 1),
                  " in_features, weight has ", weight.size(1));
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "linear: x and weight differ in dtype");
  if (!bias) return;
  STD_TORCH_CHECK(bias->dim() == 1 && bias->size(0) == weight.size(0), "linear: bias is [out_features = ",
                  weight.size(0), "]");
  STD_TORCH_CHECK(bias->scalar_type() == x.scalar_type(), "linear: x and bias differ in dtype");
}

// Whether neighbours along the last dimension are neighbours in memory.
bool dense_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.size(last) <= 1 || t.stride(last) == 1;
}

int64_t leading_count(const Tensor& x) {
  int64_t count = 1;
  for (int64_t d = 0; d + 1 < x.dim(); ++d) count *= x.size(d);
  return count;
}

// The most rows of x that the kernel takes, -1 where there is none for the dtype.
int64_t max_inputs(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::Float:
      return kMaxInputs<float>;
    case ScalarType::BFloat16:
      return kMaxInputs<BFloat16>;
#if defined(DLINFER_HAS_HALF)
    case ScalarType::Half:
      return kMaxInputs<Half>;
#endif
    default:
      return -1;
  }
}

bool fits_kernel(const Tensor& weight, const MaybeTensor& bias) {
  return weight.is_cpu() && dense_rows(weight) && (!bias || (bias->is_cpu() && dense_rows(*bias)));
}

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

  const int64_t block_bytes = std::max<int64_t>(rows * columns * int64_t(sizeof(T)), 1);
  const int64_t grain = std::max<int64_t>(kBytesPerThread / block_bytes, 1);
  torch::stable::parallel_for(0, total, grain, [&](int64_t begin, int64_t end) {
    int64_t before = 0;
    for (const auto& job : jobs) {
      const int64_t last = std::min(end - before, blocks(job));
      for (int64_t i = std::max<int64_t>(begin - before, 0); i < last; ++i) {
        const int64_t r = i * rows;
        const Rows<const T> weight{job.weight.data + r * job.weight.stride, job.weight.stride,
                                   std::min(rows, job.weight.count - r)};
        block<T, kMaxInputs<T>>(weight, x, columns, job.bias ? job.bias + r : nullptr,
                             {job.out.data + r, job.out.stride, x.count}, i + 1 < last);
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
  const int64_t stride = x.is_contiguous() ? columns : x.stride(0);
  run<T>({data(x), stride, inputs}, columns, jobs);
}

std::vector<Tensor> linears(Tensor x, const std::vector<Tensor>& weights, const std::vector<MaybeTensor>& biases) {
  STD_TORCH_CHECK(weights.size() == biases.size(), "linears: ", weights.size(), " weights, ", biases.size(), " biases");
  bool ours = true;
  for (size_t i = 0; i < weights.size(); ++i) {
    check(x, weights[i], biases[i]);
    ours = ours && fits_kernel(weights[i], biases[i]);
  }
  const int64_t inputs = leading_count(x);

  std::vector<Tensor> outs;
  outs.reserve(weights.size());
  if (!ours || inputs > max_inputs(x.scalar_type())) {
    for (size_t i = 0; i < weights.size(); ++i) outs.push_back(torch_linear(x, weights[i], biases[i]));
    return outs;
  }

  for (const auto& weight : weights) outs.push_back(empty_like_linear(x, weight));
  const bool rows_with_gaps = x.dim() == 2 && dense_rows(x);
  if (!rows_with_gaps && !x.is_contiguous()) x = torch::stable::contiguous(x);
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

Tensor linear(Tensor x, Tensor weight, MaybeTensor bias) {
  return linears(std::move(x), {std::move(weight)}, {std::move(bias)})[0];
}

}  // namespace
}  // namespace dlinfer

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("linear(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor");
  library.def("linears(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  library.impl("linear", TORCH_BOX(&dlinfer::linear));
  library.impl("linears", TORCH_BOX(&dlinfer::linears));
}
