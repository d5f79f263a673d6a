// dlinfer_cpu::pack_bf12, unpack_bf12 and embedding_bf12: packed matrices made, unpacked, and some rows of one.
//
// Roofline: all are bound by memory. Packing reads a matrix twice, as the exponents that get codes are those that are
// frequent in all of it.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <mutex>
#include <numeric>
#include <vector>

#include "bf12/matrix.h"
#include "bf12/table.h"
#include "bf12/unpack.h"
#include "chain/table.h"
#include "common/result_memory.h"
#include "linear/few_rows.h"
#include "threads/team.h"

namespace dlinfer::bf12 {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int64_t kNumbersPerThread = 64 << 10;  // below this many a thread is done before another one has begun

int64_t grain(int64_t numbers) { return std::max<int64_t>(kNumbersPerThread / std::max<int64_t>(numbers, 1), 1); }

constexpr int exponent(uint16_t bits) { return bits >> 7 & 0xff; }

using Counts = std::array<int64_t, 256>;

// How many numbers have each exponent.
Counts count_exponents(Rows<const uint16_t> from, int64_t columns) {
  Counts all{};
  std::mutex mutex;
  parallel_for(0, from.count, grain(columns), [&](int64_t begin, int64_t end) {
    Counts here[2]{};  // neighbours are often equal, and then would wait for each other
    for (int64_t row = begin; row < end; ++row) {
      const uint16_t* const numbers = from.data + row * from.stride;
      for (int64_t i = 0; i < columns; ++i) ++here[i % 2][exponent(numbers[i])];
    }
    const std::lock_guard lock(mutex);
    for (int i = 0; i < 256; ++i) all[i] += here[0][i] + here[1][i];
  });
  return all;
}

// The base that leaves the fewest exceptions; the smallest of several.
int best_base(const Counts& counts) {
  int best = 0;
  int64_t most = -1;
  for (int base = 0; base + kExponents <= 255; ++base) {
    const int64_t named = std::accumulate(&counts[base + 1], &counts[base + 1] + kExponents, int64_t(0));
    if (named > most) best = base, most = named;
  }
  return best;
}

class Packer {
 public:
  Packer(Rows<const uint16_t> from, int64_t columns)
      : from_(from), columns_(columns), base_(best_base(count_exponents(from, columns))) {}

  // [bytes], uint8.
  Tensor operator()() const {
    const int64_t count = strips(from_.count), strip_bytes = groups(columns_) * kStrip * kGroupBytes;
    std::vector<std::vector<uint64_t>> exceptions(count);
    const auto for_strips = [&](const auto& body) {
      parallel_for(0, count, grain(kStrip * columns_), [&](int64_t begin, int64_t end) {
        for (int64_t strip = begin; strip < end; ++strip) body(strip);
      });
    };
    for_strips([&](int64_t strip) { exceptions[strip] = exceptions_of(strip); });
    std::vector<int64_t> words{base_, 0};
    for (const auto& some : exceptions) words.push_back(words.back() + int64_t(some.size()));
    for (const auto& some : exceptions) words.insert(words.end(), some.begin(), some.end());
    const int64_t head = count * strip_bytes, bytes = head + int64_t(words.size()) * 8;
    Tensor packed = empty_lasting(bytes);
    auto* const to = static_cast<uint8_t*>(packed.mutable_data_ptr());
    for_strips([&](int64_t strip) { pack_strip(strip, to + strip * strip_bytes); });
    std::memcpy(to + head, words.data(), words.size() * 8);
    return packed;
  }

 private:
  bool is_exception(uint16_t bits) const {
    const int e = exponent(bits);
    return e != 0 && (e <= base_ || e > base_ + kExponents);
  }

  std::vector<uint64_t> exceptions_of(int64_t strip) const {
    std::vector<uint64_t> found;
    for (int64_t row = strip * kStrip; row < std::min((strip + 1) * kStrip, from_.count); ++row) {
      const uint16_t* const numbers = from_.data + row * from_.stride;
      for (int64_t i = 0; i < columns_; ++i) {
        if (is_exception(numbers[i])) found.push_back(uint64_t(i) << 18 | uint64_t(row % kStrip) << 16 | numbers[i]);
      }
    }
    std::sort(found.begin(), found.end());
    return found;
  }

  void pack_strip(int64_t strip, uint8_t* to) const {
    for (int64_t first = 0; first < columns_; first += kGroup) {
      for (int64_t row = strip * kStrip; row < (strip + 1) * kStrip; ++row, to += kGroupBytes) {
        uint16_t numbers[kGroup]{}, codes[kGroup], words[kGroupBytes / 2];
        if (row < from_.count) {
          std::copy_n(from_.data + row * from_.stride + first, std::min(kGroup, columns_ - first), numbers);
        }
        for (int i = 0; i < kGroup; ++i) {
          const bool coded = !is_exception(numbers[i]);
          const int e = exponent(numbers[i]);
          codes[i] = coded && e != 0 ? e - base_ : 0;
          numbers[i] = coded ? numbers[i] & kField : 0;
        }
        constexpr int kLane = kGroup / 4;
        for (int i = 0; i < kLane; ++i) {
          const auto pair = [&](uint16_t a, uint16_t b) { return uint16_t(a | b << 8 | b >> 8); };
          words[i] = pair(numbers[i], numbers[kLane + i]);
          words[kLane + i] = pair(numbers[2 * kLane + i], numbers[3 * kLane + i]);
          words[2 * kLane + i] = codes[i] | codes[kLane + i] << 4 | codes[2 * kLane + i] << 8 | codes[3 * kLane + i] << 12;
        }
        std::memcpy(to, words, sizeof words);
      }
    }
  }

