// Linear layers of 8-bit weights for few rows, and rows of activations as 8-bit numbers.
//
// Weights are read as they lie, once for every four rows of x. What is rounded here is rounded as the ops' reference in
// Python rounds it, to the bit.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "chain/table.h"
#include "common/result_memory.h"
#include "eight_bit/fp8.h"
#include "eight_bit/int8_dot.h"
#include "threads/team.h"

namespace dlinfer::eight_bit {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kBlockRows = 16;               // rows of a weight that a thread takes at once
constexpr int64_t kBytesPerThread = 64 << 10;    // of a weight: below this a thread is done before another has begun
constexpr int64_t kElementsPerThread = 16 << 10;  // likewise of rows that are quantised
constexpr float kLeastOfToken = 1e-7f, kLeastOfBlock = 1e-6f;

Tensor packed(const Tensor& like, int64_t last, ScalarType dtype, int64_t item_bytes) {
  const auto shape = like.sizes();
  std::vector<int64_t> sizes(shape.begin(), shape.end()), strides(sizes.size(), 1);
  sizes.back() = last;
  for (size_t d = sizes.size() - 1; d > 0; --d) strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
  return empty_strided(sizes, strides, dtype, item_bytes);
}

Tensor dense(Tensor t) { return t.is_contiguous() ? t : torch::stable::contiguous(t); }

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <class T>
T* out_data(Tensor& t) {
  return static_cast<T*>(t.mutable_data_ptr());
}

// Calls `function` with a value of the dtype's type.
template <class Function>
void with_type(ScalarType dtype, const Function& function) {
  switch (dtype) {
    case ScalarType::Float:
      return function(float());
    case ScalarType::BFloat16:
      return function(BFloat16());
    case ScalarType::Half:
      return function(Half());
    default:
      STD_TORCH_CHECK(false, "eight_bit: no kernel for this dtype");
  }
}

int64_t item_bytes(ScalarType dtype) { return dtype == ScalarType::Float ? 4 : 2; }

// --- rows

float largest(const float* row, int64_t count) {
  uint32_t most = 0;  // the bits of absolute values are in their order, and NaN comes last
  for (int64_t i = 0; i < count; ++i) most = std::max(most, std::bit_cast<uint32_t>(row[i]) & 0x7fffffffu);
  return std::bit_cast<float>(most);
}

inline int8_t nearest(float value) {
  const float whole = std::trunc(value);
  const float rounded = whole + (std::fabs(value - whole) >= 0.5f ? std::copysign(1.0f, value) : 0.0f);
  return int8_t(int32_t(std::min(std::max(rounded, -128.0f), 127.0f)));
}

inline uint8_t nearest_fp8(float value) {
  return fp8::narrowed(std::min(std::max(value, -fp8::kLargest), fp8::kLargest));
}

// row / its scale as 8-bit numbers; gives the scale.
float quantise(const float* row, int64_t count, float least, bool is_int8, uint8_t* out) {
  const float most = largest(row, count), scale = (most < least ? least : most) / (is_int8 ? 127.0f : fp8::kLargest);
  if (scale == 0.0f) {
    std::fill_n(out, count, uint8_t(0));
  } else if (is_int8) {
    for (int64_t i = 0; i < count; ++i) out[i] = uint8_t(nearest(row[i] / scale));
  } else {
    for (int64_t i = 0; i < count; ++i) out[i] = nearest_fp8(row[i] / scale);
  }
  return scale;
}

// Calls `each` with the number of each row of a tensor, and with memory for it in float32.
template <class Each>
void for_rows(int64_t rows, int64_t count, const Each& each) {
  const int64_t grain = std::max<int64_t>(kElementsPerThread / std::max<int64_t>(count, 1), 1);
  parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> wide(count);
    for (int64_t row = begin; row < end; ++row) each(row, wide.data());
  });
}

bool is_int8(ScalarType dtype) {
  STD_TORCH_CHECK(dtype == ScalarType::Char || dtype == ScalarType::Float8_e4m3fn, "eight_bit: int8 or float8_e4m3fn");
  return dtype == ScalarType::Char;
}

std::tuple<Tensor, Tensor> dynamic_quant(Tensor x, ScalarType dtype) {
  x = dense(std::move(x));
  const int64_t count = x.size(x.dim() - 1), rows = x.numel() / count;
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
  return norm(dense(std::move(x)), nullptr, nullptr, std::move(weight), eps, dtype);
}

std::tuple<Tensor, Tensor, Tensor> add_rms_norm_w8a8(Tensor x, Tensor residual, Tensor weight, double eps,
                                                     ScalarType dtype) {
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
  x = dense(std::move(x));
  const int64_t count = x.size(x.dim() - 1), rows = x.numel() / count;
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
        for (int64_t i = begin; i < begin + size; ++i) {
          out[row * count + i] = fp8::widened(nearest_fp8(wide[i])) * scale;
        }
      }
    });
  });
  return result;
}

// --- linear layers

int64_t block_grain(int64_t columns) {
  return std::max<int64_t>(kBytesPerThread / std::max<int64_t>(kBlockRows * columns, 1), 1);
}

// out[c, r] = sums[c * kRows + r] * ..., rounded, plus the bias, rounded again.
template <class T>
T with_bias(float value, const T* bias, int64_t row) {
  const T rounded(value);
  return bias ? T(float(rounded) + float(bias[row])) : rounded;
}

