// dlinfer_cpu::rms_norm and dlinfer_cpu::add_rms_norm, with the bits of torch's kernels one after the other. The sum of
// squares has torch's order. 16-bit numbers are rounded wherever one of torch's kernels would write its result.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "chain/table.h"
#include "common/result_memory.h"
#include "common/tensor_rows.h"
#include "norm/sum_of_squares.h"
#include "threads/team.h"

namespace dlinfer::norms {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Below this many elements a thread is done before another one has begun.
constexpr int64_t kElementsPerThread = 32 << 10;

template <class T>
void add_row(const T* x, const T* residual, int64_t count, T* total) {
  int64_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) narrow(total + i, rounded<T>(widened(x + i) + widened(residual + i)));
  for (; i < count; ++i) total[i] = T(float(x[i]) + float(residual[i]));
}

template <class T>
void norm_row(const T* x, const T* weight, int64_t count, float eps, T* out) {
  const float scale = 1.0f / std::sqrt(sum_of_squares(x, count) / float(count) + eps);
  int64_t i = 0;
  for (; i + kSumLanes <= count; i += kSumLanes) {
    narrow(out + i, rounded<T>(rounded<T>(widened(x + i) * scale) * widened(weight + i)));
  }
  for (; i < count; ++i) out[i] = T(float(T(float(x[i]) * scale)) * float(weight[i]));
}

void check(const Tensor& x, const Tensor& weight) {
  STD_TORCH_CHECK(x.dim() >= 1, "rms_norm: x needs at least one dimension");
  STD_TORCH_CHECK(weight.dim() == 1 && weight.size(0) == x.size(x.dim() - 1), "rms_norm: weight is [hidden = ",
                  x.size(x.dim() - 1), "]");
  STD_TORCH_CHECK(weight.scalar_type() == x.scalar_type(), "rms_norm: x and weight differ in dtype");
}

void check_residual(const Tensor& x, const Tensor& residual) {
  bool same = x.scalar_type() == residual.scalar_type() && x.dim() == residual.dim();
  for (int64_t d = 0; same && d < x.dim(); ++d) same = x.size(d) == residual.size(d);
  STD_TORCH_CHECK(same, "add_rms_norm: x and residual differ in shape or dtype");
}

// total: where the sums go, null where there is no residual.
template <class T>
void run(const Tensor& x, const Tensor* residual, const Tensor& weight, double eps, T* total, T* out) {
  const int64_t count = x.size(x.dim() - 1), rows = count == 0 ? 0 : x.numel() / count;
  const TensorRows<T> from(x), by(weight);
  const auto added = residual ? std::optional<TensorRows<T>>(*residual) : std::nullopt;
  const int64_t grain = std::max<int64_t>(kElementsPerThread / std::max<int64_t>(count, 1), 1);
  parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const T* given = from[row];
      if (added) {
        add_row(given, (*added)[row], count, total + row * count);
        given = total + row * count;
      }
      norm_row(given, by[0], count, float(eps), out + row * count);
    }
  });
}

void run(const Tensor& x, const Tensor* residual, const Tensor& weight, double eps, Tensor* total, Tensor& out) {
  const auto run_as = [&]<class T>(T) {
    run<T>(x, residual, weight, eps, total ? static_cast<T*>(total->mutable_data_ptr()) : nullptr,
           static_cast<T*>(out.mutable_data_ptr()));
  };
  switch (x.scalar_type()) {
    case ScalarType::BFloat16:
      return run_as(BFloat16());
    case ScalarType::Half:
      return run_as(Half());
    case ScalarType::Float:
      return run_as(0.0f);
    default:
      STD_TORCH_CHECK(false, "rms_norm: no kernel for this dtype");
  }
}

Tensor rms_norm(Tensor x, Tensor weight, double eps) {
  check(x, weight);
  Tensor out = empty_packed_like(x);
  run(x, nullptr, weight, eps, nullptr, out);
  return out;
}

std::tuple<Tensor, Tensor> add_rms_norm(Tensor x, Tensor residual, Tensor weight, double eps) {
  check(x, weight);
  check_residual(x, residual);
  Tensor out = empty_packed_like(x), total = empty_packed_like(x);
  run(x, &residual, weight, eps, &total, out);
  return {out, total};
}

}  // namespace
}  // namespace dlinfer::norms

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  library.def("add_rms_norm(Tensor x, Tensor residual, Tensor weight, float eps) -> (Tensor, Tensor)");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "rms_norm", TORCH_BOX(&dlinfer::norms::rms_norm));
  dlinfer::chain::put(library, "add_rms_norm", TORCH_BOX(&dlinfer::norms::add_rms_norm));
}
