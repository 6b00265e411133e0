#include "pool.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace overspill {
namespace {

constexpr int kMostThreads = 256;
// Long enough to catch the next of a run of calls, short enough not to starve torch's own threads
// on a small machine.
constexpr std::chrono::microseconds kSpin{30};

inline void relax() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::this_thread::yield();
#endif
}

struct Work {
  TaskFn fn = nullptr;
  void* context = nullptr;
  std::size_t tasks = 0;
};

class Pool {
 public:
  explicit Pool(int threads) : threads_(threads) {}
  ~Pool() { stop(); }

  int threads() const { return threads_.load(std::memory_order_relaxed); }

  void resize(int threads) {
    const std::lock_guard<std::mutex> job(job_mutex_);
    stop();
    threads_.store(threads, std::memory_order_relaxed);
  }

  void run(const Work& work) {
    std::unique_lock<std::mutex> job(job_mutex_, std::try_to_lock);
    if (!job.owns_lock() || threads() == 1 || work.tasks < 2) {
      for (std::size_t task = 0; task < work.tasks; ++task) work.fn(work.context, task);
      return;
    }
    if (workers_.empty()) start();
    work_ = work;
    next_.store(0, std::memory_order_relaxed);
    running_.store(static_cast<int>(workers_.size()), std::memory_order_relaxed);
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    take_tasks();
    wait_until([this] { return running_.load(std::memory_order_acquire) == 0; }, done_);
  }

 private:
  void take_tasks() {
    const Work work = work_;
    for (;;) {
      const std::size_t task = next_.fetch_add(1, std::memory_order_relaxed);
      if (task >= work.tasks) return;
      work.fn(work.context, task);
    }
  }

  template <class Ready>
  void wait_until(Ready ready, std::condition_variable& signal) {
    const auto deadline = std::chrono::steady_clock::now() + kSpin;
    while (std::chrono::steady_clock::now() < deadline) {
      for (int i = 0; i < 16; ++i) {
        if (ready()) return;
        relax();
      }
    }
    std::unique_lock<std::mutex> lock(mutex_);
    signal.wait(lock, ready);
  }

  void work_loop(std::uint64_t seen) {
    for (;;) {
      wait_until(
          [this, seen] {
            return generation_.load(std::memory_order_acquire) != seen || stopping_.load();
          },
          wake_);
      if (stopping_.load()) return;
      ++seen;
      take_tasks();
      if (running_.fetch_sub(1, std::memory_order_acq_rel) == 1) {
        // Under the lock, or the caller could check, miss this and then sleep.
        const std::lock_guard<std::mutex> lock(mutex_);
        done_.notify_one();
      }
    }
  }

  void start() {
    stopping_.store(false);
    const std::uint64_t seen = generation_.load();
    for (int i = 1; i < threads(); ++i) {
      workers_.emplace_back([this, seen] { work_loop(seen); });
    }
  }

  void stop() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      stopping_.store(true);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

  std::mutex job_mutex_;  // held for the whole of a job
  std::mutex mutex_;      // pairs with the two conditions
  std::condition_variable wake_, done_;
  std::vector<std::thread> workers_;
  Work work_;  // written before generation_, read after it
  std::atomic<std::size_t> next_{0};
  std::atomic<int> running_{0};
  std::atomic<std::uint64_t> generation_{0};
  std::atomic<bool> stopping_{false};
  std::atomic<int> threads_;
};

// The process's one pool. A forked child has none of its parent's threads, and may find its locks
// held: it gets a new pool and leaves the old one alone.
std::atomic<Pool*> the_pool{nullptr};

void renew_in_child() {
  const Pool* const parents = the_pool.load();
  if (parents != nullptr) the_pool.store(new Pool(parents->threads()));
}

Pool& pool() {
  Pool* current = the_pool.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  static std::once_flag once;
  std::call_once(once, [] {
    pthread_atfork(nullptr, nullptr, &renew_in_child);
    the_pool.store(new Pool(1), std::memory_order_release);  // lives as long as the process
  });
  return *the_pool.load(std::memory_order_acquire);
}

}  // namespace

void set_pool_threads(int count) {
  if (count < 1 || count > kMostThreads) {
    throw std::invalid_argument("threads must be 1 to " + std::to_string(kMostThreads) + ", not " +
                                std::to_string(count));
  }
  pool().resize(count);
}

int pool_threads() { return pool().threads(); }

void run_tasks(std::size_t tasks, TaskFn fn, void* context) {
  pool().run(Work{fn, context, tasks});
}

}  // namespace overspill
