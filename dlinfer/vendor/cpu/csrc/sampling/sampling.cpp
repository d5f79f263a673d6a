// dlinfer_cpu::largest_tokens and dlinfer_cpu::drawn_tokens: the next token of each row of logits.
//
// Roofline: logits are read once from memory for the largest number, 2 to 4 bytes each. A draw adds up their
// weights from a cache, once or a few times: 0.1 ms for 150,000 of them on one thread. Sorting them takes 15 ms.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <vector>

#include "chain/table.h"
#include "common/result_memory.h"
#include "common/tensor_rows.h"
#include "common/with_type.h"
#include "sampling/draw.h"
#include "threads/team.h"

namespace dlinfer::sampling {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// Groups of blocks that are worth another thread, where only the largest number is looked for.
constexpr int64_t kReadGroups = 8;

// All rows, with the largest number of each of their blocks.
template <class T>
class Rows {
 public:
  explicit Rows(const Tensor& logits)
      : from_(logits), count_(logits.size(0)), width_(logits.size(1)), blocks_((width_ + kBlock - 1) / kBlock) {
    tops_.resize(count_ * blocks_);
    for_groups(kReadGroups, [&](const Row<T>& row, int64_t index, int64_t group) {
      const int64_t end = std::min(row.blocks(), (group + 1) * kGroup);
      for (int64_t i = group * kGroup; i < end; ++i) tops_[index * blocks_ + i] = top_of(row.block(i), row.size(i));
    });
  }

  int64_t count() const { return count_; }

  Row<T> operator[](int64_t i) const { return {from_[i], width_, tops_.data() + i * blocks_}; }

  // Calls each(row, its index, group) for all groups of all rows.
  template <class Each>
  void for_groups(int64_t grain, const Each& each) const {
    const int64_t groups = (blocks_ + kGroup - 1) / kGroup;
    parallel_for(0, count_ * groups, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) each((*this)[i / groups], i / groups, i % groups);
    });
  }

 private:
  TensorRows<T> from_;
  int64_t count_, width_, blocks_;
  std::vector<float> tops_;
};

void check(const char* op, const Tensor& logits) {
  STD_TORCH_CHECK(logits.dim() == 2 && logits.size(1) > 0, op, ": logits are [rows, vocabulary], which is not empty");
}

template <class Number>
std::vector<Number> read(const char* op, const char* name, const Tensor& numbers, int64_t rows, ScalarType dtype) {
  STD_TORCH_CHECK(numbers.dim() == 1 && numbers.size(0) == rows, op, ": ", name, " is [rows = ", rows, "]");
  STD_TORCH_CHECK(numbers.scalar_type() == dtype, op, ": ", name, " is ", dtype == ScalarType::Long ? "int64" : "float32");
  const auto* const data = static_cast<const Number*>(numbers.const_data_ptr());
  std::vector<Number> found(rows);
  for (int64_t i = 0; i < rows; ++i) found[i] = data[i * numbers.stride(0)];
  return found;
}

Tensor largest_tokens(Tensor logits) {
  check("largest_tokens", logits);
  Tensor out = empty_packed({logits.size(0)}, ScalarType::Long, sizeof(int64_t));
  auto* const tokens = static_cast<int64_t*>(out.mutable_data_ptr());
  with_type(logits.scalar_type(), "largest_tokens", [&]<class T>(T) {
    const Rows<T> rows(logits);
    for (int64_t i = 0; i < rows.count(); ++i) tokens[i] = largest_of(rows[i]).token;
  });
  return out;
}

template <class T>
void draw_all(const Rows<T>& rows, const std::vector<Limits>& limits, const std::vector<float>& numbers,
              int64_t* tokens) {
  std::vector<Draw<T>> draws;
  for (int64_t i = 0; i < rows.count(); ++i) draws.push_back({rows[i], limits[i], numbers[i]});
  parallel_for(0, rows.count(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) prepare(draws[i]);
  });
  const int64_t groups = rows.count() ? draws[0].row.groups() : 0;
  std::vector<Amounts> measured(rows.count() * groups);
  rows.for_groups(kMeasuredGroups, [&](const Row<T>& row, int64_t i, int64_t group) {
    if (draws[i].token) return;
    measured[i * groups + group] = measure_group(row, group, draws[i].largest.value, draws[i].at);
  });
  // The threads of a row that is alone are shared by its further measurements.
  parallel_for(0, rows.count(), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      tokens[i] = draws[i].token ? *draws[i].token : drawn(draws[i], total(measured.data() + i * groups, groups));
    }
  });
}

Tensor drawn_tokens(Tensor logits, Tensor numbers, MaybeTensor top_k, MaybeTensor top_p, MaybeTensor min_p) {
  const char* const op = "drawn_tokens";
  check(op, logits);
  const int64_t count = logits.size(0);
  std::vector<Limits> limits(count);
  const auto given = read<float>(op, "numbers", numbers, count, ScalarType::Float);
  if (top_k) {
    const auto found = read<int64_t>(op, "top_k", *top_k, count, ScalarType::Long);
    for (int64_t i = 0; i < count; ++i) limits[i].top_k = found[i];
  }
  if (top_p) {
    const auto found = read<float>(op, "top_p", *top_p, count, ScalarType::Float);
    for (int64_t i = 0; i < count; ++i) limits[i].top_p = found[i];
  }
  if (min_p) {
    const auto found = read<float>(op, "min_p", *min_p, count, ScalarType::Float);
    for (int64_t i = 0; i < count; ++i) limits[i].min_p = found[i];
  }
  Tensor out = empty_packed({count}, ScalarType::Long, sizeof(int64_t));
  with_type(logits.scalar_type(), op, [&]<class T>(T) {
    draw_all(Rows<T>(logits), limits, given, static_cast<int64_t*>(out.mutable_data_ptr()));
  });
  return out;
}

}  // namespace
}  // namespace dlinfer::sampling

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("largest_tokens(Tensor logits) -> Tensor");
  library.def(
      "drawn_tokens(Tensor logits, Tensor numbers, Tensor? top_k=None, Tensor? top_p=None, Tensor? min_p=None) -> "
      "Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "largest_tokens", TORCH_BOX(&dlinfer::sampling::largest_tokens));
  dlinfer::chain::put(library, "drawn_tokens", TORCH_BOX(&dlinfer::sampling::drawn_tokens));
}
