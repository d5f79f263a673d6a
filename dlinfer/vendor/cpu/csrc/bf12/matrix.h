// A bfloat16 matrix in 12 bits a number, without loss: where its parts lie. dlinfer/ops/quantised/bf12.py describes the format.
//
// The exponents of a weight are nearly all among 15 neighbours, so that four bits name one; sign and mantissa are eight
// more. The few numbers whose exponent is elsewhere, the exceptions, stand behind the others, whole. A decode step is
// bound by reading weights, so three quarters of the bytes are about three quarters of its time.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <cstring>

namespace dlinfer::bf12 {

constexpr int64_t kStrip = 4;         // rows that lie interleaved
constexpr int64_t kGroup = 128;       // numbers of a row that lie together
constexpr int64_t kGroupBytes = 192;  // what they take
constexpr int kExponents = 15;        // that a code names
constexpr uint16_t kField = 0x807f;   // sign and mantissa

constexpr int64_t strips(int64_t rows) { return (rows + kStrip - 1) / kStrip; }
constexpr int64_t groups(int64_t columns) { return (columns + kGroup - 1) / kGroup; }

// A number whose exponent has no code.
struct Exception {
  int64_t row, column;  // the row of a strip
  uint16_t bits;
};

// Some of them in their order.
class Exceptions {
 public:
  Exceptions(const uint8_t* begin, const uint8_t* end) : at_(begin), end_(end) {}

  // Takes the next one if it stands in a column before `behind`.
  bool next(int64_t behind, Exception& found) {
    if (at_ == end_) return false;
    uint64_t entry;
    std::memcpy(&entry, at_, sizeof entry);
    found = {int64_t(entry >> 16) % kStrip, int64_t(entry >> 18), uint16_t(entry)};
    if (found.column >= behind) return false;
    // The reader writes beside a column that it knows, so columns must not fall.
    STD_TORCH_CHECK(found.column >= last_, "bf12: a packed matrix is damaged");
    last_ = found.column;
    at_ += sizeof entry;
    return true;
  }

  // Leaves out those in columns before `column`.
  void skip(int64_t column) {
    for (Exception one; next(column, one);) {
    }
  }

 private:
  const uint8_t *at_, *end_;
  int64_t last_ = 0;  // the column of the one before
};

// A packed matrix as it lies in memory.
class Matrix {
 public:
  // Of a tensor that stays. Raises where its size cannot be that of such a matrix.
  Matrix(const torch::stable::Tensor& packed, int64_t rows, int64_t columns)
      : rows_(rows), columns_(columns), strip_bytes_(groups(columns) * kStrip * kGroupBytes) {
    using torch::headeronly::ScalarType;
    STD_TORCH_CHECK(packed.scalar_type() == ScalarType::Byte && packed.dim() == 1 && packed.is_contiguous(),
                    "bf12: a packed matrix is a contiguous uint8 tensor of one dimension");
    numbers_ = static_cast<const uint8_t*>(packed.const_data_ptr());
    const int64_t size = packed.numel(), head = strips(rows) * strip_bytes_, words = (size - head) / 8;
    const bool fits = rows >= 0 && columns >= 0 && size >= head && (size - head) % 8 == 0 && words >= 2 + strips(rows);
    STD_TORCH_CHECK(fits, "bf12: ", size, " bytes are no packed matrix of ", rows, " rows and ", columns, " columns");
    base_ = word(0);
    exceptions_ = words - 2 - strips(rows);
    STD_TORCH_CHECK(base_ >= 0 && base_ + kExponents <= 255 && first_exception(strips(rows)) == exceptions_,
                    "bf12: this is no packed matrix of ", rows, " rows and ", columns, " columns");
  }

  int64_t rows() const { return rows_; }
  int64_t columns() const { return columns_; }
  int base() const { return int(base_); }
  int64_t strip_bytes() const { return strip_bytes_; }
  const uint8_t* strip(int64_t index) const { return numbers_ + index * strip_bytes_; }
  const uint8_t* group(int64_t strip, int64_t column) const {
    return numbers_ + strip * strip_bytes_ + column / kGroup * kStrip * kGroupBytes;
  }

  // Those of a strip, the leftmost first.
  Exceptions exceptions(int64_t strip) const {
    const int64_t begin = first_exception(strip), end = first_exception(strip + 1);
    STD_TORCH_CHECK(0 <= begin && begin <= end && end <= exceptions_, "bf12: a packed matrix is damaged");
    return {behind() + (2 + strips(rows_) + begin) * 8, behind() + (2 + strips(rows_) + end) * 8};
  }

 private:
  int64_t first_exception(int64_t strip) const { return word(1 + strip); }

  const uint8_t* behind() const { return numbers_ + strips(rows_) * strip_bytes_; }

  // Of the numbers behind the strips.
  int64_t word(int64_t index) const {
    int64_t found;
    std::memcpy(&found, behind() + index * 8, sizeof found);
    return found;
  }

  const uint8_t* numbers_;
  int64_t rows_, columns_, strip_bytes_, base_, exceptions_;
};

}  // namespace dlinfer::bf12
