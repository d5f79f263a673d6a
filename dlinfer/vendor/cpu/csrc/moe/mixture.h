// The weighted sum of experts' MLPs, for any layout of their weights.
//
// Experts with few rows are computed together (experts.h); one with many is computed like two linear layers, by all
// threads.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/result_memory.h"
#include "common/widen.h"
#include "linear/few_rows.h"
#include "linear/limits.h"
#include "common/tile_registers.h"
#include "moe/experts.h"
#include "threads/team.h"

namespace dlinfer::moe {

using torch::stable::Tensor;

// An expert of more rows than these is taken as two linear layers, which pass it on to torch's product. Measured on an
// AMD EPYC of the Zen 4 kind, with more experts than a cache holds (benchmarks/moe.py). In bfloat16 ours is
// ahead up to 128 rows and as fast at 256. oneDNN has to make a product for each new number of rows, which costs 0.5
// ms. torch's float16 is four times slower than ours at any number. AMX tiles and AVX2 were not measured for experts:
// with tiles it is the number that is surely bound by reading, with AVX2 that of a layer.
template <class T>
int64_t most_rows() {
  if (batch_invariant()) return kAnyNumber;
  if (kTakesBlocks<T>) return kUntilBlocks;
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
  return 16;
}

// Tokens that are computed at a time, so that their rows and activations take no more memory than these need.
constexpr int64_t kTokens = 2048;

constexpr int64_t kBytesGathered = 512 << 10;  // by a thread, at least: copying that takes as long as its start
constexpr int64_t kElementsActivated = 32 << 10;

template <class T>
const T* data(const Tensor& t) {
  return static_cast<const T*>(t.const_data_ptr());
}

template <class T>
Tensor packed(int64_t rows, int64_t columns, const Tensor& like) {
  return empty_strided({rows, columns}, {columns, 1}, like.scalar_type(), sizeof(T));
}

// One cache line more lies between two rows. Otherwise rows of a power of two columns share places in the first-level
// cache, and a tile's eight rows of x push each other out of it. That is a fifth of the time of 64 float32 rows of
// 1024.
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

// The experts of each token, and their weights.
struct Choice {
  const Tensor &weights, &ids;
  bool renormalize;
  Activation activation;
};

enum class Layer { kGateUp, kDown };

// The tokens `begin` to `end`. most: rows of an expert that experts.h takes; product(layer, x, expert): that expert's
// linear layer, of more rows.
template <class Stack, class Product, class T = typename Stack::Type>
void mix(const Tensor& hidden, const Choice& choice, const Stack& gate_up, const Stack& down, int64_t most,
         const Product& product, int64_t begin, int64_t end, Rows<T> out) {
  const Routing routing =
      route(choice.ids, choice.weights, begin, end, gate_up.experts, choice.renormalize);
  const int64_t choices = routing.token.size();
  Tensor rows = spaced<T>(choices, hidden.size(1), hidden);
  Tensor activations = spaced<T>(choices, down.columns, hidden);
  gather(hidden, begin, routing, rows_of<T>(rows));

  std::vector<Tensor> kept;  // results as long as they are read
  std::vector<const T*> results(routing.shares.size(), nullptr);
  for (size_t i = 0; i < results.size(); ++i) {
    const Share& share = routing.shares[i];
    if (share.count() <= most) continue;
    Tensor activated = torch::stable::narrow(activations, 0, share.begin, share.count());
    const Tensor some = torch::stable::narrow(rows, 0, share.begin, share.count());
    activate(product(Layer::kGateUp, some, share.expert), choice.activation, rows_of<T>(activated));
    kept.push_back(product(Layer::kDown, activated, share.expert));
    results[i] = data<T>(kept.back());
  }
  const Rows<T> given = rows_of<T>(rows);
  Experts<Stack>(gate_up, down, routing, choice.activation, {given.data, given.stride, given.count},
                 rows_of<T>(activations), std::move(results), out)
      .run();
}

// The same of all tokens: [tokens, hidden].
template <class Stack, class Product, class T = typename Stack::Type>
Tensor mix(const Tensor& hidden, const Choice& choice, const Stack& gate_up, const Stack& down, int64_t most,
           const Product& product) {
  const int64_t tokens = hidden.size(0), size = hidden.size(1), chunks = (tokens + kTokens - 1) / kTokens;
  Tensor out = packed<T>(tokens, size, hidden);
  for (int64_t i = 0; i < chunks; ++i) {
    const int64_t begin = tokens * i / chunks, end = tokens * (i + 1) / chunks;
    const Rows<T> to{static_cast<T*>(out.mutable_data_ptr()) + begin * size, size, end - begin};
    mix(hidden, choice, gate_up, down, most, product, begin, end, to);
  }
  return out;
}

}  // namespace dlinfer::moe
