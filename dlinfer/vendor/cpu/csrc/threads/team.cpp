#include "threads/team.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <utility>

#include "threads/wait.h"

#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <unistd.h>
#endif
#if defined(__linux__)
#include <sched.h>
#endif

namespace dlinfer {
namespace {

using Clock = std::chrono::steady_clock;

// How long a thread without work looks for some before it sleeps: longer than what lies between two kernels of a decode
// step, shorter than what lies between two steps. Meanwhile it lets others have its CPU, those of OpenMP among them.
constexpr auto kAwake = std::chrono::microseconds(150);

// Bytes that a helper prefetches before there is work on them: in all, and between two looks for work. Half of a
// second-level cache of 1 MiB; between two linear layers of a decode step few helpers get so far.
constexpr int64_t kFetchedAhead = 512 << 10, kFetchedAtOnce = 512, kLine = 64;

// The most jobs shared at once. The caller of a further job does it alone.
constexpr int kMostShared = 8;

// This thread's floating-point mode: rounding and subnormals (torch.set_flush_denormal sets it for the caller alone).
inline uint32_t arithmetic() {
#if defined(__x86_64__)
  return _mm_getcsr() & ~0x3fu;  // without the exception flags
#elif defined(__aarch64__)
  uint64_t mode;
  asm volatile("mrs %0, fpcr" : "=r"(mode));
  return uint32_t(mode);
#else
  return 0;
#endif
}

inline void set_arithmetic([[maybe_unused]] uint32_t mode) {
#if defined(__x86_64__)
  if (mode != arithmetic()) _mm_setcsr(mode);
#elif defined(__aarch64__)
  if (mode != arithmetic()) asm volatile("msr fpcr, %0" : : "r"(uint64_t(mode)));
#endif
}

#if defined(__unix__) || defined(__APPLE__)
// Threads created meanwhile get only signals of faults and profilers. All others are for the program's threads.
class NoSignals {
 public:
  NoSignals() {
    sigset_t all;
    sigfillset(&all);
    for (int fault : {SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGTRAP, SIGABRT, SIGPROF}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~NoSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};
#else
struct NoSignals {};
#endif

// A kernel's work, in a slot that outlives it: a helper may look at a job that has just ended.
class alignas(128) SharedWork {
 public:
  // Takes the slot if it is free.
  bool claim() {
    uint32_t free = 0;
    return state_.load(std::memory_order_relaxed) == 0 && state_.compare_exchange_strong(free, kTaken);
  }

  void open(int64_t begin, int64_t end, int64_t grain, int64_t threads, void (*body)(const void*, int64_t, int64_t),
            const void* context) {
    next_.store(begin, std::memory_order_relaxed);
    end_.store(end, std::memory_order_relaxed);
    threads_.store(threads, std::memory_order_relaxed);
    arithmetic_ = arithmetic();
    grain_ = grain;
    body_ = body;
    context_ = context;
    error_ = nullptr;
    state_.store(kTaken | kOpen);
  }

  // Does the remaining work, range by range.
  void join() {
    try {
      int64_t first, last;
      while (take(first, last)) body_(context_, first, last);
    } catch (...) {
      next_.store(end_.load(std::memory_order_relaxed), std::memory_order_relaxed);
      const std::lock_guard lock(error_mutex_);
      if (!error_) error_ = std::current_exception();
    }
  }

  // Helps with this job if it needs help; returns whether it did.
  bool help() {
    uint32_t state = state_.load(std::memory_order_acquire);
    do {
      if (!wants_help(state)) return false;
      // If that job has ended and another one has opened since, one helper too many may join it and find work.
    } while (!state_.compare_exchange_weak(state, state + 1, std::memory_order_acquire));
    set_arithmetic(arithmetic_);
    join();
    state_.fetch_sub(1, std::memory_order_release);
    return true;
  }

  bool wants_help() const { return wants_help(state_.load()); }

  // Admits no more helpers, waits for those that are working, and frees the slot.
  void close() {
    state_.fetch_and(~kOpen, std::memory_order_relaxed);
    wait_for([&] { return (state_.load(std::memory_order_acquire) & kHelpers) == 0; });
    const std::exception_ptr error = std::exchange(error_, nullptr);
    state_.store(0, std::memory_order_release);
    if (error) std::rethrow_exception(error);
  }

 private:
  static constexpr uint32_t kTaken = 1u << 31, kOpen = 1u << 30, kHelpers = kOpen - 1;

  bool wants_help(uint32_t state) const {
    return (state & kOpen) && int64_t(state & kHelpers) + 1 < threads_.load(std::memory_order_relaxed) &&
           next_.load(std::memory_order_relaxed) < end_.load(std::memory_order_relaxed);
  }

  // Long ranges first, as kernels read ahead within one; then shorter ones, so that all threads end together.
  bool take(int64_t& first, int64_t& last) {
    const int64_t end = end_.load(std::memory_order_relaxed), threads = threads_.load(std::memory_order_relaxed);
    first = next_.load(std::memory_order_relaxed);
    do {
      if (first >= end) return false;
      last = std::min(end, first + std::max(grain_, (end - first) / (2 * threads)));
    } while (!next_.compare_exchange_weak(first, last, std::memory_order_relaxed));
    return true;
  }

  std::atomic<uint32_t> state_{0};
  std::atomic<int64_t> threads_{0}, end_{0};
  void (*body_)(const void*, int64_t, int64_t) = nullptr;
  const void* context_ = nullptr;
  int64_t grain_ = 1;
  uint32_t arithmetic_ = 0;
  std::mutex error_mutex_;
  std::exception_ptr error_;
  alignas(128) std::atomic<int64_t> next_{0};
};

// The memory of the next work: helpers prefetch the part behind the caller's first range (SharedWork::take).
class ComingWork {
 public:
  void set(const char* data, int64_t bytes, int64_t threads) {
    const int64_t begin = bytes / (2 * threads);
    next_.store(kNone, std::memory_order_relaxed);
    data_.store(data, std::memory_order_relaxed);
    end_.store(std::min(bytes, begin + (threads - 1) * kFetchedAhead), std::memory_order_relaxed);
    next_.store(begin, std::memory_order_release);
  }

  // Prefetches a little; returns whether there was any left. If `set` is called meanwhile, the prefetch may be useless
  // or of freed memory, which is harmless for a hint.
  bool fetch() {
    if (next_.load(std::memory_order_relaxed) >= end_.load(std::memory_order_relaxed)) return false;
    const int64_t at = next_.fetch_add(kFetchedAtOnce, std::memory_order_acquire);
    const char* const data = data_.load(std::memory_order_relaxed);
    if (at >= end_.load(std::memory_order_relaxed)) return false;
    for (int64_t line = at; line < at + kFetchedAtOnce; line += kLine) __builtin_prefetch(data + line, 0, 2);
    return true;
  }

 private:
  static constexpr int64_t kNone = int64_t(1) << 62;
  std::atomic<const char*> data_{nullptr};
  std::atomic<int64_t> end_{0};
  alignas(128) std::atomic<int64_t> next_{kNone};
};

class Team {
 public:
  void will_share(const void* data, int64_t bytes, int64_t threads) {
    if (bytes > 0) coming_.set(static_cast<const char*>(data), bytes, threads);
  }

  void share(int64_t begin, int64_t end, int64_t grain, int64_t threads, void (*body)(const void*, int64_t, int64_t),
             const void* context) {
    hire(threads - 1);
    for (SharedWork& work : shared_) {
      if (!work.claim()) continue;
      work.open(begin, end, grain, threads, body, context);
      if (asleep_.load() > 0) wake(std::min<int64_t>(threads, (end - begin + grain - 1) / grain) - 1);
      work.join();
      work.close();
      return;
    }
    body(context, begin, end);
  }

 private:
  // Creates missing helpers. Without memory for more threads, the existing ones have to do.
  void hire(int64_t helpers) {
    if (hired_.load(std::memory_order_relaxed) >= helpers) return;
    stay_loaded();
    const std::lock_guard lock(hiring_);
    cpus_.store(cpus(), std::memory_order_relaxed);
    const NoSignals meanwhile;
    try {
      for (; hired_ < helpers; ++hired_) std::thread([this] { live(); }).detach();
    } catch (const std::exception&) {  // system_error or bad_alloc
    }
  }

  void wake(int64_t helpers) {
    calls_.fetch_add(1);
    for (; helpers > 0; --helpers) calls_.notify_one();
  }

  // A helper's life, which ends with the process.
  void live() {
    inside = true;
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "dlinfer_cpu");
#endif
    for (;;) {
      if (help() || look_around()) continue;
      const uint32_t calls = calls_.load();
      ++asleep_;
      // A thread that opens a job from here on sees a sleeper and notifies it. A job opened before is seen now.
      if (!any_work()) calls_.wait(calls);
      --asleep_;
    }
  }

  bool help() {
    for (SharedWork& work : shared_) {
      if (work.help()) return true;
    }
    return false;
  }

  bool any_work() const {
    return std::any_of(shared_.begin(), shared_.end(), [](const SharedWork& work) { return work.wants_help(); });
  }

  // Waits at most kAwake for work; returns whether there is any. If threads outnumber CPUs, polling delays another one.
  bool look_around() {
    if (hired_.load(std::memory_order_relaxed) >= cpus_.load(std::memory_order_relaxed)) return any_work();
    const auto end = Clock::now() + kAwake;
    do {
      for (int i = 0; i < 32; ++i) {
        if (any_work()) return true;
        coming_.fetch();
        pause();
      }
      std::this_thread::yield();
    } while (Clock::now() < end);
    return false;
  }

  // Closing the library would unmap its threads' code.
  static void stay_loaded() {
#if defined(RTLD_NODELETE)
    Dl_info here;
    if (dladdr(reinterpret_cast<void*>(&thread_count), &here)) {
      dlopen(here.dli_fname, RTLD_NOW | RTLD_NOLOAD | RTLD_NODELETE);
    }
#endif
  }

  // The number of CPUs that the process may use.
  static int64_t cpus() {
#if defined(__linux__)
    cpu_set_t set;
    if (sched_getaffinity(getpid(), sizeof(set), &set) == 0) return CPU_COUNT(&set);
#endif
    return std::max(1u, std::thread::hardware_concurrency());
  }

 public:
  static thread_local bool inside;  // whether this thread does a part of a job

 private:
  std::array<SharedWork, kMostShared> shared_;
  ComingWork coming_;
  std::atomic<int64_t> hired_{0}, asleep_{0};
  std::mutex hiring_;
  std::atomic<uint32_t> calls_{0};  // sleepers wait on it. A condition variable needs libstdc++ 12, which RHEL 9 lacks
  std::atomic<int64_t> cpus_{1};
};

thread_local bool Team::inside = false;

// Never destroyed, since its threads live until the process ends. Created when the library is loaded, so that no thread
// creates it while another one forks.
alignas(Team) unsigned char place[sizeof(Team)];

// A child of fork has none of the threads, and mutexes as they happened to be: it gets a new team, without asking for
// memory.
Team* const the_team = [] {
#if defined(__unix__) || defined(__APPLE__)
  pthread_atfork(nullptr, nullptr, [] { new (place) Team; });
#endif
  return new (place) Team;
}();

}  // namespace

int64_t thread_count() { return torch::stable::get_num_threads(); }

void will_share(const void* data, int64_t bytes) { the_team->will_share(data, bytes, thread_count()); }

void share_work(int64_t begin, int64_t end, int64_t grain, void (*body)(const void*, int64_t, int64_t),
                const void* context) {
  if (begin >= end) return;
  const int64_t threads = Team::inside || end - begin <= grain ? 1 : thread_count();
  if (threads <= 1) return body(context, begin, end);
  Team::inside = true;
  struct Leave {
    ~Leave() { Team::inside = false; }
  } leave;
  the_team->share(begin, end, std::max<int64_t>(grain, 1), threads, body, context);
}

}  // namespace dlinfer
