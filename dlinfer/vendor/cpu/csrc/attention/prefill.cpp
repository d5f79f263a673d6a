// dlinfer_cpu::prefill_attention and paged_prefill_attention: queries of several sequences over keys and values that
// stand packed, or in the pages of the cache, where they are read in place and once a tile.
//
// With N keys a query takes N * (size + size_v) multiplications and additions a head, and reads as many numbers, shared
// by all rows of a piece: at 256 rows that is 512 operations a number, so that time is the time of the multiplications
// (AMD Zen 4 at 2.6 GHz: 166 GFLOP/s a core with the dot instructions for bfloat16, half of that in float32).
// The work is cut into pieces of (sequence, key head, some rows), which threads take one after another as they become
// free, the largest first. Rows are the queries of all heads that share the key head, query after query, so that a tile
// of keys and values, once copied, serves them all:
//   tile   kTileKeys keys and values, copied into the second-level cache as words of the products (packing.h)
//   panel  kPanelRows rows against a tile: products, softmax in float32, and products again (panel.h)
// Tiles begin at multiples of their size, and a row's sums are taken in the order of its keys: it has the same bits
// whatever else is in the batch or in the same call, and with any number of threads.
//
// On the processor above, one thread reaches 0.8 of its multiplications from 1024 tokens on (bfloat16, heads of 64). A
// piece's memory is that of its thread: queries, sums, one tile and one panel's scores, below 1 MiB for all head sizes
// that models have. There are no matrix instructions here: attention/prefill.py leaves bfloat16 on AMX to torch.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "attention/arguments.h"
#include "attention/packing.h"
#include "attention/panel.h"
#include "chain/table.h"
#include "common/result_memory.h"
#include "threads/team.h"

namespace dlinfer::prefill {
namespace {

using attention::MaybeTensor;
using attention::ScalarType;
using attention::Tensor;
using attention::apart;
using attention::numbers;
using attention::whole_numbers;

constexpr int64_t kMostRows = 256;                     // of a piece
constexpr int64_t kRowBytes = 256 << 10;              // of a piece's queries and sums: a part of a second-level cache
constexpr int64_t kPiecesPerThread = 4;                // so that they end together
constexpr int64_t kProductsPerThread = 1 << 20;        // below so many a thread is done before another one has begun
constexpr int64_t kFar = int64_t(1) << 30;             // no key is so far from a query

struct Sequence {
  int64_t first_query, queries, keys;
  int64_t first_slot;      // of its keys, where they stand packed
  const int64_t* blocks;   // where they stand in pages
};

struct Call {
  int64_t heads, kv_heads, group, size, size_v, block_size;
  int64_t q_row, q_head, out_row, out_head;  // strides, in elements
  int64_t k_block, k_slot, k_head, v_block, v_slot, v_head;
  Shape shape;
  std::vector<Sequence> sequences;
  std::vector<int64_t> blocks;
  std::vector<float> slopes, sinks;  // by query head; empty is none
};

// Rows [begin, end) of a sequence and a key head: row r is of query r / group and of the group's head r % group.
struct Piece {
  int64_t sequence, kv_head, begin, end, products;
};

// Memory that a thread uses while it is at work; kept for the next call.
class Scratch {
 public:
  explicit Scratch(int64_t floats) : block_(ResultMemory::get().take(floats * sizeof(float))) {
    next_ = static_cast<float*>(block_.data);
  }
  ~Scratch() { ResultMemory::get().give_back(block_); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  float* floats(int64_t count) {
    float* const taken = next_;
    next_ += rounded(count);
    return taken;
  }
  static int64_t rounded(int64_t count) { return (count + 15) / 16 * 16; }  // cache lines

 private:
  ResultMemory::Block block_;
  float* next_;
};

template <class T>
class Runner {
 public:
  Runner(const Call& call, const T* q, const T* k, const T* v, T* out)
      : call_(call),
        q_(q),
        k_(k),
        v_(v),
        out_(out),
        words_(words_of<T>(call.size)),
        words_v_((call.size_v + 1) / 2 * 2) {
    const int64_t threads = thread_count();
    int64_t all = 0;
    for (const Sequence& one : call.sequences) all += one.queries * call.heads;
    const auto panels = [](int64_t rows) { return (rows + kPanelRows - 1) / kPanelRows * kPanelRows; };
    const int64_t most = kRowBytes / int64_t(sizeof(float)) / (words_ + words_v_) / kPanelRows * kPanelRows;
    rows_ = std::clamp(panels(all / (kPiecesPerThread * threads)), kPanelRows,
                       std::clamp(most, kPanelRows, kMostRows));
    for (int64_t s = 0; s < int64_t(call.sequences.size()); ++s) {
      const int64_t rows = call.sequences[s].queries * call.group;
      for (int64_t h = 0; h < call.kv_heads; ++h) {
        for (int64_t row = 0; row < rows; row += rows_) add_piece({s, h, row, std::min(row + rows_, rows), 0});
      }
    }
    const auto larger = [](const Piece& a, const Piece& b) { return a.products > b.products; };
    std::stable_sort(pieces_.begin(), pieces_.end(), larger);
  }

