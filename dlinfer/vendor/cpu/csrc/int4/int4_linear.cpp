// dlinfer_cpu::weight_quant_matmul: a linear layer whose weight is of 4 bits, as AWQ packs it; and mxfp4_matmul, of which
// four bits are a float.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <memory>
#include <optional>
#include <vector>

#include "chain/table.h"
#include "common/result_memory.h"
#include "int4/int4.h"
#include "threads/team.h"

namespace dlinfer::int4 {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kChunkRows = 8 * kMostRows;  // of x, for which a weight is read once
constexpr int64_t kSliceBytes = 256 << 10;     // of sums: a part of the second-level cache
constexpr int64_t kBytesPerThread = 64 << 10;  // of the weight: below it a thread is done before another has begun
constexpr int64_t kPackedRows = 64;            // of x: fewer are packed before another thread has begun

// --- floats of three dtypes

template <class T>
void widen(const void* data, int64_t from, int64_t count, float* to) {
  const T* numbers = static_cast<const T*>(data) + from;
  int64_t at = 0;
#if defined(DLINFER_HAS_HALF)
  if constexpr (std::is_same_v<T, Half>) {
    for (; at + kLanes <= count; at += kLanes) {
      const Floats wide = Operands<Half>::load(numbers + at);
      std::memcpy(to + at, &wide, sizeof wide);
    }
  }
#endif
  for (; at < count; ++at) to[at] = float(numbers[at]);
}

template <class T>
void narrow(const float* from, int64_t count, void* data, int64_t to) {
  T* numbers = static_cast<T*>(data) + to;
  for (int64_t i = 0; i < count; ++i) numbers[i] = T(from[i]);
}

struct Kind {
  int64_t bytes;
  void (*widen)(const void*, int64_t, int64_t, float*);
  void (*narrow)(const float*, int64_t, void*, int64_t);
};

Kind kind_of(const Tensor& tensor, const char* name) {
  switch (tensor.scalar_type()) {
    case ScalarType::Float:
      return {4, widen<float>, narrow<float>};
    case ScalarType::BFloat16:
      return {2, widen<BFloat16>, narrow<BFloat16>};
    case ScalarType::Half:
      return {2, widen<Half>, narrow<Half>};
    default:
      STD_TORCH_CHECK(false, "weight_quant_matmul: ", name, " is no float32, bfloat16 or float16 tensor");
  }
}

std::unique_ptr<float[]> floats(int64_t count) { return std::unique_ptr<float[]>(new float[std::max<int64_t>(count, 1)]); }

// --- the layer

// Whether neighbours along the last dimension are neighbours in memory.
Tensor with_dense_rows(const Tensor& t) {
  const int64_t last = t.dim() - 1;
  return t.size(last) <= 1 || t.stride(last) == 1 ? t : torch::stable::contiguous(t);
}

struct Layer {
  const uint32_t* words;
  int64_t stride;  // words from a row of the weight to the next; likewise below
  const void* scales;
  int64_t scales_stride;
  Kind scales_kind;
  const uint32_t* zeros;  // null where all are 8
  int64_t zeros_stride;
  const float* bias;  // or null
  int64_t in, out, group;
  const Tiles* tiles;

  int64_t words_of_a_row() const { return out / kNibbles; }
  int64_t blocks() const { return (words_of_a_row() + kLanes - 1) / kLanes; }
  int64_t strips_of_a_group() const { return (group + kStripRows - 1) / kStripRows; }
  int64_t strips() const { return in ? ((in - 1) / group) * strips_of_a_group() + ((in - 1) % group) / kStripRows + 1 : 0; }
};

// The rows of the weight that a strip has, and its group.
struct Span {
  int64_t group, begin, depth;
};

Span span_of(const Layer& layer, int64_t strip) {
  const int64_t group = strip / layer.strips_of_a_group();
  const int64_t begin = group * layer.group + strip % layer.strips_of_a_group() * kStripRows;
  const int64_t end = std::min({begin + kStripRows, (group + 1) * layer.group, layer.in});
  return {group, begin, end - begin};
}

// Rows of x in words, `rows` of them side by side for each in_feature in float32, or each two in bfloat16, and the sums
// of each row over each strip.
struct Inputs {
  int64_t count, words, strips, rows;
  bool pairs;
  std::unique_ptr<float[]> numbers, sums;

