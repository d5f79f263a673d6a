// One query of each sequence over keys and values where they lie, in blocks.
//
// A step reads each key and value once, and with G query heads to a key head does 2 * G multiplications and additions a
// number. A core of AMD's Zen 4 reads 15 to 20 GB/s and does 200 G of them a second in bfloat16 and 100 G in float32.
// So reading takes longest up to a G of about 10 in bfloat16, 6 in float16 (which is widened) and 12 in float32. Beyond
// that, as in latent attention, computing does. Beside those products, G of 7 over heads of 64 numbers spends about as
// long again on transposing keys and on the softmax. The work is cut into pieces of (sequence, key head, kSpan keys),
// which threads take one after another as they become free:
// - scores: of a tile of keys, transposed, by all query heads of the group (decode_tiles.h). Meanwhile the piece's
//   values are prefetched: their rows lie apart from each other, and the processor does not foresee that.
// - softmax: over the piece's keys, in float32: largest score, exponentials and their sum.
// - values: each is read once for some heads of the group. Meanwhile the keys of the thread's next piece are
//   prefetched.
//
// Pieces of one head are then added up in the order of their keys. Where a piece begins depends on the keys' positions
// alone, so a sequence's result has the same bits whatever else is in the batch, and with any number of threads.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <memory>
#include <vector>

#include "attention/arguments.h"
#include "attention/decode_tiles.h"
#include "threads/team.h"

namespace dlinfer::decode {

using attention::MaybeTensor;
using attention::ScalarType;
using attention::Tensor;

constexpr int64_t kBytesPerThread = 64 << 10;   // below so many a thread is done before another one has begun
constexpr int64_t kSumsPerRange = 16 << 10;     // numbers of pieces to add up, likewise

struct Call {
  int64_t sequences, heads, kv_heads, group, size, size_v, block_size;
  // Strides, in elements: of sequences, of groups of heads, and of heads in a group.
  int64_t q_row, q_group, q_head, out_row, out_group, out_head;
  int64_t k_block, k_slot, k_head, v_block, v_slot, v_head;
  float scale, softcap;
  std::vector<int64_t> lengths, first;  // keys of each sequence; the first that its query sees
  std::vector<int64_t> blocks;          // [sequences, columns]
  int64_t columns;
  std::vector<float> slopes, sinks;  // by query head; empty is none
};

struct Piece {
  int64_t sequence, kv_head, begin, end;  // keys
};

// A thread's memory for a piece.
template <class T>
class Scratch {
 public:
  explicit Scratch(const Call& call)
      : words(prefill::words_of<T>(call.size)), zeros_(call.size_v), memory_(new float[floats(call) + kLine]) {
    void* at = memory_.get();
    size_t room = (floats(call) + kLine) * sizeof(float);
    queries = static_cast<float*>(std::align(kLine, floats(call) * sizeof(float), at, room));
    tile = queries + whole_tiles(call.group * words, kLanes);
    scores = tile + words * kTileKeys;
  }

  // [words, heads] of each tile of heads, [words, kTileKeys] and [group, kSpan]
  float *queries, *tile, *scores;
  const int64_t words;
  std::array<const T*, kSpan> keys, next_keys, values;
  const T* zeros() const { return zeros_.data(); }

 private:
  int64_t floats(const Call& call) const {
    return whole_tiles(call.group * words, kLanes) + words * kTileKeys + call.group * kSpan;
  }

  std::vector<T> zeros_;
  std::unique_ptr<float[]> memory_;
};

template <class T>
class Runner {
 public:
  Runner(const Call& call, const T* q, const T* k, const T* v, T* out) : call_(call), q_(q), k_(k), v_(v), out_(out) {
    width_ = whole_tiles(call.size_v, kTileValues);
    for (int64_t s = 0; s < call.sequences; ++s) {
      begins_.push_back(pieces_.size());
      // Heads of the same pages follow each other, as they may share lines and do share pages of memory.
      for (int64_t key = call.first[s]; key < call.lengths[s];) {
        const int64_t end = std::min((key / kSpan + 1) * kSpan, call.lengths[s]);
        for (int64_t h = 0; h < call.kv_heads; ++h) pieces_.push_back({s, h, key, end});
        key = end;
      }
    }
    begins_.push_back(pieces_.size());
    sums_.reset(new float[pieces_.size() * call.group * width_]);
    softmaxes_.resize(pieces_.size() * call.group);
  }