  void run() {
    int64_t products = 0;
    for (const Piece& piece : pieces_) products += piece.products;
    const int64_t most = std::clamp<int64_t>(products / kProductsPerThread, 1, thread_count());
    std::atomic<int64_t> next{0};
    const auto take = [&](int64_t, int64_t) {
      int64_t i = next.fetch_add(1, std::memory_order_relaxed);
      if (i >= int64_t(pieces_.size())) return;
      Work work(*this);
      for (; i < int64_t(pieces_.size()); i = next.fetch_add(1, std::memory_order_relaxed)) work.compute(pieces_[i]);
    };
    parallel_for(0, most, most == 1 ? 2 : 1, take);
  }

 private:
  struct Range {
    int64_t begin, end;
  };

  // Keys that a row sees.
  Range seen(const Piece& piece, int64_t row) const {
    const Sequence& of = call_.sequences[piece.sequence];
    const int64_t position = of.keys - of.queries + row / call_.group;
    const int64_t begin = std::clamp<int64_t>(position + call_.shape.lowest, 0, of.keys);
    return {begin, std::clamp<int64_t>(position + call_.shape.highest + 1, begin, of.keys)};
  }

  void add_piece(Piece piece) {
    const int64_t keys = seen(piece, piece.end - 1).end - seen(piece, piece.begin).begin;
    piece.products = (piece.end - piece.begin) * std::max<int64_t>(keys, 1) * (call_.size + call_.size_v);
    pieces_.push_back(piece);
  }

  // A thread's memory, and what it does with a piece.
  class Work {
   public:
    explicit Work(const Runner& of)
        : of_(of),
          call_(of.call_),
          panels_(of.rows_ / kPanelRows),
          scratch_(Scratch::rounded(of.rows_ * of.words_) + Scratch::rounded(of.rows_ * of.words_v_) +
                   Scratch::rounded(kTileKeys * of.words_) + Scratch::rounded(kTileKeys * of.words_v_) +
                   Scratch::rounded(kTileKeys * kPanelRows)),
          queries_(scratch_.floats(of.rows_ * of.words_)),
          sums_(scratch_.floats(of.rows_ * of.words_v_)),
          keys_(scratch_.floats(kTileKeys * of.words_)),
          values_(scratch_.floats(kTileKeys * of.words_v_)),
          scores_(scratch_.floats(kTileKeys * kPanelRows)),
          states_(panels_) {}

    void compute(const Piece& piece) {
      for (int64_t row = piece.begin; row < piece.end; row += kPanelRows) begin_panel(piece, row);
      const Range all{of_.seen(piece, piece.begin).begin, of_.seen(piece, piece.end - 1).end};
      for (int64_t tile = all.begin / kTileKeys * kTileKeys; tile < all.end; tile += kTileKeys) {
        copy_tile(piece, tile, std::max(all.begin, tile), std::min(tile + kTileKeys, all.end));
        for (int64_t row = piece.begin; row < piece.end; row += kPanelRows) {
          const int64_t vectors = (std::min(kPanelRows, piece.end - row) + kLanes - 1) / kLanes;
          add_tile(std::make_integer_sequence<int, kVectors>(), vectors, piece, tile, row);
        }
      }
      for (int64_t row = piece.begin; row < piece.end; row += kPanelRows) end_panel(piece, row);
    }

   private:
    float* of_panel(float* all, int64_t words, const Piece& piece, int64_t row) const {
      return all + (row - piece.begin) * words;
    }
    RowState& state(const Piece& piece, int64_t row) { return states_[(row - piece.begin) / kPanelRows]; }

    // Calls f(first row, rows, width of the panel) for groups of at most kLanes rows of a panel.
    template <class F>
    void each_vector(const Piece& piece, int64_t row, F&& f) const {
      const int64_t end = std::min(row + kPanelRows, piece.end), width = (end - row + kLanes - 1) / kLanes * kLanes;
      for (int64_t first = row; first < end; first += kLanes) f(first, std::min<int64_t>(kLanes, end - first), width);
    }
    int64_t token(const Piece& piece, int64_t row) const {
      return call_.sequences[piece.sequence].first_query + row / call_.group;
    }
    int64_t head(const Piece& piece, int64_t row) const { return piece.kv_head * call_.group + row % call_.group; }

