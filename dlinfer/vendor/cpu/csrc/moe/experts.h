// All experts with few rows each, in one parallel run of all threads.
//
// Roofline. A chosen expert's 3 * hidden * intermediate weights are read once and do 2 operations a row with each. Up
// to about 8 rows (bfloat16, AVX-512) reading takes the time, and above that the dot products do. few_rows.h computes
// them about as fast as torch's product does with many rows. So packing, or a second reading, would gain nothing; only
// the time between two pieces can be lost. The work is cut in two:
// - first: (expert, kBlockRows rows of gate and the same of up) -> activations of all the expert's rows
// - second: (some rows of down of every expert) -> these columns of the result, weighted and added up in float32
//
// Threads take pieces one after another as they become free; each knows its next piece while it computes one, and
// fetches it meanwhile. Between the two is a barrier, not a second start: those who are done wait for the last
// activation. No column of a result is touched by two threads, and experts are added up in their order. So a
// token's result has the same bits with any number of threads, and in any batch.
#pragma once

#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <vector>

#include "linear/few_rows.h"
#include "moe/activation.h"
#include "moe/routing.h"
#include "threads/team.h"
#include "threads/wait.h"

namespace dlinfer::moe {

constexpr int64_t kBytesPerThread = 64 << 10;  // of weights: below it a thread is done before another has begun
constexpr int64_t kRowsAtATime = 64;           // of an expert: their sums stay in the first-level cache
constexpr int64_t kSumBytes = 128 << 10;       // of the results of a piece: they stay in the second-level cache
constexpr int64_t kMostBlocks = 4;             // of down, which a piece reads one behind the other
constexpr int64_t kPiecesPerThread = 8;        // at least, so that none waits long for the last

// A stack of matrices, one an expert: [experts, rows, columns], and a bias [experts, rows] or none.
template <class T>
struct Stack {
  using Type = T;

  const T* data;
  int64_t expert_stride, row_stride, experts, rows, columns;
  const T* bias;
  int64_t bias_stride;

  const void* at(int64_t expert, int64_t row) const { return data + expert * expert_stride + row * row_stride; }
  float bias_of(int64_t expert, int64_t row) const { return bias ? float(bias[expert * bias_stride + row]) : 0.0f; }

  // As in few_rows.h, for `count` rows of an expert from `row` on. next: the memory that is read next, or null.
  void block_sums(int64_t expert, int64_t row, int64_t count, Rows<const T> x, const void* next, float* sums) const {
    const Rows<const T> weight{static_cast<const T*>(at(expert, row)), row_stride, count};
    dlinfer::block_sums(weight, x, columns, static_cast<const T*>(next), sums);
  }
};

// Stack: plain weights, or a type with the same members.
template <class Stack>
class Experts {
 public:
  using T = typename Stack::Type;

  // rows: of hidden states, one a choice, in the routing's order. activations: [choices, intermediate], written.
  // results: by share; null where the expert's results are to be computed here, else they are there, [rows, hidden].
  // out: [tokens, hidden], written.
  Experts(const Stack& gate_up, const Stack& down, const Routing& routing, Activation activation,
          Rows<const T> rows, Rows<T> activations, std::vector<const T*> results, Rows<T> out)
      : gate_up_(gate_up),
        down_(down),
        routing_(routing),
        activation_(activation),
        rows_(rows),
        activations_(activations),
        results_(std::move(results)),
        out_(out) {
    block_ = block_rows<T>(gate_up.columns);
    down_block_ = block_rows<T>(down.columns);
    for (size_t i = 0; i < routing.shares.size(); ++i) {
      if (!results_[i]) ours_.push_back(routing.shares[i]);
    }
    blocks_ = (down.columns + block_ - 1) / block_;
    first_pieces_ = int64_t(ours_.size()) * blocks_;

    const int64_t bytes = int64_t(ours_.size()) * 3 * down.rows * down.columns * int64_t(sizeof(T));
    threads_ = std::clamp<int64_t>(bytes / kBytesPerThread, 1, thread_count());
    const int64_t blocks = (down.rows + down_block_ - 1) / down_block_;
    const int64_t fit = kSumBytes / (std::max<int64_t>(out.count, 1) * down_block_ * int64_t(sizeof(float)));
    const int64_t most = std::min(fit, blocks / (kPiecesPerThread * threads_));
    span_ = std::clamp<int64_t>(most, 1, kMostBlocks) * down_block_;
    pieces_ = first_pieces_ + (down.rows + span_ - 1) / span_;
    sums_.resize(threads_ * out.count * span_);
  }

  void run() {
    std::atomic<int64_t> next{0}, activated{0};
    std::atomic<bool> failed{false};
    const auto take_pieces = [&](int64_t thread, int64_t) {
      float* const sums = sums_.data() + thread * out_.count * span_;
      for (int64_t piece = next.fetch_add(1, std::memory_order_relaxed); piece < pieces_;) {
        const int64_t following = next.fetch_add(1, std::memory_order_relaxed);
        if (piece < first_pieces_) {
          activate(piece, following);
          activated.fetch_add(1, std::memory_order_release);
        } else {
          // Every piece of the first kind has been taken and is being computed, so this ends, even with one thread.
          wait_for([&] {
            return activated.load(std::memory_order_acquire) == first_pieces_ || failed.load(std::memory_order_relaxed);
          });
          if (failed.load(std::memory_order_relaxed)) return;
          add_up(piece, following, sums);
        }
        piece = following;
      }
    };
    // Reading a damaged packed weight throws. Without `failed` the other threads would wait for ever for that thread's
    // activations.
    const auto take = [&](int64_t thread, int64_t end) {
      try {
        take_pieces(thread, end);
      } catch (...) {
        failed.store(true, std::memory_order_relaxed);
        throw;
      }
    };
    parallel_for(0, threads_, threads_ == 1 ? 2 : 1, take);
  }