  void run() {
    const int64_t count = pieces_.size(), key_bytes = (call_.size + call_.size_v) * int64_t(sizeof(T));
    int64_t bytes = 0;
    for (const Piece& piece : pieces_) bytes += (piece.end - piece.begin) * key_bytes;
    const int64_t most = std::clamp<int64_t>(bytes / kBytesPerThread, 1, thread_count());
    std::atomic<int64_t> next{0};
    const auto take = [&](int64_t, int64_t) {
      int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= count) return;
      Scratch<T> scratch(call_);
      point_at_keys(pieces_[i], scratch.next_keys);
      Ahead<T>(scratch.next_keys.data(), pieces_[i].end - pieces_[i].begin, call_.size, 1).step();
      while (i < count) {
        const int64_t following = next.fetch_add(1, std::memory_order_relaxed);
        scratch.keys = scratch.next_keys;
        compute(i, following < count ? &pieces_[following] : nullptr, scratch);
        i = following;
      }
    };
    parallel_for(0, most, most == 1 ? 2 : 1, take);
    // Queries are no longer read, so results may overwrite them.
    const int64_t heads = call_.sequences * call_.kv_heads;
    const int64_t sums = std::max<int64_t>(count * call_.group * width_, 1);
    parallel_for(0, heads, std::max<int64_t>(heads * kSumsPerRange / sums, 1), [&](int64_t first, int64_t last) {
      std::vector<float> shares;
      for (int64_t i = first; i < last; ++i) add_up(i / call_.kv_heads, i % call_.kv_heads, shares);
    });
  }

 private:
  struct Softmax {
    float largest, sum;  // score, times log2(e); and of exponentials
  };

  // Leaves for each query head of the group its softmax over the piece's keys and the weighted values.
  void compute(int64_t index, const Piece* next, Scratch<T>& scratch) {
    const Piece& piece = pieces_[index];
    const int64_t count = piece.end - piece.begin, group = call_.group, words = scratch.words;
    const int64_t head_tiles = (group + kTileHeads - 1) / kTileHeads, key_tiles = (count + kTileKeys - 1) / kTileKeys;
    for (int64_t g = 0; g < group; ++g) {
      const T* query = q_ + piece.sequence * call_.q_row + piece.kv_head * call_.q_group + g * call_.q_head;
      const int64_t first = g / kTileHeads * kTileHeads, heads = std::min<int64_t>(kTileHeads, group - first);
      pack_query(query, call_.size, heads, scratch.queries + first * words + g % kTileHeads);
    }
    std::fill(scratch.keys.begin() + count, scratch.keys.begin() + key_tiles * kTileKeys, nullptr);
    point(piece, v_ + piece.kv_head * call_.v_head, call_.v_block, call_.v_slot, scratch.values);
    if (count < kSpan) scratch.values[count] = scratch.zeros();

    Ahead<T> ahead(scratch.values.data(), count, call_.size_v, key_tiles * head_tiles * words);
    for (int64_t key = 0; key < count; key += kTileKeys) {
      for (int64_t part = 0; part < kTileKeys; part += kLanes) {
        transpose_keys(scratch.keys.data() + key + part, call_.size, scratch.tile + part);
      }
      for (int64_t g = 0; g < group; g += kTileHeads) {
        const auto& tiles = kHeadTiles<T>[std::min<int64_t>(kTileHeads, group - g) - 1];
        tiles.keys(scratch.tile, scratch.queries + g * words, words, ahead, scratch.scores + g * kSpan + key);
      }
    }
    for (int64_t g = 0; g < group; ++g) {
      const float slope = call_.slopes.empty() ? 0.0f : call_.slopes[piece.kv_head * group + g];
      const Shape shape{call_.scale, call_.softcap, slope, call_.lengths[piece.sequence] - 1 - piece.begin};
      Softmax& own = softmaxes_[index * group + g];
      softmax<T>(shape, count, scratch.scores + g * kSpan, own.largest, own.sum);
    }
    if (next) {
      point_at_keys(*next, scratch.next_keys);
      const int64_t steps = (count + kWord<T> - 1) / kWord<T> * (width_ / kTileValues) * head_tiles;
      ahead = Ahead<T>(scratch.next_keys.data(), next->end - next->begin, call_.size, steps);
    } else {
      ahead = Ahead<T>();
    }
    for (int64_t d = 0; d < call_.size_v; d += kTileValues) {
      const int64_t width = std::min(kTileValues, call_.size_v - d);
      for (int64_t g = 0; g < group; g += kTileHeads) {
        const auto& tiles = kHeadTiles<T>[std::min<int64_t>(kTileHeads, group - g) - 1];
        (width == kTileValues ? tiles.values : tiles.part)(scratch.values.data(), count, d, width,
                                                           scratch.scores + g * kSpan, width_, ahead,
                                                           sums_.get() + (index * group + g) * width_ + d);
      }
    }
  }