  const Rows<const uint16_t> from_;
  const int64_t columns_;
  const int base_;
};

Tensor pack_bf12(Tensor weight) {
  STD_TORCH_CHECK(weight.dim() == 2 && weight.scalar_type() == ScalarType::BFloat16,
                  "pack_bf12: a bfloat16 tensor [rows, columns] is needed");
  if (weight.size(1) > 1 && weight.stride(1) != 1) weight = torch::stable::contiguous(weight);
  const auto* const data = static_cast<const uint16_t*>(weight.const_data_ptr());
  return Packer({data, weight.stride(0), weight.size(0)}, weight.size(1))();
}

// A row of a matrix, into `columns` numbers. unpacked: room for its whole groups.
void copy_row(const Matrix& matrix, const Exponents& exponents, int64_t row, std::vector<uint16_t>& unpacked,
              uint16_t* to) {
  const int64_t at = row % kStrip;
  const uint8_t* const from = matrix.strip(row / kStrip);
  for (int64_t group = 0; group < groups(matrix.columns()); ++group) {
    unpack_group(from + (group * kStrip + at) * kGroupBytes, exponents, unpacked.data() + group * kGroup);
  }
  Exceptions exceptions = matrix.exceptions(row / kStrip);
  for (Exception one; exceptions.next(matrix.columns(), one);) {
    if (one.row == at) unpacked[one.column] = one.bits;
  }
  std::copy_n(unpacked.data(), matrix.columns(), to);
}

// out: row i of the result is row place(i) of the matrix.
template <class Place>
void copy_rows(const Matrix& matrix, int64_t count, uint16_t* out, const Place& place) {
  parallel_for(0, count, grain(matrix.columns()), [&](int64_t begin, int64_t end) {
    const Exponents exponents(matrix.base());
    std::vector<uint16_t> unpacked(groups(matrix.columns()) * kGroup);
    for (int64_t i = begin; i < end; ++i) {
      copy_row(matrix, exponents, place(i), unpacked, out + i * matrix.columns());
    }
  });
}

Tensor unpack_bf12(Tensor packed, int64_t rows, int64_t columns) { return unpacked(Matrix(packed, rows, columns)); }

Tensor embedding_bf12(Tensor indices, Tensor weight, int64_t rows, int64_t columns) {
  const ScalarType type = indices.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Long || type == ScalarType::Int, "embedding_bf12: indices are int64 or int32");
  const Matrix matrix(weight, rows, columns);
  if (!indices.is_contiguous()) indices = torch::stable::contiguous(indices);
  std::vector<int64_t> shape(indices.sizes().begin(), indices.sizes().end());
  shape.push_back(columns);
  Tensor out = empty_packed(shape, ScalarType::BFloat16, 2);
  const void* const places = indices.const_data_ptr();
  const bool wide = type == ScalarType::Long;
  copy_rows(matrix, indices.numel(), static_cast<uint16_t*>(out.mutable_data_ptr()), [&](int64_t i) {
    const int64_t row = wide ? static_cast<const int64_t*>(places)[i] : static_cast<const int32_t*>(places)[i];
    STD_TORCH_CHECK(row >= 0 && row < rows, "embedding_bf12: index out of range in self: ", row, " of ", rows, " rows");
    return row;
  });
  return out;
}

}  // namespace

Tensor unpacked(const Matrix& matrix) { return unpacked(matrix, 0, matrix.rows()); }

Tensor unpacked(const Matrix& matrix, int64_t first, int64_t count) {
  Tensor out = empty_packed({count, matrix.columns()}, ScalarType::BFloat16, 2);
  copy_rows(matrix, count, static_cast<uint16_t*>(out.mutable_data_ptr()), [&](int64_t i) { return first + i; });
  return out;
}

}  // namespace dlinfer::bf12

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def("pack_bf12(Tensor weight) -> Tensor");
  library.def("unpack_bf12(Tensor packed, int rows, int columns) -> Tensor");
  library.def("embedding_bf12(Tensor indices, Tensor weight, int rows, int columns) -> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  library.impl("pack_bf12", TORCH_BOX(&dlinfer::bf12::pack_bf12));
  library.impl("unpack_bf12", TORCH_BOX(&dlinfer::bf12::unpack_bf12));
  dlinfer::chain::put(library, "embedding_bf12", TORCH_BOX(&dlinfer::bf12::embedding_bf12));
}
