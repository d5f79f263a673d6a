// The rows of each expert: the choices of all tokens sorted by expert, with their weights.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <vector>

#include "common/lanes.h"

namespace dlinfer::moe {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// A two-dimensional tensor's numbers, whatever its strides: calls each(row, column, value).
template <class T, class Each>
void for_numbers_as(const Tensor& t, int64_t begin, int64_t end, const Each& each) {
  const T* const data = static_cast<const T*>(t.const_data_ptr());
  for (int64_t row = begin; row < end; ++row) {
    for (int64_t column = 0; column < t.size(1); ++column) {
      each(row, column, data[row * t.stride(0) + column * t.stride(1)]);
    }
  }
}

template <class Each>
void for_numbers(const Tensor& t, int64_t begin, int64_t end, const Each& each) {
  switch (t.scalar_type()) {
    case ScalarType::Int:
      return for_numbers_as<int32_t>(t, begin, end, each);
    case ScalarType::Long:
      return for_numbers_as<int64_t>(t, begin, end, each);
    case ScalarType::Float:
      return for_numbers_as<float>(t, begin, end, each);
    case ScalarType::Double:
      return for_numbers_as<double>(t, begin, end, each);
    case ScalarType::BFloat16:
      return for_numbers_as<BFloat16>(t, begin, end, each);
    case ScalarType::Half:
      return for_numbers_as<Half>(t, begin, end, each);
    default:
      STD_TORCH_CHECK(false, "fused_moe: ids are int32 or int64, weights floating");
  }
}

// The rows of an expert: choices begin .. end of a Routing.
struct Share {
  int64_t expert, begin, end;
  int64_t count() const { return end - begin; }
};

// The choices of tokens begin .. end, in the order of their experts, and of the tokens where the expert is the same.
// That order makes a token's sum the same whoever else is in the batch.
struct Routing {
  std::vector<int64_t> token;  // of each choice, counted from the first
  std::vector<float> weight;   // of each choice
  std::vector<Share> shares;   // of the chosen experts, in order
};

// Raises for an id that names no expert, with the text of dlinfer's OpArgumentError; callers convert the error.
inline void check_ids(const Tensor& ids, int64_t experts, const char* op) {
  int64_t lowest = std::numeric_limits<int64_t>::max(), highest = std::numeric_limits<int64_t>::min();
  for_numbers(ids, 0, ids.size(0), [&](int64_t, int64_t, auto id) {
    lowest = std::min(lowest, int64_t(id));
    highest = std::max(highest, int64_t(id));
  });
  STD_TORCH_CHECK(ids.numel() == 0 || (lowest >= 0 && highest < experts), "dlinfer.ops.", op,
                  ": argument topk_ids: expected ids of 0..", experts - 1, ", given ids of ", lowest, "..", highest,
                  ".");
}

// The choices' experts are those of check_ids. ids and weights: [tokens, topk]. renormalize: a token's weights by their
// sum.
inline Routing route(const Tensor& ids, const Tensor& weights, int64_t begin, int64_t end, int64_t experts,
                     bool renormalize) {
  const int64_t topk = ids.size(1), choices = (end - begin) * topk;
  std::vector<int64_t> expert(choices), place(experts + 1, 0);
  for_numbers(ids, begin, end, [&](int64_t row, int64_t column, auto id) {
    const int64_t chosen = int64_t(id);
    expert[(row - begin) * topk + column] = chosen;
    ++place[chosen + 1];
  });
  std::vector<float> given(choices);
  for_numbers(weights, begin, end, [&](int64_t row, int64_t column, auto weight) {
    given[(row - begin) * topk + column] = float(weight);
  });
  for (int64_t first = 0; renormalize && first < choices; first += topk) {
    float sum = 0.0f;
    for (int64_t i = 0; i < topk; ++i) sum += given[first + i];
    for (int64_t i = 0; i < topk; ++i) given[first + i] /= sum;
  }

  Routing routing{std::vector<int64_t>(choices), std::vector<float>(choices), {}};
  for (int64_t e = 0; e < experts; ++e) {
    place[e + 1] += place[e];
    if (place[e + 1] > place[e]) routing.shares.push_back({e, place[e], place[e + 1]});
  }
  for (int64_t i = 0; i < choices; ++i) {
    const int64_t to = place[expert[i]]++;
    routing.token[to] = i / topk;
    routing.weight[to] = given[i];
  }
  return routing;
}

}  // namespace dlinfer::moe