  int64_t rows_at(int64_t first) const { return std::min(rows, count - first); }
  const float* at(int64_t first, int64_t column) const {
    return numbers.get() + first * words + column / (pairs ? 2 : 1) * rows_at(first);
  }
};

// Whether x is taken in pairs. A strip then begins with one, so that groups have an even number of rows.
bool takes_pairs([[maybe_unused]] ScalarType dtype, [[maybe_unused]] const Layer& layer) {
#if defined(DLINFER_HAS_INT4_PAIRS)
  return dtype == ScalarType::BFloat16 && (layer.group % 2 == 0 || layer.group >= layer.in);
#else
  return false;
#endif
}

Inputs packed(const void* data, Kind kind, bool pairs, int64_t stride, int64_t count, const Layer& layer) {
  const int64_t passes = std::max<int64_t>((count + kMostRows - 1) / kMostRows, 1);
  const int64_t words = pairs ? (layer.in + 1) / 2 : layer.in;
  Inputs to{count, words, layer.strips(), std::max<int64_t>((count + passes - 1) / passes, 1), pairs};
  to.numbers = floats(count * words);
  to.sums = floats(count * to.strips);
  const int64_t grain = std::max<int64_t>(kPackedRows / to.rows, 1);
  parallel_for(0, (count + to.rows - 1) / to.rows, grain, [&](int64_t begin, int64_t end) {
    const auto row = floats(layer.in);
    for (int64_t first = begin * to.rows; first < std::min(end * to.rows, count); first += to.rows) {
      const int64_t rows = to.rows_at(first);
      float* const block = to.numbers.get() + first * words;
      for (int64_t m = 0; m < rows; ++m) {
        float* const line = rows == 1 && !pairs ? block : row.get();
        kind.widen(data, (first + m) * stride, layer.in, line);
        for (int64_t strip = 0; strip < to.strips; ++strip) {
          const Span span = span_of(layer, strip);
          Floats lanes{};
          int64_t at = 0;
          for (; at + kLanes <= span.depth; at += kLanes) lanes = lanes + load_as<Floats>(line + span.begin + at);
          if (at < span.depth) lanes = lanes + load_part<Floats>(line + span.begin + at, span.depth - at);
          float sum = 0;
          for (int j = 0; j < kLanes; ++j) sum += lanes[j];
          to.sums[(first + m) * to.strips + strip] = sum;
        }
        if (pairs) {
          const auto* const numbers = static_cast<const uint16_t*>(data) + (first + m) * stride;
          for (int64_t k = 0; k < words; ++k) {
            const uint32_t odd = 2 * k + 1 < layer.in ? numbers[2 * k + 1] : 0, pair = numbers[2 * k] | odd << 16;
            std::memcpy(block + k * rows + m, &pair, sizeof pair);
          }
        } else if (rows > 1) {
          for (int64_t k = 0; k < layer.in; ++k) block[k * rows + m] = line[k];
        }
      }
    }
  });
  return to;
}

// Scales and zero points less 8 of a block's columns for one group, in the order of nibbles.
void load_group(const Layer& layer, int64_t group, int64_t word, int64_t words, Floats* scales, Floats* zeros) {
  float columns[kColumns];
  layer.scales_kind.widen(layer.scales, group * layer.scales_stride + word * kNibbles, words * kNibbles, columns);
  std::fill(columns + words * kNibbles, columns + kColumns, 0.0f);
  to_nibble_order(columns, scales);
  if (!layer.zeros) {
    std::fill_n(zeros, kNibbles, Floats{});
    return;
  }
  const Words packed_zeros = load_words(layer.zeros + group * layer.zeros_stride + word, words);
  for (int i = 0; i < kNibbles; ++i) zeros[i] = centred(packed_zeros, i);
}

// out[m, o] for rows m of x from `first` on, as many as a chunk has, and the columns of blocks [begin, end).
void slice(const Layer& layer, const Inputs& x, int64_t first, int64_t begin, int64_t end, Floats* sums, void* out,
           Kind out_kind) {
  const int64_t rows = std::min(kChunkRows / x.rows * x.rows, x.count - first), blocks = end - begin;
  std::fill_n(sums, rows * blocks * kNibbles, Floats{});
  for (int64_t strip = 0; strip < x.strips; ++strip) {
    const Span span = span_of(layer, strip);
    const uint32_t* const line = layer.words + span.begin * layer.stride;
    for (int64_t block = begin; block < end; ++block) {
      const int64_t word = block * kLanes, words = std::min<int64_t>(kLanes, layer.words_of_a_row() - word);
      const Strip weight{line + word, layer.stride, words, span.depth};
      const Next nothing{weight.words, 0};
      Next next = nothing;
      if (block + 1 < end) {
        next = {weight.words + kLanes, layer.stride};
      } else if (strip + 1 < x.strips && span_of(layer, strip + 1).depth >= span.depth) {
        next = {line + span.depth * layer.stride + begin * kLanes, layer.stride};
      }
      Floats scales[kNibbles], zeros[kNibbles], fresh[kSums];
      load_group(layer, span.group, word, words, scales, zeros);
      for (int64_t row = 0; row < rows; row += x.rows) {
        const int64_t count = x.rows_at(first + row);
        const Tile& tile = (*layer.tiles)[count - 1];
        for (int nibble = 0; nibble < kNibbles; nibble += tile.nibbles) {
          const float* const numbers = x.at(first + row, span.begin);
          const Next ahead = row + nibble == 0 ? next : nothing;
#if defined(DLINFER_HAS_INT4_PAIRS)
          if (x.pairs) {
            tile.run_pairs(weight, reinterpret_cast<const uint32_t*>(numbers), nibble, ahead, fresh);
          } else
#endif
            tile.run(weight, numbers, nibble, ahead, fresh);
          for (int64_t m = 0; m < count; ++m) {
            const Floats sum_of_x = broadcast(x.sums[(first + row + m) * x.strips + strip]);
            Floats* const kept = sums + ((row + m) * blocks + block - begin) * kNibbles + nibble;
            for (int i = 0; i < tile.nibbles; ++i) {
              const Floats exact = multiply_add(fresh[i * count + m], -zeros[nibble + i], sum_of_x);
              kept[i] = multiply_add(kept[i], scales[nibble + i], exact);
            }
          }
        }
      }
    }
  }
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t column = block * kColumns, count = std::min<int64_t>(kColumns, layer.out - column);
      const Floats* const kept = sums + (m * blocks + block - begin) * kNibbles;
      float columns[kColumns];
      for (int i = 0; i < kNibbles; ++i) {
        for (int j = 0; j < kLanes; ++j) columns[j * kNibbles + kNibbleOrder[i]] = kept[i][j];
      }
      for (int64_t c = 0; layer.bias && c < count; ++c) columns[c] += layer.bias[column + c];
      out_kind.narrow(columns, count, out, (first + m) * layer.out + column);
    }
  }
}

