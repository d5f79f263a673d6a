// Linear layers of float8 weights for few rows, and rows of activations as 8-bit numbers.
//
// Weights are read as they lie, once for every four rows of x. Roundings have the bits of the ops'
// reference in Python.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <cmath>
#include <tuple>
#include <vector>

#include "chain/table.h"
#include "eight_bit/fp8.h"
#include "eight_bit/quantise.h"
#include "eight_bit/tiles.h"

namespace dlinfer::eight_bit {
namespace {

// Of rows that are quantised: below this a thread is done before another has begun.
constexpr int64_t kElementsPerThread = 16 << 10;
constexpr auto kWidened = [] {
  std::array<float, 256> table{};
  for (int i = 0; i < 256; ++i) table[i] = fp8::widened(uint8_t(i));
  return table;
}();
constexpr float kLeastOfToken = 1e-7f, kLeastOfBlock = 1e-6f;

// --- checks

bool is_int8(ScalarType dtype) {
  STD_TORCH_CHECK(dtype == ScalarType::Char || dtype == ScalarType::Float8_e4m3fn, "eight_bit: int8 or float8_e4m3fn");
  return dtype == ScalarType::Char;
}

// The length of x's rows, which have a largest number each.
int64_t row_length(const Tensor& x, const char* op) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() >= 1 && x.size(x.dim() - 1) >= 1, op,
                  ": x is a tensor on the CPU whose last dimension is at least 1");
  return x.size(x.dim() - 1);
}

void check_norm(const Tensor& x, const Tensor* residual, const Tensor& weight, ScalarType dtype) {
  const int64_t count = row_length(x, "rms_norm_w8a8");
  is_int8(dtype);
  STD_TORCH_CHECK(weight.is_cpu() && weight.dim() == 1 && weight.size(0) == count &&
                      weight.scalar_type() == x.scalar_type(),
                  "rms_norm_w8a8: weight is [hidden = ", count, "], of x's dtype, on the CPU");
  if (!residual) return;
  bool same = residual->is_cpu() && residual->scalar_type() == x.scalar_type() && residual->dim() == x.dim();
  for (int64_t d = 0; same && d < x.dim(); ++d) same = residual->size(d) == x.size(d);
  STD_TORCH_CHECK(same, "add_rms_norm_w8a8: residual has the shape, dtype and device of x");
}

// The number of blocks that cover `size`; 0 for 0.
int64_t blocks_of(int64_t size, int64_t block) { return size == 0 ? 0 : (size - 1) / block + 1; }

void check_weight(const char* op, const Tensor& weight, const Tensor& scale, int64_t block_rows,
                  int64_t block_columns) {
  STD_TORCH_CHECK(weight.is_cpu() && weight.dim() == 2 && weight.scalar_type() == ScalarType::Float8_e4m3fn, op,
                  ": weight is a float8_e4m3fn tensor [out_features, in_features] on the CPU");
  STD_TORCH_CHECK(block_rows >= 1 && block_columns >= 1, op, ": blocks of ", block_rows, " rows and ", block_columns,
                  " columns");
  const int64_t rows = blocks_of(weight.size(0), block_rows), columns = blocks_of(weight.size(1), block_columns);
  STD_TORCH_CHECK(scale.is_cpu() && scale.dim() == 2 && scale.scalar_type() == ScalarType::Float &&
                      scale.size(0) == rows && scale.size(1) == columns,
                  op, ": scale is a float32 tensor [", rows, ", ", columns, "] on the CPU, a number for each block");
}

void check_linear(const Tensor& x, const Tensor& weight, ScalarType dtype, const MaybeTensor& bias) {
  STD_TORCH_CHECK(x.is_cpu() && x.dim() == 2 && x.scalar_type() == ScalarType::Float && x.size(1) == weight.size(1),
                  "linear_fp8: x is a float32 tensor [rows, in_features = ", weight.size(1), "] on the CPU");
  STD_TORCH_CHECK(!bias || (bias->is_cpu() && bias->dim() == 1 && bias->size(0) == weight.size(0) &&
                            bias->scalar_type() == dtype),
                  "linear_fp8: bias is [out_features = ", weight.size(0), "], of the result's dtype, on the CPU");
}

// --- rows

// Calls `each` with the number of each row of a tensor, and with memory for it in float32.
template <class Each>
void for_rows(int64_t rows, int64_t count, const Each& each) {
  const int64_t grain = std::max<int64_t>(kElementsPerThread / std::max<int64_t>(count, 1), 1);
  parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> wide(count);
    for (int64_t row = begin; row < end; ++row) each(row, wide.data());
  });
}