  void point_at_keys(const Piece& piece, std::array<const T*, kSpan>& rows) const {
    point(piece, k_ + piece.kv_head * call_.k_head, call_.k_block, call_.k_slot, rows);
  }

  // Pointers to the rows of a piece's keys, or values.
  void point(const Piece& piece, const T* cache, int64_t block_stride, int64_t slot_stride,
             std::array<const T*, kSpan>& rows) const {
    for (int64_t key = piece.begin, at = 0; key < piece.end;) {
      const int64_t slot = key % call_.block_size, keys = std::min(call_.block_size - slot, piece.end - key);
      const int64_t block = call_.blocks[piece.sequence * call_.columns + key / call_.block_size];
      const T* row = cache + block * block_stride + slot * slot_stride;
      for (int64_t i = 0; i < keys; ++i, row += slot_stride) rows[at++] = row;
      key += keys;
    }
  }

  // The results of a key head's group, from its pieces.
  void add_up(int64_t sequence, int64_t kv_head, std::vector<float>& shares) const {
    const int64_t begin = begins_[sequence] + kv_head, group = call_.group;
    const int64_t count = (begins_[sequence + 1] - begins_[sequence]) / call_.kv_heads;
    shares.resize(count);
    for (int64_t g = 0; g < group; ++g) {
      const int64_t head = kv_head * group + g;
      const auto at = [&](int64_t i) { return (begin + i * call_.kv_heads) * group + g; };
      const float sink = call_.sinks.empty() ? kNone : call_.sinks[head] * kLog2e;
      float largest = sink;
      for (int64_t i = 0; i < count; ++i) largest = std::max(largest, softmaxes_[at(i)].largest);
      const float base = largest == kNone ? 0.0f : largest;
      float sum = std::exp2(sink - base);
      for (int64_t i = 0; i < count; ++i) {
        const Softmax& part = softmaxes_[at(i)];
        // A piece without a finite maximum has weights of 0, or NaN.
        shares[i] = part.largest == kNone ? part.sum * 0.0f : std::exp2(part.largest - base);
        sum += shares[i] * part.sum;
      }
      T* const out = out_ + sequence * call_.out_row + kv_head * call_.out_group + g * call_.out_head;
      for (int64_t d = 0; d < call_.size_v; d += kLanes) {
        Floats total{};
        for (int64_t i = 0; i < count; ++i) {
          total = multiply_add(total, all_lanes(shares[i]), load_as<Floats>(sums_.get() + at(i) * width_ + d));
        }
        const Floats result = sum == 0.0f ? Floats{} : total / all_lanes(sum);
        store_narrow(out + d, result, std::min<int64_t>(kLanes, call_.size_v - d));
      }
    }
  }

  const Call& call_;
  const T *q_, *k_, *v_;
  T* out_;
  int64_t width_;  // numbers of a sum of values, with what fills the last tile
  std::vector<Piece> pieces_;
  std::vector<int64_t> begins_;  // where the pieces of each sequence begin
  std::vector<Softmax> softmaxes_;  // [pieces, group]
  std::unique_ptr<float[]> sums_;   // [pieces, group, width_]
};

template <class T>
void run_as(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
  const auto data = [](const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); };
  Runner<T>(call, data(q), data(k), data(v), static_cast<T*>(out.mutable_data_ptr())).run();
}

// By the dtype of all four.
void run(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
  switch (q.scalar_type()) {
    case ScalarType::Float:
      return run_as<float>(call, q, k, v, out);
    case ScalarType::BFloat16:
      return run_as<BFloat16>(call, q, k, v, out);
    case ScalarType::Half:
      return run_as<Half>(call, q, k, v, out);
    default:
      STD_TORCH_CHECK(false, "decode attention: no kernel for this dtype");
  }
}

}  // namespace dlinfer::decode