void run(const Layer& layer, const Inputs& x, void* out, Kind out_kind) {
  const int64_t blocks = layer.blocks(), chunk = std::max<int64_t>(kChunkRows / x.rows * x.rows, 1);
  const int64_t chunks = (x.count + chunk - 1) / chunk;
  const int64_t row_bytes = std::min(chunk, x.count) * kColumns * int64_t(sizeof(float));
  const int64_t widest = std::max<int64_t>(kSliceBytes / std::max<int64_t>(row_bytes, 1), 1);
  const int64_t block_bytes = std::max<int64_t>(layer.in * kLanes * int64_t(sizeof(uint32_t)), 1);
  const int64_t grain = std::max<int64_t>(kBytesPerThread / block_bytes, 1);
  parallel_for(0, chunks * blocks, grain, [&](int64_t begin, int64_t end) {
    const auto memory = floats(std::min(widest, blocks) * row_bytes / int64_t(sizeof(float)) + kLanes);
    const auto address = (reinterpret_cast<uintptr_t>(memory.get()) + sizeof(Floats) - 1) / sizeof(Floats) * sizeof(Floats);
    auto* const sums = reinterpret_cast<Floats*>(address);
    while (begin < end) {
      const int64_t number = begin / blocks, block = begin % blocks;
      const int64_t last = std::min({blocks, block + end - begin, block + widest});
      slice(layer, x, number * chunk, block, last, sums, out, out_kind);
      begin += last - block;
    }
  });
}