// Calls `tile(rows, first row, c, inputs, sums)` for all tiles of a weight and rows of x, and `store(c, r, sum)`.
template <class Sum, int kTileInputs, class Tile, class Store>
void for_tiles(int64_t rows, int64_t inputs, int64_t columns, const Tile& tile, const Store& store) {
  const int64_t blocks = (rows + kBlockRows - 1) / kBlockRows;
  parallel_for(0, blocks, block_grain(columns), [&](int64_t begin, int64_t end) {
    Sum sums[4 * kTileInputs];
    const int64_t last = std::min(end * kBlockRows, rows);
    for (int64_t first = begin * kBlockRows; first < last; first += kBlockRows) {
      const int64_t block_end = std::min(first + kBlockRows, last);
      for (int64_t c = 0; c < inputs; c += kTileInputs) {
        const int64_t some = std::min<int64_t>(kTileInputs, inputs - c);
        for (int64_t r = first; r < block_end;) {
          const int64_t together = r + 4 <= block_end ? 4 : 1;
          tile(together, r, c, some, sums);
          for (int64_t i = 0; i < some; ++i) {
            for (int64_t j = 0; j < together; ++j) store(c + i, r + j, sums[i * together + j]);
          }
          r += together;
        }
      }
    }
  });
}

Tensor linear_int8(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, ScalarType dtype, MaybeTensor bias) {
  x = dense(std::move(x));
  x_scale = dense(std::move(x_scale));
  weight = dense(std::move(weight));
  weight_scale = dense(std::move(weight_scale));
  if (bias) bias = dense(*bias);
  const int64_t inputs = x.size(0), columns = x.size(1), rows = weight.size(0);
  Tensor result = packed(x, rows, dtype, item_bytes(dtype));
  const int8::Inputs given(data<int8_t>(x), inputs, columns);
  const int8_t* const numbers = data<int8_t>(weight);
  const float *const by = data<float>(x_scale), *const row_scale = data<float>(weight_scale);
  with_type(dtype, [&]<class T>(T) {
    T* const out = out_data<T>(result);
    const T* const added = bias ? data<T>(*bias) : nullptr;
    for_tiles<int32_t, int8::kTileInputs>(
        rows, inputs, columns,
        [&](int64_t together, int64_t r, int64_t c, int64_t some, int32_t* sums) {
          const auto run = together == 4 ? int8::tile_of<4> : int8::tile_of<1>;
          run(some, numbers + r * columns, columns, given[c], given.stride(), columns, sums);
        },
        [&](int64_t c, int64_t r, int32_t sum) {
          out[c * rows + r] = with_bias(float(sum) * by[c] * row_scale[r], added, r);
        });
  });
  return result;
}

fp8::Weight described(const Tensor& weight, const Tensor& scale, int64_t block_rows, int64_t block_columns) {
  return {data<uint8_t>(weight), weight.size(1), data<float>(scale), scale.size(1),
          std::max<int64_t>(block_rows, 1), std::max<int64_t>(block_columns, 1)};
}

Tensor linear_fp8(Tensor x, Tensor weight, Tensor scale, int64_t block_rows, int64_t block_columns, ScalarType dtype,
                  MaybeTensor bias) {
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
    for_tiles<float, 4>(
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
  library.def("dynamic_quant(Tensor x, ScalarType dtype) -> (Tensor, Tensor)");
  library.def("rms_norm_w8a8(Tensor x, Tensor weight, float eps, ScalarType dtype) -> (Tensor, Tensor)");
  library.def("add_rms_norm_w8a8(Tensor x, Tensor residual, Tensor weight, float eps, ScalarType dtype) "
              "-> (Tensor, Tensor, Tensor)");
  library.def("rounded_in_blocks(Tensor x, int block_size, bool power_of_two) -> Tensor");
  library.def("linear_int8(Tensor x, Tensor x_scale, Tensor weight, Tensor weight_scale, ScalarType dtype, "
              "Tensor? bias) -> Tensor");
  library.def("linear_fp8(Tensor x, Tensor weight, Tensor scale, int block_rows, int block_columns, ScalarType dtype, "
              "Tensor? bias) -> Tensor");
  library.def("widen_fp8(Tensor weight, Tensor scale, int block_rows, int block_columns) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "dynamic_quant", TORCH_BOX(&dlinfer::eight_bit::dynamic_quant));
  dlinfer::chain::put(library, "rms_norm_w8a8", TORCH_BOX(&dlinfer::eight_bit::rms_norm_w8a8));
  dlinfer::chain::put(library, "add_rms_norm_w8a8", TORCH_BOX(&dlinfer::eight_bit::add_rms_norm_w8a8));
  dlinfer::chain::put(library, "rounded_in_blocks", TORCH_BOX(&dlinfer::eight_bit::rounded_in_blocks));
  dlinfer::chain::put(library, "linear_int8", TORCH_BOX(&dlinfer::eight_bit::linear_int8));
  dlinfer::chain::put(library, "linear_fp8", TORCH_BOX(&dlinfer::eight_bit::linear_fp8));
  dlinfer::chain::put(library, "widen_fp8", TORCH_BOX(&dlinfer::eight_bit::widen_fp8));
}