    void begin_panel(const Piece& piece, int64_t row) {
      const Sequence& sequence = call_.sequences[piece.sequence];
      RowState& rows = state(piece, row);
      std::fill_n(rows.largest, kPanelRows, kNone);
      std::fill_n(rows.sums, kPanelRows, 0.0f);
      for (int64_t i = 0; i < kPanelRows; ++i) {
        const int64_t own = std::min(row + i, piece.end - 1);
        rows.positions[i] = int32_t(sequence.keys - sequence.queries + own / call_.group);
        rows.slopes[i] = call_.slopes.empty() ? 0.0f : call_.slopes[head(piece, own)];
      }
      float* const queries = of_panel(queries_, of_.words_, piece, row);
      each_vector(piece, row, [&](int64_t first, int64_t count, int64_t width) {
        std::array<const T*, kLanes> from{};
        for (int64_t i = 0; i < count; ++i) {
          from[i] = of_.q_ + token(piece, first + i) * call_.q_row + head(piece, first + i) * call_.q_head;
        }
        pack_queries(from.data(), call_.size, width, queries + first - row);
      });
      std::fill_n(of_panel(sums_, of_.words_v_, piece, row), kPanelRows * of_.words_v_, 0.0f);
    }

    // Keys [begin, end) and their values, at their places in the tile; zeros beside them, as far as blocks reach.
    void copy_tile(const Piece& piece, int64_t tile, int64_t begin, int64_t end) {
      const Sequence& sequence = call_.sequences[piece.sequence];
      const int64_t first = tile + (begin - tile) / kColumns * kColumns;
      const int64_t last = tile + (end - tile + kColumns - 1) / kColumns * kColumns;
      const T* keys[kTileKeys]{};
      const T* values[kTileKeys]{};
      for (int64_t key = begin; key < end; ++key) {
        const int64_t place = sequence.first_slot + key, slot = place % call_.block_size;
        const int64_t block = sequence.blocks ? sequence.blocks[place / call_.block_size] : 0;
        keys[key - tile] = of_.k_ + block * call_.k_block + slot * call_.k_slot + piece.kv_head * call_.k_head;
        values[key - tile] = of_.v_ + block * call_.v_block + slot * call_.v_slot + piece.kv_head * call_.v_head;
      }
      for (int64_t i = first - tile; i < last - tile; ++i) {
        float* const to = keys_ + i * of_.words_;
        keys[i] ? pack_key(keys[i], call_.size, to) : void(std::fill_n(to, of_.words_, 0.0f));
      }
      for (int64_t i = first - tile; i < last - tile; i += kWord<T>) {
        pack_values(values[i], values[i + kWord<T> - 1], call_.size_v, of_.words_v_,
                    values_ + i / kWord<T> * of_.words_v_);
      }
    }

    template <int... I>
    void add_tile(std::integer_sequence<int, I...>, int64_t vectors, const Piece& piece, int64_t tile, int64_t row) {
      ((vectors == I + 1 ? add_tile<I + 1>(piece, tile, row) : void()), ...);
    }

    template <int kRows>
    void add_tile(const Piece& piece, int64_t tile, int64_t row) {
      using OfRows = Panel<kPairs<T>, kRows>;
      const Range first = of_.seen(piece, row), last = of_.seen(piece, std::min(row + kPanelRows, piece.end) - 1);
      const Seen seen{std::max(first.begin, tile) - tile, std::min(last.end, tile + kTileKeys) - tile,
                      last.begin - tile, first.end - tile};
      if (seen.begin >= seen.end) return;
      RowState& rows = state(piece, row);
      OfRows::multiply_keys(keys_, of_panel(queries_, of_.words_, piece, row), of_.words_, seen, scores_);
      OfRows::softmax(call_.shape, seen, tile, rows, scores_);
      OfRows::multiply_values(values_, of_.words_v_, scores_, seen, rows, of_panel(sums_, of_.words_v_, piece, row));
    }

    void end_panel(const Piece& piece, int64_t row) {
      const RowState& rows = state(piece, row);
      const float* const sums = of_panel(sums_, of_.words_v_, piece, row);
      each_vector(piece, row, [&](int64_t first, int64_t count, int64_t width) {
        std::array<T*, kLanes> to{};
        Floats totals = load_as<Floats>(rows.sums + first - row);
        for (int64_t i = 0; i < count; ++i) {
          to[i] = of_.out_ + token(piece, first + i) * call_.out_row + head(piece, first + i) * call_.out_head;
          if (call_.sinks.empty()) continue;
          const float largest = rows.largest[first - row + i], base = largest == kNone ? 0.0f : largest;
          totals[i] += std::exp2(call_.sinks[head(piece, first + i)] * kLog2e - base);
        }
        unpack(sums + first - row, totals, call_.size_v, width, to.data());
      });
    }

