// dlinfer_cpu::linear_w8a8: linear layers of int8 weights for rows of int8, by the kernel that is quickest for so many.
//
// Few rows: each four of them, or two without AVX-512 VNNI, read the weight as it lies. Many: the tiles of AMX, or
// int8_many_rows.h, or torch's product where the processor has instructions for int8 that this library was not compiled
// for. torch's product takes a piece of the weight at a time: its sums of 32 bits, and its own order of a weight, would
// take many times the memory of the result.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "chain/table.h"
#include "eight_bit/int8_few_rows.h"
#include "eight_bit/int8_many_rows.h"
#include "eight_bit/tile_results.h"
#include "eight_bit/tiles.h"
#include "tiles/work.h"

namespace dlinfer::eight_bit {
namespace {

constexpr int64_t kFewRows = 12;             // of x, measured on Zen 4: more are quicker packed
constexpr int64_t kFewBesideTiles = 6;       // likewise on Emerald Rapids where tiles take more
constexpr int64_t kFewBesideTorch = 32;      // likewise where torch's product is what is quick for more
constexpr int64_t kPieceElements = 2 << 20;  // of a result, that torch's product gives at a time
constexpr int64_t kFewestPieceRows = 64;     // of the weight in a piece

// Whether torch's int8 product is exact and quick: without these instructions oneDNN saturates sums of pairs to 16
// bits.
bool torch_is_exact() {
#if defined(__x86_64__)
  static const bool exact = [] {
    unsigned a = 0, b = 0, c = 0, d = 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
    const bool avx512_vnni = c >> 11 & 1, amx_int8 = d >> 25 & 1, more = a >= 1;
    const bool avx_vnni = more && __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
    return avx512_vnni || amx_int8 || avx_vnni;
  }();
  return exact;
#else
  return false;
#endif
}

// x @ weight.T as int32.
Tensor torch_product(const Tensor& x, const Tensor& weight) {
  namespace convert = torch::stable::detail;
  std::array<StableIValue, 2> stack{convert::from(x), convert::from(torch::stable::transpose(weight, 0, 1))};
  check(torch_call_dispatcher("aten::_int_mm", "", stack.data(), TORCH_ABI_VERSION));
  return convert::to<Tensor>(stack[0]);
}

template <class T>
struct Job {
  const int8_t *x, *weight;
  int64_t inputs, rows, columns;
  int8::Result<T> to;
};

template <class T>
void few_rows(const Job<T>& job) {
  int8::few_rows(job.weight, job.rows, job.x, job.inputs, job.columns, job.to);
}

template <class T>
void by_torch(const Job<T>& job, const Tensor& x, const Tensor& weight) {
  const int64_t piece = std::max(kPieceElements / job.inputs, kFewestPieceRows);
  for (int64_t first = 0; first < job.rows; first += piece) {
    const int64_t rows = std::min(piece, job.rows - first);
    Tensor part = weight;
    part = dense(torch_product(x, torch::stable::narrow(part, 0, first, rows)));
    const int32_t* const sums = data<int32_t>(part);
    parallel_for(0, job.inputs, 16, [&](int64_t begin, int64_t end) {
      for (int64_t c = begin; c < end; ++c) {
        const Floats by = int8::with_plain_nan(all_lanes(job.to.by[c]));
        for (int64_t r = 0; r < rows; r += kLanes) {
          const int64_t some = std::min<int64_t>(kLanes, rows - r);
          const Words exact = load_part<Words>(sums + c * rows + r, some);
          int8::put(int8::as_floats(exact) * by, c, first + r, some, job.to);
        }
      }
    });
  }
}

template <class T>
void run(const Job<T>& job, [[maybe_unused]] const Tensor& x, [[maybe_unused]] const Tensor& weight) {
#if defined(DLINFER_HAS_INT8_TILES)
  if (tiles_granted()) {
    if (job.inputs <= kFewBesideTiles) return few_rows(job);
    const tiles::Panels panels{tiles::as_bytes<int8_t>({job.weight, job.columns, job.rows})};
    return tiles::multiply<tiles::Type::kInt8, tiles::Int8Job<T>>(
        tiles::as_bytes<int8_t>({job.x, job.columns, job.inputs}), job.columns, {{panels, job.to}});
  }
#endif
#if defined(DLINFER_HAS_INT8_MANY_ROWS)
  if (job.inputs <= kFewRows) return few_rows(job);
  int8::many_rows(job.weight, job.rows, job.x, job.inputs, job.columns, job.to);
#else
  // torch 2.13 returns uninitialised memory for a single column.
  if (job.inputs <= kFewBesideTorch || job.columns < 2 || !torch_is_exact()) return few_rows(job);
  by_torch(job, x, weight);
#endif
}

void check(const Tensor& a, const Tensor& b, const Tensor& rms_scale, const Tensor& linear_scale,
           const MaybeTensor& bias, ScalarType out_dtype, ScalarType quant_dtype) {
  STD_TORCH_CHECK(quant_dtype == ScalarType::Char && a.scalar_type() == quant_dtype && b.scalar_type() == quant_dtype,
                  "linear_w8a8: a and b are int8");
  STD_TORCH_CHECK(a.dim() >= 1 && b.dim() == 2 && b.size(1) == a.size(a.dim() - 1),
                  "linear_w8a8: a is [..., in_features], b [out_features, in_features]");
  STD_TORCH_CHECK(rms_scale.scalar_type() == ScalarType::Float && linear_scale.scalar_type() == ScalarType::Float,
                  "linear_w8a8: scales are float32");
  STD_TORCH_CHECK(linear_scale.numel() == b.size(0), "linear_w8a8: linear_scale has one number for each row of b");
  STD_TORCH_CHECK(!bias || (bias->dim() == 1 && bias->size(0) == b.size(0) && bias->scalar_type() == out_dtype),
                  "linear_w8a8: bias is [out_features] of out_dtype");
  STD_TORCH_CHECK(a.is_cpu() && b.is_cpu() && rms_scale.is_cpu() && linear_scale.is_cpu() && (!bias || bias->is_cpu()),
                  "linear_w8a8: not all tensors are on the CPU");
}

Tensor linear_w8a8(Tensor a, Tensor b, Tensor rms_scale, Tensor linear_scale, ScalarType out_dtype,
                   ScalarType quant_dtype, MaybeTensor bias) {
  check(a, b, rms_scale, linear_scale, bias, out_dtype, quant_dtype);
  const int64_t rows = b.size(0), columns = b.size(1);
  int64_t inputs = 1;
  for (int64_t d = 0; d + 1 < a.dim(); ++d) inputs *= a.size(d);
  STD_TORCH_CHECK(rms_scale.numel() == inputs, "linear_w8a8: rms_scale has one number for each row of a");
  Tensor result = packed(a, rows, out_dtype, item_bytes(out_dtype));
  if (inputs == 0 || rows == 0) return result;
  a = torch::stable::view(dense(std::move(a)), {inputs, columns});
  b = dense(std::move(b));
  rms_scale = dense(std::move(rms_scale));
  linear_scale = dense(std::move(linear_scale));
  if (bias) bias = dense(*bias);
  with_type(out_dtype, [&]<class T>(T) {
    const int8::Result<T> to{data<float>(rms_scale), data<float>(linear_scale), bias ? data<T>(*bias) : nullptr,
                             out_data<T>(result), rows};
    const Job<T> job{data<int8_t>(a), data<int8_t>(b), inputs, rows, columns, to};
    run(job, a, b);
  });
  return result;
}

}  // namespace
}  // namespace dlinfer::eight_bit

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("linear_w8a8(Tensor a, Tensor b, Tensor rms_scale, Tensor linear_scale, ScalarType out_dtype, "
              "ScalarType quant_dtype, Tensor? bias) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put_linear(library, "linear_w8a8", TORCH_BOX(&dlinfer::eight_bit::linear_w8a8));
}
