// Threads that go through the phases of a step together, and memory that stays.
#pragma once
#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include "vectors.h"

// Until `done()`: spins first, as what is waited for takes microseconds, and then offers the core
// to others. Ends early once `patience` has passed (0: never).
template <class Done>
inline bool spin_until(Done done, std::chrono::microseconds patience = {}) {
  using Clock = std::chrono::steady_clock;
  Clock::time_point began;
  for (int spins = 0; !done(); spins++) {
    if (spins < 1000) {
#if defined(__x86_64__)
      _mm_pause();
#else
      __asm__ volatile("yield");
#endif
      continue;
    }
    if (spins == 1000) began = Clock::now();
    if (patience.count() && Clock::now() - began > patience) return false;
    std::this_thread::yield();
  }
  return true;
}

// All threads wait until the last one is there.
class Barrier {
 public:
  void wait(int64_t& arrivals, int threads) {
    arrivals += threads;
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == arrivals) return;
    spin_until([&] { return arrived_.load(std::memory_order_acquire) >= arrivals; });
  }

 private:
  alignas(64) std::atomic<int64_t> arrived_{0};
};

// Threads that stay. OpenMP would do, but each compiler brings another library of it, whose threads
// spin beside those of torch's.
class ThreadPool {
 public:
  static ThreadPool& instance() {
    static ThreadPool* pool = nullptr;
    static std::once_flag once;
    std::call_once(once, [] {
      pool = new ThreadPool;
      pthread_atfork(nullptr, nullptr, [] { pool = new ThreadPool; });  // threads do not fork
    });
    return *pool;
  }

  // `work(thread, threads)` in each of so many threads, the caller's among them.
  void run(int threads, const std::function<void(int, int)>& work) {
    if (threads <= 1) return work(0, 1);
    std::lock_guard<std::mutex> alone(running_);
    for (; size_ < threads - 1; size_++) std::thread([this, n = size_ + 1] { serve(n); }).detach();
    work_ = &work;
    left_.store(threads - 1, std::memory_order_relaxed);
    {
      std::lock_guard<std::mutex> lock(sleeping_);
      // One word, so that nobody sees the number of another run.
      call_.store(((call_.load() >> 16) + 1) << 16 | threads, std::memory_order_release);
    }
    awake_.notify_all();
    work(0, threads);
    spin_until([&] { return left_.load(std::memory_order_acquire) == 0; });
  }

 private:
  void serve(int thread) {
    for (int64_t seen = 0;;) {
      auto called = [&] { return call_.load(std::memory_order_acquire) != seen; };
      if (!spin_until(called, std::chrono::microseconds(500))) {
        std::unique_lock<std::mutex> lock(sleeping_);
        awake_.wait(lock, called);
      }
      seen = call_.load(std::memory_order_acquire);
      const int threads = seen & 0xffff;
      if (thread >= threads) continue;
      (*work_)(thread, threads);
      left_.fetch_sub(1, std::memory_order_release);
    }
  }

  std::mutex running_, sleeping_;
  std::condition_variable awake_;
  const std::function<void(int, int)>* work_ = nullptr;
  alignas(64) std::atomic<int64_t> call_{0};
  alignas(64) std::atomic<int> left_{0};
  int size_ = 0;
};

struct ThreadTeam {  // one of some threads
  int thread, threads;
  Barrier& barrier;
  int64_t arrivals = 0;
  int phase = 0;  // the next one whose items are dealt out

  void wait() {
    if (threads > 1) barrier.wait(arrivals, threads);
  }
};

// Memory that stays, so that no step waits for fresh pages. `which`: one of two blocks.
inline char* memory(int which, int64_t bytes) {
  struct Block {
    std::unique_ptr<char, decltype(&free)> start{nullptr, free};
    int64_t bytes = 0;
  };
  static thread_local Block blocks[2];
  Block& block = blocks[which];
  if (block.bytes < bytes) {
    bytes = (bytes + (2 << 20) - 1) >> 21 << 21;
    block.start.reset();
    block.start.reset(static_cast<char*>(aligned_alloc(2 << 20, bytes)));
    block.bytes = bytes;
  }
  return block.start.get();
}