std::tuple<Tensor, Tensor> dynamic_quant(Tensor x, ScalarType dtype) {
  const int64_t count = row_length(x, "dynamic_quant"), rows = x.numel() / count;
  x = dense(std::move(x));
  Tensor numbers = packed(x, count, dtype, 1), scales = packed(x, 1, ScalarType::Float, 4);
  uint8_t* const out = out_data<uint8_t>(numbers);
  float* const scale = out_data<float>(scales);
  const bool whole = is_int8(dtype);
  with_type(x.scalar_type(), [&]<class T>(T) {
    const T* const from = data<T>(x);
    for_rows(rows, count, [&](int64_t row, float* wide) {
      for (int64_t i = 0; i < count; ++i) wide[i] = float(from[row * count + i]);
      scale[row] = quantise(wide, count, kLeastOfToken, whole, out + row * count);
    });
  });
  return {numbers, scales};
}

float sum_of_squares(const float* row, int64_t count) {
  float sums[16]{}, sum = 0.0f;
  int64_t i = 0;
  for (; i + 16 <= count; i += 16) {
    for (int lane = 0; lane < 16; ++lane) sums[lane] += row[i + lane] * row[i + lane];
  }
  for (; i < count; ++i) sum += row[i] * row[i];
  for (float lane : sums) sum += lane;
  return sum;
}

std::tuple<Tensor, Tensor> norm(const Tensor& x, const Tensor* residual, Tensor* total, Tensor weight, double eps,
                                ScalarType dtype) {
  weight = dense(std::move(weight));
  const int64_t count = x.size(x.dim() - 1), rows = x.numel() / count;
  Tensor numbers = packed(x, count, dtype, 1), scales = packed(x, 1, ScalarType::Float, 4);
  uint8_t* const out = out_data<uint8_t>(numbers);
  float* const scale = out_data<float>(scales);
  const bool whole = is_int8(dtype);
  with_type(x.scalar_type(), [&]<class T>(T) {
    const T *const from = data<T>(x), *const by = data<T>(weight), *const more = residual ? data<T>(*residual) : nullptr;
    T* const sums = total ? out_data<T>(*total) : nullptr;
    for_rows(rows, count, [&](int64_t row, float* wide) {
      const int64_t at = row * count;
      if (more) {
        for (int64_t i = 0; i < count; ++i) sums[at + i] = T(float(from[at + i]) + float(more[at + i]));
        for (int64_t i = 0; i < count; ++i) wide[i] = float(sums[at + i]);
      } else {
        for (int64_t i = 0; i < count; ++i) wide[i] = float(from[at + i]);
      }
      const float times = 1.0f / std::sqrt(sum_of_squares(wide, count) / float(count) + float(eps));
      for (int64_t i = 0; i < count; ++i) wide[i] = float(T(float(by[i]) * (wide[i] * times)));
      scale[row] = quantise(wide, count, 0.0f, whole, out + at);
    });
  });
  return {numbers, scales};
}