    const Runner& of_;
    const Call& call_;
    int64_t panels_;
    Scratch scratch_;
    float *queries_, *sums_, *keys_, *values_, *scores_;
    std::vector<RowState> states_;
  };

  const Call& call_;
  const T *q_, *k_, *v_;
  T* out_;
  int64_t words_, words_v_, rows_;
  std::vector<Piece> pieces_;
};

template <class T>
void run_as(const Call& call, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& out) {
  const auto data = [](const Tensor& t) { return static_cast<const T*>(t.const_data_ptr()); };
  Runner<T>(call, data(q), data(k), data(v), static_cast<T*>(out.mutable_data_ptr())).run();
}

void run(Call call, const Tensor& given, const Tensor& k, const Tensor& v, const Tensor& out) {
  const Tensor q = apart(given, out);
  call.q_row = q.stride(0), call.q_head = q.stride(1);
  switch (q.scalar_type()) {
    case ScalarType::Float:
      return run_as<float>(call, q, k, v, out);
    case ScalarType::BFloat16:
      return run_as<BFloat16>(call, q, k, v, out);
    case ScalarType::Half:
      return run_as<Half>(call, q, k, v, out);
    default:
      STD_TORCH_CHECK(false, "prefill attention: no kernel for this dtype");
  }
}

// What both ops share. k and v: [..., key heads, size].
Call call_of(const Tensor& q, const Tensor& k, const Tensor& v, const std::vector<int64_t>& ends,
             const std::vector<int64_t>& lengths, const Tensor& out, double scale, bool causal, int64_t window_left,
             int64_t window_right, double softcap, const MaybeTensor& slopes, const MaybeTensor& sinks) {
  STD_TORCH_CHECK(q.dim() == 3 && out.dim() == 3, "prefill attention: q and attn_output have 3 dimensions");
  for (const Tensor* t : {&q, &k, &v, &out}) {
    STD_TORCH_CHECK(t->scalar_type() == q.scalar_type(), "prefill attention: one dtype");
    STD_TORCH_CHECK(t->size(t->dim() - 1) <= 1 || t->stride(t->dim() - 1) == 1,
                    "prefill attention: the last dimension's elements are neighbours");
  }
  Call call;
  const int64_t last = k.dim() - 1;
  call.heads = q.size(1), call.kv_heads = k.size(last - 1), call.size = q.size(2), call.size_v = v.size(last);
  STD_TORCH_CHECK(call.kv_heads > 0 && call.heads % call.kv_heads == 0 && k.size(last) == call.size &&
                      v.size(last - 1) == call.kv_heads && out.size(0) == q.size(0) && out.size(1) == call.heads &&
                      out.size(2) == call.size_v,
                  "prefill attention: sizes of q, keys, values and attn_output differ");
  call.group = call.heads / call.kv_heads;
  call.out_row = out.stride(0), call.out_head = out.stride(1);
  call.k_slot = k.stride(last - 2), call.k_head = k.stride(last - 1);
  call.v_slot = v.stride(last - 2), call.v_head = v.stride(last - 1);
  int64_t highest = window_right < 0 ? kFar : std::min(window_right, kFar);
  call.shape = {float(scale), float(softcap), slopes.has_value(),
                int32_t(window_left < 0 ? -kFar : -std::min(window_left, kFar)), int32_t(causal ? 0 : highest)};
  call.slopes = numbers(slopes), call.sinks = numbers(sinks);
  for (const auto* given : {&call.slopes, &call.sinks}) {
    STD_TORCH_CHECK(given->empty() || int64_t(given->size()) == call.heads, "prefill attention: one number a head");
  }
  STD_TORCH_CHECK(ends.size() == lengths.size(), "prefill attention: one end and one length a sequence");
  int64_t begin = 0;
  for (size_t s = 0; s < ends.size(); ++s) {
    STD_TORCH_CHECK(ends[s] >= begin && ends[s] <= q.size(0), "prefill attention: queries of sequence ", s, " end at ",
                    ends[s], ", which is not between ", begin, " and ", q.size(0));
    STD_TORCH_CHECK(lengths[s] >= 0 && lengths[s] < kFar, "prefill attention: sequence ", s, " has ", lengths[s],
                    " keys");
    call.sequences.push_back({begin, ends[s] - begin, lengths[s], 0, nullptr});
    begin = ends[s];
  }
  return call;
}

void prefill_attention(Tensor q, Tensor k, Tensor v, Tensor q_ends, Tensor kv_seqlens, Tensor attn_output,
                       double softmax_scale, bool causal, int64_t window_left, int64_t window_right,
                       double logit_softcapping, MaybeTensor alibi_slopes, MaybeTensor sinks) {
  STD_TORCH_CHECK(k.dim() == 3 && v.dim() == 3 && k.size(0) == v.size(0),
                  "prefill_attention: k and v have 3 dimensions and as many tokens");
  Call call = call_of(q, k, v, whole_numbers(q_ends), whole_numbers(kv_seqlens), attn_output, softmax_scale, causal,
                      window_left, window_right, logit_softcapping, alibi_slopes, sinks);
  call.block_size = std::numeric_limits<int64_t>::max(), call.k_block = call.v_block = 0;
  int64_t slot = 0;
  for (Sequence& sequence : call.sequences) {
    sequence.first_slot = slot;
    slot += sequence.keys;
  }
  STD_TORCH_CHECK(slot <= k.size(0), "prefill_attention: sequences have ", slot, " keys, and k has ", k.size(0));
  run(std::move(call), q, k, v, attn_output);
}

void paged_prefill_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_offsets, Tensor q_ends,
                             Tensor kv_seqlens, Tensor attn_output, double softmax_scale, bool causal,
                             int64_t window_left, int64_t window_right, double logit_softcapping,
                             MaybeTensor alibi_slopes, MaybeTensor sinks) {
  STD_TORCH_CHECK(k_cache.dim() == 4 && v_cache.dim() == 4 && k_cache.size(1) == v_cache.size(1) && k_cache.size(1) > 0,
                  "paged_prefill_attention: caches have 4 dimensions and one block size");
  Call call = call_of(q, k_cache, v_cache, whole_numbers(q_ends), whole_numbers(kv_seqlens), attn_output, softmax_scale,
                      causal, window_left, window_right, logit_softcapping, alibi_slopes, sinks);
  call.block_size = k_cache.size(1), call.k_block = k_cache.stride(0), call.v_block = v_cache.stride(0);
  call.blocks = whole_numbers(block_offsets);
  const int64_t columns = block_offsets.size(1), blocks = std::min(k_cache.size(0), v_cache.size(0));
  STD_TORCH_CHECK(block_offsets.size(0) == int64_t(call.sequences.size()),
                  "paged_prefill_attention: one row of blocks a sequence");
  for (size_t s = 0; s < call.sequences.size(); ++s) {
    Sequence& sequence = call.sequences[s];
    STD_TORCH_CHECK(sequence.keys <= columns * call.block_size, "paged_prefill_attention: sequence ", s, " has ",
                    sequence.keys, " keys, and blocks for ", columns * call.block_size);
    sequence.blocks = call.blocks.data() + s * columns;
    if (sequence.queries == 0) continue;
    const int64_t oldest = std::max<int64_t>(sequence.keys - sequence.queries + call.shape.lowest, 0);
    for (int64_t c = oldest / call.block_size; c * call.block_size < sequence.keys; ++c) {
      STD_TORCH_CHECK(sequence.blocks[c] >= 0 && sequence.blocks[c] < blocks, "paged_prefill_attention: block index ",
                      sequence.blocks[c], " of sequence ", s, " is outside of the cache of ", blocks, " blocks");
    }
  }
  run(std::move(call), q, k_cache, v_cache, attn_output);
}

}  // namespace
}  // namespace dlinfer::prefill

STABLE_TORCH_LIBRARY_FRAGMENT(dlinfer_cpu, library) {
  library.def(
      "prefill_attention(Tensor q, Tensor k, Tensor v, Tensor q_ends, Tensor kv_seqlens, Tensor(a!) attn_output, "
      "float softmax_scale, bool causal, int window_left, int window_right, float logit_softcapping, "
      "Tensor? alibi_slopes, Tensor? sinks) -> ()");
  library.def(
      "paged_prefill_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_offsets, Tensor q_ends, "
      "Tensor kv_seqlens, Tensor(a!) attn_output, float softmax_scale, bool causal, int window_left, "
      "int window_right, float logit_softcapping, Tensor? alibi_slopes, Tensor? sinks) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(dlinfer_cpu, CPU, library) {
  dlinfer::chain::put(library, "prefill_attention", TORCH_BOX(&dlinfer::prefill::prefill_attention));
  dlinfer::chain::put(library, "paged_prefill_attention", TORCH_BOX(&dlinfer::prefill::paged_prefill_attention));
}