void check(const Tensor& x, const Tensor& qweight, const Tensor& scales, const MaybeTensor& offset,
           const MaybeTensor& bias, int64_t group) {
  STD_TORCH_CHECK(x.dim() >= 1 && qweight.dim() == 2 && scales.dim() == 2 && (!offset || offset->dim() == 2) &&
                      (!bias || bias->dim() == 1),
                  "weight_quant_matmul: a number of dimensions is wrong");
  const int64_t in = qweight.size(0), out = scales.size(1), groups = (in + group - 1) / group;
  STD_TORCH_CHECK(x.size(x.dim() - 1) == in, "weight_quant_matmul: x has ", x.size(x.dim() - 1),
                  " in_features, qweight has ", in);
  STD_TORCH_CHECK(qweight.size(1) * kNibbles == out && scales.size(0) == groups,
                  "weight_quant_matmul: scales are [groups = ", groups, ", out_features = ", qweight.size(1) * kNibbles, "]");
  STD_TORCH_CHECK(!offset || (offset->size(0) == groups && offset->size(1) == qweight.size(1)),
                  "weight_quant_matmul: offset is [groups = ", groups, ", words = ", qweight.size(1), "]");
  STD_TORCH_CHECK(!bias || bias->size(0) == out, "weight_quant_matmul: bias is [out_features = ", out, "]");
  STD_TORCH_CHECK(qweight.scalar_type() == ScalarType::Int && (!offset || offset->scalar_type() == ScalarType::Int),
                  "weight_quant_matmul: qweight and offset are int32");
  STD_TORCH_CHECK(qweight.is_cpu() && scales.is_cpu() && (!offset || offset->is_cpu()) && (!bias || bias->is_cpu()),
                  "weight_quant_matmul: not all tensors are on the CPU");
}

Tensor product(Tensor x, Tensor qweight, Tensor scales, MaybeTensor offset, MaybeTensor bias, int64_t group_size,
               const Tiles& tiles) {
  const int64_t group = group_size > 0 ? group_size : std::max<int64_t>(qweight.size(0), 1);
  check(x, qweight, scales, offset, bias, group);
  const Kind kind = kind_of(x, "x"), scales_kind = kind_of(scales, "scales");
  const int64_t rank = x.dim(), in = qweight.size(0), out_features = scales.size(1);

  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end()), strides(rank, 1);
  sizes[rank - 1] = out_features;
  int64_t rows = 1;
  for (int64_t d = rank - 1; d > 0; --d) {
    strides[d - 1] = strides[d] * std::max<int64_t>(sizes[d], 1);
    rows *= sizes[d - 1];
  }
  Tensor out = empty_strided(sizes, strides, x.scalar_type(), kind.bytes);
  if (rows == 0 || out_features == 0) return out;

  qweight = with_dense_rows(qweight);
  scales = with_dense_rows(scales);
  if (offset) offset = with_dense_rows(*offset);
  if (rank > 2 || rank == 1) {
    x = torch::stable::contiguous(x);
  } else {
    x = with_dense_rows(x);
  }
  std::unique_ptr<float[]> bias_numbers;
  if (bias) {
    const Tensor dense = torch::stable::contiguous(*bias);
    bias_numbers = floats(out_features);
    kind_of(dense, "bias").widen(dense.const_data_ptr(), 0, out_features, bias_numbers.get());
  }
  const auto words = [](const Tensor& t) { return static_cast<const uint32_t*>(t.const_data_ptr()); };
  const Layer layer{words(qweight),
                    qweight.stride(0),
                    scales.const_data_ptr(),
                    scales.stride(0),
                    scales_kind,
                    offset ? words(*offset) : nullptr,
                    offset ? offset->stride(0) : 0,
                    bias_numbers.get(),
                    in,
                    out_features,
                    group,
                    &tiles};
  const int64_t stride = rank == 2 ? x.stride(0) : in;
  const bool pairs = takes_pairs(x.scalar_type(), layer);
  run(layer, packed(x.const_data_ptr(), kind, pairs, stride, rows, layer), out.mutable_data_ptr(), kind);
  return out;
}

Tensor weight_quant_matmul(Tensor x, Tensor qweight, Tensor scales, MaybeTensor offset, MaybeTensor bias,
                           int64_t group_size) {
  return product(x, qweight, scales, offset, bias, group_size, kTilesByRows<Numbers::kWhole>);
}

Tensor mxfp4_matmul(Tensor x, Tensor qweight, Tensor scales, int64_t group_size) {
  return product(x, qweight, scales, std::nullopt, std::nullopt, group_size, kTilesByRows<Numbers::kE2M1>);
}

}  // namespace
}  // namespace dlinfer::int4

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def(
      "weight_quant_matmul(Tensor x, Tensor qweight, Tensor scales, Tensor? offset, Tensor? bias, int group_size) -> "
      "Tensor");
  library.def("mxfp4_matmul(Tensor x, Tensor qweight, Tensor scales, int group_size) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "weight_quant_matmul", TORCH_BOX(&dlinfer::int4::weight_quant_matmul));
  dlinfer::chain::put(library, "mxfp4_matmul", TORCH_BOX(&dlinfer::int4::mxfp4_matmul));
}
