// A barrier of the processes (ranks) that share memory. It ends with an error if one of them has ended.
//
// Each rank counts its own arrivals on a cache line of its own, and waits for the counts of the others. It spins for as
// long as the caller allows, then sleeps until a rank arrives (futex).
#pragma once

#include <torch/headeronly/util/Exception.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdint>
#include <thread>
#include <vector>

#include "threads/wait.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <poll.h>
#include <signal.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#endif

namespace dlinfer::ranks {

constexpr int64_t kMostRanks = 64;

// A rank's line of shared memory.
struct alignas(128) Line {
  std::atomic<uint32_t> arrivals;
  std::atomic<uint32_t> sleepers;  // ranks that sleep until `arrivals` changes
  // The sizes of the last two arrivals, see `arrive`. The older one is overwritten once all have read it.
  std::atomic<int64_t> sizes[2];
};

struct Header {
  std::atomic<int64_t> lost;  // 1 + a rank that has ended, once one has noticed
  Line lines[kMostRanks];
};
static_assert(std::atomic<uint32_t>::is_always_lock_free && std::atomic<int64_t>::is_always_lock_free);

// The end of another process, which may be a child that nobody has waited for.
class Life {
 public:
  explicit Life(int64_t process) : process_(process) {
#if defined(SYS_pidfd_open)
    file_ = int(syscall(SYS_pidfd_open, pid_t(process), 0));
#endif
  }
  Life(Life&& other) noexcept : process_(other.process_), file_(other.file_) { other.file_ = -1; }
  Life& operator=(Life&&) = delete;
  ~Life() {
    if (file_ >= 0) ::close(file_);
  }

  bool has_ended() const {
    if (file_ >= 0) {
      pollfd ended{file_, POLLIN, 0};
      return poll(&ended, 1, 0) > 0;
    }
    return kill(pid_t(process_), 0) != 0 && errno == ESRCH;
  }

 private:
  int64_t process_;
  int file_ = -1;
};

class Meeting {
 public:
  // header: shared by all, zeros at first. processes: ids of all ranks. spin: how long to wait awake.
  Meeting(Header* header, int64_t rank, const std::vector<int64_t>& processes, std::chrono::microseconds spin)
      : header_(header), rank_(rank), spin_(spin) {
    for (int64_t process : processes) lives_.emplace_back(process);
  }

  int64_t ranks() const { return int64_t(lives_.size()); }
  int64_t rank() const { return rank_; }

  // Returns once all ranks are here for the same time. All can then read whatever one wrote before. size: the same for
  // all ranks. Throws if it is not, and if a rank has ended.
  void arrive(int64_t size) {
    ++times_;
    Line& own = header_->lines[rank_];
    own.sizes[times_ % 2].store(size, std::memory_order_relaxed);
    own.arrivals.store(times_);
    if (own.sleepers.load() > 0) wake(own);
    for (int64_t other = 0; other < ranks(); ++other) {
      if (other != rank_) wait_for_rank(other);
    }
    for (int64_t other = 0; other < ranks(); ++other) {
      const int64_t theirs = header_->lines[other].sizes[times_ % 2].load(std::memory_order_relaxed);
      STD_TORCH_CHECK(theirs == size, "all_reduce: rank ", rank_, " sums ", size,
                      " bytes, rank ", other, " ", theirs);
    }
  }

 private:
  static constexpr auto kLook = std::chrono::milliseconds(20);  // between two looks whether a rank has ended

  bool is_here(const Line& line) const { return int32_t(line.arrivals.load(std::memory_order_acquire) - times_) >= 0; }

  void wait_for_rank(int64_t other) {
    Line& line = header_->lines[other];
    if (is_here(line)) return;
    const auto end = std::chrono::steady_clock::now() + spin_;
    do {
      for (int i = 0; i < 64; ++i) {
        if (is_here(line)) return;
        pause();
      }
    } while (std::chrono::steady_clock::now() < end);
    // Where ranks outnumber CPUs, the other one may need this CPU.
    for (int i = 0; i < 8; ++i) {
      std::this_thread::yield();
      if (is_here(line)) return;
    }
    while (!is_here(line)) {
      sleep(line);
      check_lives();
    }
  }

  void check_lives() {
    for (int64_t one = 0; one < ranks(); ++one) {
      // One that arrived before it ended is missed at the next meeting.
      if (one != rank_ && lives_[one].has_ended() && !is_here(header_->lines[one])) header_->lost.store(one + 1);
    }
    const int64_t lost = header_->lost.load();
    STD_TORCH_CHECK(lost == 0, "all_reduce: the process of rank ", lost - 1, " has ended");
  }

#if defined(__linux__)
  void sleep(Line& line) {
    line.sleepers.fetch_add(1);
    const uint32_t seen = line.arrivals.load();
    if (int32_t(seen - times_) < 0) {
      const timespec time{0, std::chrono::nanoseconds(kLook).count()};
      syscall(SYS_futex, &line.arrivals, FUTEX_WAIT, seen, &time, nullptr, 0);
    }
    line.sleepers.fetch_sub(1);
  }

  static void wake(Line& line) { syscall(SYS_futex, &line.arrivals, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0); }
#else
  void sleep(Line&) { std::this_thread::sleep_for(std::chrono::microseconds(50)); }
  static void wake(Line&) {}
#endif

  Header* const header_;
  const int64_t rank_;
  const std::chrono::microseconds spin_;
  std::vector<Life> lives_;
  uint32_t times_ = 0;
};

}  // namespace dlinfer::ranks
