// What the team of threads asks torch for, without torch.
#pragma once

#include <atomic>
#include <cstdint>

namespace torch::stable {

// Not inline: g++ would keep a library with such a variable loaded for good, and dlclose is what a test asks about.
static std::atomic<uint32_t> threads_wanted{2};

inline uint32_t get_num_threads() { return threads_wanted; }

}  // namespace torch::stable