std::tuple<Tensor, Tensor> rms_norm_w8a8(Tensor x, Tensor weight, double eps, ScalarType dtype) {
  check_norm(x, nullptr, weight, dtype);
  return norm(dense(std::move(x)), nullptr, nullptr, std::move(weight), eps, dtype);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_w8a8(Tensor x, Tensor residual, Tensor weight, double eps,
                                                     ScalarType dtype) {
  check_norm(x, &residual, weight, dtype);
  x = dense(std::move(x));
  residual = dense(std::move(residual));
  Tensor total = packed(x, x.size(x.dim() - 1), x.scalar_type(), item_bytes(x.scalar_type()));
  auto [numbers, scales] = norm(x, &residual, &total, std::move(weight), eps, dtype);
  return {numbers, scales, total};
}

// The least power of two that is not below a positive value.
float next_power_of_two(float value) {
  int exponent;
  const float mantissa = std::frexp(value, &exponent);
  return std::ldexp(1.0f, mantissa == 0.5f ? exponent - 1 : exponent);
}

Tensor rounded_in_blocks(Tensor x, int64_t block_size, bool power_of_two) {
  STD_TORCH_CHECK(block_size >= 1, "rounded_in_blocks: blocks of ", block_size);
  const int64_t count = row_length(x, "rounded_in_blocks"), rows = x.numel() / count;
  x = dense(std::move(x));
  Tensor result = packed(x, count, ScalarType::Float, 4);
  float* const out = out_data<float>(result);
  with_type(x.scalar_type(), [&]<class T>(T) {
    const T* const from = data<T>(x);
    for_rows(rows, count, [&](int64_t row, float* wide) {
      for (int64_t i = 0; i < count; ++i) wide[i] = float(from[row * count + i]);
      for (int64_t begin = 0; begin < count; begin += block_size) {
        const int64_t size = std::min(block_size, count - begin);
        const float found = largest(wide + begin, size), most = found < kLeastOfBlock ? kLeastOfBlock : found;
        float scale = most * (1.0f / fp8::kLargest), times = fp8::kLargest / most;
        if (power_of_two) {
          scale = next_power_of_two(scale);
          times = 1.0f / scale;
        }
        // By itself, or the compiler makes one rounding of this product and of what comes next.
        for (int64_t i = begin; i < begin + size; ++i) wide[i] *= times;
        float* const line = out + row * count + begin;
        for_vectors(size, [&](int64_t i, int64_t some) {
          uint8_t numbers[kLanes];
          put_bytes(numbers, nearest_fp8(load_floats(wide + begin + i, some)), some);
          for (int64_t lane = 0; lane < some; ++lane) line[i + lane] = kWidened[numbers[lane]] * scale;
        });
      }
    });
  });
  return result;
}

// --- linear layers

fp8::Weight described(const Tensor& weight, const Tensor& scale, int64_t block_rows, int64_t block_columns) {
  return {data<uint8_t>(weight), weight.size(1), data<float>(scale), scale.size(1), block_rows, block_columns};
}

Tensor linear_fp8(Tensor x, Tensor weight, Tensor scale, int64_t block_rows, int64_t block_columns, ScalarType dtype,
                  MaybeTensor bias) {
  check_weight("linear_fp8", weight, scale, block_rows, block_columns);
  check_linear(x, weight, dtype, bias);
  x = dense(std::move(x));
  weight = dense(std::move(weight));
  scale = dense(std::move(scale));
  if (bias) bias = dense(*bias);
  const int64_t inputs = x.size(0), columns = x.size(1), rows = weight.size(0);
  Tensor result = packed(x, rows, dtype, item_bytes(dtype));
  const fp8::Weight numbers = described(weight, scale, block_rows, block_columns);
  const float* const given = data<float>(x);
  with_type(dtype, [&]<class T>(T) {
    T* const out = out_data<T>(result);
    const T* const added = bias ? data<T>(*bias) : nullptr;
    for_tiles(
        rows, inputs, columns,
        [&](int64_t together, int64_t r, int64_t c, int64_t some, float* sums) {
          const auto run = together == 4 ? fp8::tile_of<4> : fp8::tile_of<1>;
          run(some, numbers, r, given + c * columns, columns, columns, sums);
        },
        [&](int64_t c, int64_t r, float sum) { out[c * rows + r] = with_bias(sum, added, r); });
  });
  return result;
}

Tensor widen_fp8(Tensor weight, Tensor scale, int64_t block_rows, int64_t block_columns) {
  check_weight("widen_fp8", weight, scale, block_rows, block_columns);
  weight = dense(std::move(weight));
  scale = dense(std::move(scale));
  const int64_t columns = weight.size(1);
  Tensor result = packed(weight, columns, ScalarType::Float, 4);
  float* const out = out_data<float>(result);
  const fp8::Weight numbers = described(weight, scale, block_rows, block_columns);
  parallel_for(0, weight.size(0), block_grain(columns) * kBlockRows, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) fp8::widen(numbers, row, columns, out + row * columns);
  });
  return result;
}

}  // namespace
}  // namespace dlinfer::eight_bit

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("dynamic_quant(Tensor x, ScalarType quant_dtype) -> (Tensor, Tensor)");
  library.def("rms_norm_w8a8(Tensor x, Tensor weight, float eps, ScalarType quant_dtype) -> (Tensor, Tensor)");
  library.def("add_rms_norm_w8a8(Tensor x, Tensor residual, Tensor weight, float eps, ScalarType quant_dtype) "
              "-> (Tensor, Tensor, Tensor)");
  library.def("rounded_in_blocks(Tensor x, int block_size, bool power_of_two) -> Tensor");
  library.def("linear_fp8(Tensor x, Tensor weight, Tensor scale, int block_rows, int block_columns, ScalarType dtype, "
              "Tensor? bias) -> Tensor");
  library.def("widen_fp8(Tensor weight, Tensor scale, int block_rows, int block_columns) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "dynamic_quant", TORCH_BOX(&dlinfer::eight_bit::dynamic_quant));
  dlinfer::chain::put(library, "rms_norm_w8a8", TORCH_BOX(&dlinfer::eight_bit::rms_norm_w8a8));
  dlinfer::chain::put(library, "add_rms_norm_w8a8", TORCH_BOX(&dlinfer::eight_bit::add_rms_norm_w8a8));
  dlinfer::chain::put(library, "rounded_in_blocks", TORCH_BOX(&dlinfer::eight_bit::rounded_in_blocks));
  dlinfer::chain::put_linear(library, "linear_fp8", TORCH_BOX(&dlinfer::eight_bit::linear_fp8));
  dlinfer::chain::put(library, "widen_fp8", TORCH_BOX(&dlinfer::eight_bit::widen_fp8));
}