 private:
  // Where a piece begins to read.
  const void* beginning(int64_t piece) const {
    if (piece >= pieces_) return nullptr;
    if (piece < first_pieces_) return gate_up_.at(ours_[piece / blocks_].expert, piece % blocks_ * block_);
    return ours_.empty() ? nullptr : down_.at(ours_[0].expert, (piece - first_pieces_) * span_);
  }

  void activate(int64_t piece, int64_t following) {
    const Share& share = ours_[piece / blocks_];
    const int64_t row = piece % blocks_ * block_, count = std::min(block_, down_.columns - row);
    const int64_t up_row = down_.columns + row;
    float gates[kRowsAtATime * kBlockRows], ups[kRowsAtATime * kBlockRows];
    float gate_bias[kBlockRows]{}, up_bias[kBlockRows]{};
    for (int64_t r = 0; gate_up_.bias && r < count; ++r) {
      gate_bias[r] = gate_up_.bias_of(share.expert, row + r);
      up_bias[r] = gate_up_.bias_of(share.expert, up_row + r);
    }
    for (int64_t first = share.begin; first < share.end; first += kRowsAtATime) {
      const Rows<const T> x{rows_.data + first * rows_.stride, rows_.stride, std::min(kRowsAtATime, share.end - first)};
      const bool fetch = first == share.begin;
      gate_up_.block_sums(share.expert, row, count, x, fetch ? gate_up_.at(share.expert, up_row) : nullptr, gates);
      gate_up_.block_sums(share.expert, up_row, count, x, fetch ? beginning(following) : nullptr, ups);
      for (int64_t c = 0; c < x.count; ++c) {
        T* const to = activations_.data + (first + c) * activations_.stride + row;
        for (int64_t r = 0; r < count; r += kLanes) {
          const int64_t at = c * kBlockRows + r;
          const Floats value = activation_(load_as<Floats>(gates + at) + load_as<Floats>(gate_bias + r),
                                           load_as<Floats>(ups + at) + load_as<Floats>(up_bias + r));
          for (int64_t lane = 0; lane < std::min<int64_t>(kLanes, count - r); ++lane) to[r + lane] = T(value[lane]);
        }
      }
    }
  }

  void add_up(int64_t piece, int64_t following, float* sums) {
    const int64_t begin = (piece - first_pieces_) * span_, end = std::min(begin + span_, down_.rows);
    std::fill_n(sums, out_.count * span_, 0.0f);
    size_t mine = 0;
    for (size_t i = 0; i < routing_.shares.size(); ++i) {
      const Share& share = routing_.shares[i];
      if (results_[i]) {
        add_results(share, results_[i], begin, end, sums);
        continue;
      }
      const bool last = ++mine == ours_.size();
      const void* const behind = last ? beginning(following) : down_.at(ours_[mine].expert, begin);
      for (int64_t row = begin; row < end; row += down_block_) {
        const int64_t next_row = row + down_block_;
        const void* const next = next_row < end ? down_.at(share.expert, next_row) : behind;
        multiply_and_add(share, row, std::min(down_block_, end - row), next, sums + row - begin);
      }
    }
    for (int64_t token = 0; token < out_.count; ++token) {
      T* const to = out_.data + token * out_.stride + begin;
      for (int64_t r = 0; r < end - begin; ++r) to[r] = T(sums[token * span_ + r]);
    }
  }

  // Adds an expert's results, `count` rows of `down` from `row` on, to their tokens' sums.
  void multiply_and_add(const Share& share, int64_t row, int64_t count, const void* next, float* sums) {
    float results[kRowsAtATime * kBlockRows], bias[kBlockRows]{};
    for (int64_t r = 0; r < count; ++r) bias[r] = down_.bias_of(share.expert, row + r);
    for (int64_t first = share.begin; first < share.end; first += kRowsAtATime) {
      const Rows<const T> x{activations_.data + first * activations_.stride, activations_.stride,
                            std::min(kRowsAtATime, share.end - first)};
      down_.block_sums(share.expert, row, count, x, first == share.begin ? next : nullptr, results);
      for (int64_t c = 0; c < x.count; ++c) {
        const float by = routing_.weight[first + c];
        float* const to = sums + routing_.token[first + c] * span_;
        for (int64_t r = 0; r < count; ++r) to[r] += by * (results[c * kBlockRows + r] + bias[r]);
      }
    }
  }

  // The same of results that are there already.
  void add_results(const Share& share, const T* results, int64_t begin, int64_t end, float* sums) {
    for (int64_t i = share.begin; i < share.end; ++i) {
      const T* const from = results + (i - share.begin) * down_.rows;
      const float by = routing_.weight[i];
      float* const to = sums + routing_.token[i] * span_;
      for (int64_t r = begin; r < end; ++r) {
        to[r - begin] += by * (float(from[r]) + down_.bias_of(share.expert, r));
      }
    }
  }

  const Stack&gate_up_, &down_;
  const Routing& routing_;
  const Activation activation_;
  const Rows<const T> rows_;
  const Rows<T> activations_;
  const std::vector<const T*> results_;
  const Rows<T> out_;
  std::vector<Share> ours_;  // those that are computed here
  int64_t block_, down_block_, blocks_, span_;
  int64_t first_pieces_, pieces_, threads_;
  std::vector<float> sums_;  // of each thread, [tokens, span]
};

}  // namespace dlinfer::moe
