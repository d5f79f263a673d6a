// dlinfer_cpu::paged_decode_attention: one query of each sequence over keys and values where they lie in the cache.
//
// A step reads each key and value once, so its time is the time of that reading: with G query heads to a key head,
// 2 * G operations a number, below what any processor here computes while it reads. The work is cut into pieces of
// (sequence, key head, kSpan keys), which threads take one after another as they become free:
//   fetch     the piece's keys, and its values while scores are computed: the rows of a head lie apart from each other
//             in a page, which the processor doesn't foresee, so it would wait for each
//   scores    16 keys by all query heads of the group, with the dot products of linear layers (few_rows.h)
//   softmax   over the piece's keys, in float32: largest score, exponentials and their sum
//   values    each value is read once for the group; weights and sums stay in float32
// Pieces of one head are then added up in the order of their keys. Where a piece begins depends on the keys' positions
// alone, so a sequence's result has the same bits whatever else is in the batch, and with any number of threads.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <limits>
#include <vector>

#include "attention/arguments.h"
#include "chain/table.h"
#include "common/widen.h"
#include "linear/few_rows.h"
#include "threads/team.h"

namespace dlinfer::decode {
namespace {

using attention::MaybeTensor;
using attention::ScalarType;
using attention::Tensor;
using attention::numbers;
using attention::whole_numbers;

constexpr int64_t kSpan = 256;                  // keys of a piece
constexpr int64_t kBytesPerThread = 64 << 10;   // below so many a thread is done before another one has begun
constexpr int64_t kLine = 64;                   // bytes that a processor reads at once
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Call {
  int64_t sequences, heads, kv_heads, group, size, size_v, block_size;
  int64_t q_row, q_head, out_row, out_head;  // strides, in elements
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

template <class T>
class Runner {
 public:
  Runner(const Call& call, const T* q, const T* k, const T* v, T* out) : call_(call), q_(q), k_(k), v_(v), out_(out) {
    row_ = call.size_v + 2;
    begins_.reserve(call.sequences * call.kv_heads + 1);
    for (int64_t s = 0; s < call.sequences; ++s) {
      for (int64_t h = 0; h < call.kv_heads; ++h) {
        begins_.push_back(pieces_.size());
        for (int64_t key = call.first[s]; key < call.lengths[s];) {
          const int64_t end = std::min((key / kSpan + 1) * kSpan, call.lengths[s]);
          pieces_.push_back({s, h, key, end});
          key = end;
        }
      }
    }
    begins_.push_back(pieces_.size());
    partial_.resize(pieces_.size() * call.group * row_);
  }

  void run() {
    const int64_t keys_bytes = (call_.size + call_.size_v) * int64_t(sizeof(T));
    int64_t bytes = 0;
    for (const Piece& piece : pieces_) bytes += (piece.end - piece.begin) * keys_bytes;
    const int64_t most = std::clamp<int64_t>(bytes / kBytesPerThread, 1, thread_count());
    std::atomic<int64_t> next{0};
    const auto take = [&](int64_t, int64_t) {
      std::vector<T> queries(call_.group * call_.size);
      std::vector<float> scores(call_.group * kSpan);
      for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < int64_t(pieces_.size());) {
        compute(pieces_[i], &partial_[i * call_.group * row_], queries.data(), scores.data());
      }
    };
    parallel_for(0, most, most == 1 ? 2 : 1, take);
    // Queries are no longer read, so results may go to where they lie.
    for (int64_t s = 0; s < call_.sequences; ++s) {
      for (int64_t h = 0; h < call_.kv_heads; ++h) add_up(s, h);
    }
  }

 private:
  // partial, for each query head of the group: the largest score, the sum of exponentials, and the weighted values.
  void compute(const Piece& piece, float* partial, T* queries, float* scores) {
    const int64_t count = piece.end - piece.begin, group = call_.group;
    for (int64_t g = 0; g < group; ++g) {
      const T* from = q_ + piece.sequence * call_.q_row + (piece.kv_head * group + g) * call_.q_head;
      std::copy_n(from, call_.size, queries + g * call_.size);
    }
    const auto keys_at = [&](int64_t block, int64_t slot) {
      return k_ + block * call_.k_block + slot * call_.k_slot + piece.kv_head * call_.k_head;
    };
    each_block(piece, [&](int64_t block, int64_t slot, int64_t, int64_t keys) {
      fetch(keys_at(block, slot), keys, call_.k_slot, call_.size);
    });
    each_block(piece, [&](int64_t block, int64_t slot, int64_t at, int64_t keys) {
      const T* from = keys_at(block, slot);
      const T* values = v_ + block * call_.v_block + slot * call_.v_slot + piece.kv_head * call_.v_head;
      for (int64_t r = 0; r < keys; r += kBlockRows) {
        const int64_t rows = std::min<int64_t>(kBlockRows, keys - r);
        fetch(values + r * call_.v_slot, rows, call_.v_slot, call_.size_v);
        score(from + r * call_.k_slot, rows, queries, scores + at + r);
      }
    });
    for (int64_t g = 0; g < group; ++g) {
      float* row = scores + g * kSpan;
      shape(piece, piece.kv_head * group + g, count, row);
      float largest = kNone;
      for (int64_t i = 0; i < count; ++i) largest = row[i] > largest ? row[i] : largest;
      const float base = largest == kNone ? 0.0f : largest;
      std::fill(row + count, row + (count + kLanes - 1) / kLanes * kLanes, kNone);
      Floats sums{};
      for (int64_t i = 0; i < count; i += kLanes) {
        const Floats e = exp_of_negative(load_as<Floats>(row + i) - base);
        std::memcpy(row + i, &e, sizeof e);
        sums += e;
      }
      float sum = 0.0f;
      for (int lane = 0; lane < kLanes; ++lane) sum += sums[lane];
      partial[g * row_] = largest;
      partial[g * row_ + 1] = sum;
    }
    for (int64_t d = 0; d < call_.size_v; d += 2 * kLanes) {
      for (int64_t g = 0; g < group; g += kHeads) {
        const int64_t heads = std::min<int64_t>(kHeads, group - g);
        add_values(piece, d, heads, scores + g * kSpan, partial + g * row_ + 2 + d);
      }
    }
  }

  // Calls f(block, slot, key of the piece, keys) for each run of a piece's keys that are neighbours in the cache.
  template <class F>
  void each_block(const Piece& piece, F&& f) const {
    for (int64_t key = piece.begin; key < piece.end;) {
      const int64_t slot = key % call_.block_size;
      const int64_t keys = std::min(call_.block_size - slot, piece.end - key);
      f(call_.blocks[piece.sequence * call_.columns + key / call_.block_size], slot, key - piece.begin, keys);
      key += keys;
    }
  }

  // Asks memory for some rows of keys or values.
  static void fetch(const T* rows, int64_t count, int64_t stride, int64_t size) {
    for (int64_t r = 0; r < count; ++r) {
      const char* const row = reinterpret_cast<const char*>(rows + r * stride);
      for (int64_t byte = 0; byte < size * int64_t(sizeof(T)); byte += kLine) __builtin_prefetch(row + byte);
    }
  }

  // scores[g * kSpan + r] = dot(key r, query g), for at most kBlockRows keys.
  void score(const T* keys, int64_t count, const T* queries, float* scores) {
    float sums[kBlockRows * kTileInputs];
    for (int64_t g = 0; g < call_.group; g += kTileInputs) {
      const int64_t heads = std::min<int64_t>(kTileInputs, call_.group - g);
      const auto& tiles = kTiles<T>[heads - 1];
      std::fill_n(sums, heads * kBlockRows, 0.0f);
      const Ahead nowhere{reinterpret_cast<const char*>(keys), 0};
      for (int64_t r = 0; r < count;) {
        const bool full = r + tiles.rows <= count;
        (full ? tiles.full : tiles.one)(keys + r * call_.k_slot, call_.k_slot, queries + g * call_.size, call_.size,
                                        call_.size, nowhere, sums + r);
        r += full ? tiles.rows : 1;
      }
      for (int64_t h = 0; h < heads; ++h) std::copy_n(sums + h * kBlockRows, count, scores + (g + h) * kSpan);
    }
  }

  // Scale, soft cap and slope of a row of scores.
  void shape(const Piece& piece, int64_t head, int64_t count, float* row) const {
    for (int64_t i = 0; i < count; ++i) row[i] *= call_.scale;
    if (call_.softcap > 0) {
      for (int64_t i = 0; i < count; ++i) row[i] = call_.softcap * std::tanh(row[i] / call_.softcap);
    }
    if (!call_.slopes.empty()) {
      const int64_t query = call_.lengths[piece.sequence] - 1;
      for (int64_t i = 0; i < count; ++i) row[i] -= call_.slopes[head] * float(query - piece.begin - i);
    }
  }

  static constexpr int kHeads = kAccumulators / 2;

  // sums[g, 0 .. 2 * kLanes) = sum over keys of weight g times value; the last registers may be parts of a row.
  void add_values(const Piece& piece, int64_t d, int64_t heads, const float* weights, float* sums) {
    const int64_t width = std::min<int64_t>(2 * kLanes, call_.size_v - d);
    Floats totals[kHeads][2]{};
    const auto add = [&](auto whole, auto fixed) __attribute__((always_inline)) {
      constexpr int kFixed = decltype(fixed)::value;
      const int64_t rows = kFixed ? kFixed : heads;
      each_block(piece, [&](int64_t block, int64_t slot, int64_t at, int64_t keys) {
        const T* from = v_ + block * call_.v_block + slot * call_.v_slot + piece.kv_head * call_.v_head + d;
        for (int64_t i = 0; i < keys; ++i, from += call_.v_slot) {
          const Floats low = whole.value ? widen(from) : widen_part(from, std::min<int64_t>(width, kLanes));
          const Floats high = whole.value   ? widen(from + kLanes)
                              : width > kLanes ? widen_part(from + kLanes, width - kLanes)
                                               : Floats{};
#pragma GCC unroll 8
          for (int64_t g = 0; g < rows; ++g) {
            const Floats weight = all_lanes(weights[g * kSpan + at + i]);
            totals[g][0] = multiply_add(totals[g][0], weight, low);
            totals[g][1] = multiply_add(totals[g][1], weight, high);
          }
        }
      });
    };
    // Group sizes that models have get code of their own; 0 is any.
    const auto by_heads = [&](auto whole) __attribute__((always_inline)) {
      switch (heads) {
        case 1: return add(whole, std::integral_constant<int, 1>());
        case 2: return add(whole, std::integral_constant<int, 2>());
        case 4: return add(whole, std::integral_constant<int, 4>());
        case 7: return add(whole, std::integral_constant<int, kHeads < 7 ? 0 : 7>());
        case 8: return add(whole, std::integral_constant<int, kHeads < 8 ? 0 : 8>());
        default: return add(whole, std::integral_constant<int, 0>());
      }
    };
    width == 2 * kLanes ? by_heads(std::true_type()) : by_heads(std::false_type());
    for (int64_t g = 0; g < heads; ++g) std::memcpy(sums + g * row_, totals[g], width * sizeof(float));
  }

  // The results of a key head's group, from its pieces.
  void add_up(int64_t sequence, int64_t kv_head) {
    const int64_t index = sequence * call_.kv_heads + kv_head, group = call_.group;
    for (int64_t g = 0; g < group; ++g) {
      const int64_t head = kv_head * group + g;
      T* out = out_ + sequence * call_.out_row + head * call_.out_head;
      float largest = call_.sinks.empty() ? kNone : call_.sinks[head];
      for (int64_t i = begins_[index]; i < begins_[index + 1]; ++i) {
        const float own = partial_[(i * group + g) * row_];
        largest = own > largest ? own : largest;
      }
      const float base = largest == kNone ? 0.0f : largest;
      float sum = call_.sinks.empty() ? 0.0f : std::exp(call_.sinks[head] - base);
      std::vector<float> total(call_.size_v, 0.0f);
      for (int64_t i = begins_[index]; i < begins_[index + 1]; ++i) {
        const float* part = &partial_[(i * group + g) * row_];
        const float share = part[0] == kNone ? (part[1] == part[1] ? 0.0f : part[1]) : std::exp(part[0] - base);
        sum += share * part[1];
        for (int64_t d = 0; d < call_.size_v; ++d) total[d] += share * part[2 + d];
      }
      for (int64_t d = 0; d < call_.size_v; ++d) out[d] = T(sum == 0.0f ? 0.0f : total[d] / sum);
    }
  }

  const Call& call_;
  const T *q_, *k_, *v_;
  T* out_;
  int64_t row_;
  std::vector<Piece> pieces_;
  std::vector<int64_t> begins_;  // where the pieces of each (sequence, key head) begin
  std::vector<float> partial_;
};

template <class T>
void run_as(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
  const auto data = [](const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); };
  Runner<T>(call, data(q), data(k), data(v), static_cast<T*>(out.mutable_data_ptr())).run();
}

void paged_decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_offsets, Tensor kv_seqlens,
                            Tensor attn_output, double softmax_scale, int64_t window_left, double logit_softcapping,
                            MaybeTensor alibi_slopes, MaybeTensor sinks) {
  STD_TORCH_CHECK(q.dim() == 3 && k_cache.dim() == 4 && v_cache.dim() == 4 && attn_output.dim() == 3,
                  "paged_decode_attention: q and attn_output have 3 dimensions, caches 4");
  for (const Tensor* t : {&q, &k_cache, &v_cache, &attn_output}) {
    STD_TORCH_CHECK(t->scalar_type() == q.scalar_type(), "paged_decode_attention: one dtype");
    STD_TORCH_CHECK(t->size(t->dim() - 1) <= 1 || t->stride(t->dim() - 1) == 1,
                    "paged_decode_attention: the last dimension's elements are neighbours");
  }
  Call call;
  call.sequences = q.size(0), call.heads = q.size(1), call.kv_heads = k_cache.size(2);
  call.size = q.size(2), call.size_v = v_cache.size(3), call.block_size = k_cache.size(1);
  STD_TORCH_CHECK(call.kv_heads > 0 && call.heads % call.kv_heads == 0 && k_cache.size(3) == call.size &&
                      v_cache.size(1) == call.block_size && v_cache.size(2) == call.kv_heads &&
                      attn_output.size(0) == call.sequences && attn_output.size(1) == call.heads &&
                      attn_output.size(2) == call.size_v,
                  "paged_decode_attention: sizes of q, caches and attn_output differ");
  call.group = call.heads / call.kv_heads;
  call.q_row = q.stride(0), call.q_head = q.stride(1);
  call.out_row = attn_output.stride(0), call.out_head = attn_output.stride(1);
  call.k_block = k_cache.stride(0), call.k_slot = k_cache.stride(1), call.k_head = k_cache.stride(2);
  call.v_block = v_cache.stride(0), call.v_slot = v_cache.stride(1), call.v_head = v_cache.stride(2);
  call.scale = float(softmax_scale), call.softcap = float(logit_softcapping);
  call.slopes = numbers(alibi_slopes), call.sinks = numbers(sinks);
  call.lengths = whole_numbers(kv_seqlens), call.blocks = whole_numbers(block_offsets);
  call.columns = block_offsets.size(1);
  STD_TORCH_CHECK(int64_t(call.lengths.size()) == call.sequences && block_offsets.size(0) == call.sequences,
                  "paged_decode_attention: one length and one row of blocks a sequence");
  const int64_t blocks = std::min(k_cache.size(0), v_cache.size(0));
  for (int64_t s = 0; s < call.sequences; ++s) {
    const int64_t length = call.lengths[s], first = window_left < 0 ? 0 : std::max<int64_t>(length - 1 - window_left, 0);
    STD_TORCH_CHECK(length >= 0 && length <= call.columns * call.block_size, "paged_decode_attention: sequence ", s,
                    " has ", length, " keys, and blocks for ", call.columns * call.block_size);
    call.first.push_back(first);
    for (int64_t c = first / call.block_size; c * call.block_size < length; ++c) {
      const int64_t block = call.blocks[s * call.columns + c];
      STD_TORCH_CHECK(block >= 0 && block < blocks, "paged_decode_attention: block index ", block, " of sequence ", s,
                            " is outside of the cache of ", blocks, " blocks");
    }
  }
  switch (q.scalar_type()) {
    case ScalarType::Float:
      return run_as<float>(call, q, k_cache, v_cache, attn_output);
    case ScalarType::BFloat16:
      return run_as<BFloat16>(call, q, k_cache, v_cache, attn_output);
    case ScalarType::Half:
      return run_as<Half>(call, q, k_cache, v_cache, attn_output);
    default:
      STD_TORCH_CHECK(false, "paged_decode_attention: no kernel for this dtype");
  }
}

}  // namespace
}  // namespace dlinfer::decode

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def(
      "paged_decode_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_offsets, Tensor kv_seqlens, "
      "Tensor(a!) attn_output, float softmax_scale, int window_left, float logit_softcapping, Tensor? alibi_slopes, "
      "Tensor? sinks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "paged_decode_attention", TORCH_BOX(&dlinfer::decode::paged_decode_attention));
}
