// Up to how many rows of x our own products are taken, and torch's from there on.
//
// few_rows.h reads a weight at the speed of memory and multiplies at 0.6 to 0.9 of the processor's peak. torch's product
// packs the weight anew at each call. That pays for itself once there are many rows, if torch has instructions for the
// dtype at all. For bfloat16 these are AVX512-BF16: without it oneDNN, which torch asks on any AVX-512, computes at a
// third of float32's speed (70 GFLOPS on Zen 4 kept to AVX512-VNNI, ours 200). For float16 they are AVX512-FP16 or
// AVX-NE-CONVERT (aten/src/ATen/native/mkldnn/Utils.h, mkldnn_fp16_device_check). Without them float16 takes it 7 times
// as long as ours on Zen 5.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <type_traits>

#include "common/invariance.h"
#include "common/processor.h"
#include "linear/few_rows.h"
#include "linear/float_blocks.h"
#include "tiles/block.h"

namespace dlinfer {

constexpr int64_t kAnyNumber = std::numeric_limits<int64_t>::max();

// Where both have instructions: from here on computing takes longer than reading, and torch's is as fast. Measured on an
// AMD EPYC of the Zen 4 kind for each instruction set (benchmarks/linear.py). AMX tiles, ours or torch's, and other
// processors may compute faster than that; for them reading surely takes longer at this number.
template <class T>
constexpr int64_t kUntilTorch = 16;
#if defined(__x86_64__) && !defined(__AMX_BF16__)
template <>
constexpr int64_t kUntilTorch<BFloat16> = 64;
template <>
constexpr int64_t kUntilTorch<Half> = 64;
#endif

// Likewise, where float_blocks.h takes what is more. Measured on AMD EPYCs, two threads. Zen 4: in float32 both are as
// fast with 64 rows; with 128 it takes torch 1.1 to 2.0 times as long, with 512 1.1 to 1.4. Zen 3: both are as fast with
// 48 rows; with 512 it is 1.2 to 1.3 times as fast as few_rows.h in bfloat16, and 1.0 to 1.2 times as fast as torch's
// float32. torch's bfloat16 is its reference there: it takes hundreds of times as long. Others were not measured; on Zen
// 5 few_rows.h had 0.6 of float32's peak with 512 rows, torch 0.4.
#if defined(__AVX512F__)
constexpr int64_t kUntilBlocks = 64;
#else
constexpr int64_t kUntilBlocks = 48;
#endif

// Whether float_blocks.h takes what is too many rows for few_rows.h. With AVX-512 only float32: in 16 bits few_rows.h is
// as fast with any number of rows, and gives a row the same bits in any company; tiles/ is faster in bfloat16.
#if defined(DLINFER_HAS_FLOAT_BLOCKS) && defined(__AVX512F__)
template <class T>
constexpr bool kTakesBlocks = std::is_same_v<T, float>;
#elif defined(DLINFER_HAS_FLOAT_BLOCKS)
template <class T>
constexpr bool kTakesBlocks = true;
#else
template <class T>
constexpr bool kTakesBlocks = false;
#endif

// Likewise, where tiles/ takes what is more, however many rows there are. Measured on a Xeon of the Emerald Rapids kind:
// with three rows both are as fast. With four the tiles are ahead, with 16 by a factor of two and more; one row takes
// them 15 % longer.
//
// AVX512-BF16 multiplies 16 rows of x in the time of one. Zen 4, two threads, out x in 9728 x 896: with 24 rows it takes
// 1.2 times as long as few_rows.h, with 32 as long, and 0.9 times from 64 on; 512 rows run at 0.92 of the peak. torch's
// product has 0.85 of the peak, packs the weight anew at each call, and leaves threads of OpenMP's that look for work.
#if defined(DLINFER_HAS_TILES)
constexpr int64_t kUntilTiles = 2;
#elif defined(DLINFER_HAS_PANELS)
constexpr int64_t kUntilTiles = 24;
#endif

// Likewise, where results are batch-invariant: all rows, or none where tiles take them. One row takes tiles 15 % longer.
inline int64_t max_invariant_inputs(torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  switch (dtype) {
    case ScalarType::BFloat16:
#if defined(DLINFER_HAS_TILES)
      if (tiles_granted()) return 0;
#endif
      return kAnyNumber;
    case ScalarType::Float:
#if defined(DLINFER_HAS_HALF)
    case ScalarType::Half:
#endif
      return kAnyNumber;
    default:
      return -1;
  }
}

// The most rows of x that few_rows.h takes of a weight; -1 where there is no kernel for the dtype.
inline int64_t max_inputs(torch::headeronly::ScalarType dtype) {
  using torch::headeronly::ScalarType;
  if (batch_invariant()) return max_invariant_inputs(dtype);
  switch (dtype) {
    case ScalarType::Float:
      return kTakesBlocks<float> ? kUntilBlocks : kUntilTorch<float>;
    case ScalarType::BFloat16:
      if (kTakesBlocks<BFloat16>) return kUntilBlocks;
#if defined(DLINFER_HAS_PANELS)
      if (tiles::granted()) return kUntilTiles;
#endif
      if (lacks_for_torch(Instructions::kBFloat16)) return kAnyNumber;
      return kUntilTorch<BFloat16>;
#if defined(DLINFER_HAS_HALF)
    case ScalarType::Half:
      if (kTakesBlocks<Half>) return kUntilBlocks;
      if (lacks_for_torch(Instructions::kHalf)) return kAnyNumber;
      return kUntilTorch<Half>;
#endif
    default:
      return -1;
  }
}

// Returns whether tiles/ multiplies so many rows of x.
inline bool tiles_take([[maybe_unused]] torch::headeronly::ScalarType dtype, [[maybe_unused]] int64_t inputs) {
#if defined(DLINFER_HAS_PANELS)
  return dtype == torch::headeronly::ScalarType::BFloat16 && tiles::granted() && inputs > max_inputs(dtype);
#else
  return false;
#endif
}

// Whether so many rows of x are ours, few_rows.h's or those of a kernel for more.
inline bool takes_inputs(torch::headeronly::ScalarType dtype, int64_t inputs) {
  using torch::headeronly::ScalarType;
  const int64_t few = max_inputs(dtype);
  if (inputs <= few) return true;
  if (tiles_take(dtype, inputs)) return true;
  if (dtype == ScalarType::Float) return kTakesBlocks<float>;
  if (dtype == ScalarType::BFloat16) return kTakesBlocks<BFloat16>;
  return dtype == ScalarType::Half && few >= 0 && kTakesBlocks<Half>;
}

// The most rows of x that few_rows.h takes of a packed weight where there are no tiles. torch reads plain ones, and to
// unpack a weight into memory takes longer than to read it, so that only many rows pay for it.
inline int64_t max_packed_inputs() {
  constexpr int64_t kFewest = 32;
  return std::max(max_inputs(torch::headeronly::ScalarType::BFloat16), kFewest);
}

}  // namespace dlinfer
