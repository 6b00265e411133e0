// A thread that can be waited for with a time limit, and left behind if it never ends.
#pragma once

#include <chrono>
#include <future>
#include <thread>
#include <utility>

namespace overspill {

class Worker {
 public:
  template <class Body>
  explicit Worker(Body body) {
    std::packaged_task<void()> task(std::move(body));
    ended_ = task.get_future();
    thread_ = std::thread(std::move(task));
  }
  Worker(Worker&&) = default;

  ~Worker() {
    if (thread_.joinable()) thread_.detach();
  }

  bool join(std::chrono::steady_clock::time_point deadline) {
    if (!thread_.joinable()) return true;
    if (ended_.wait_until(deadline) != std::future_status::ready) return false;
    thread_.join();
    return true;
  }

 private:
  std::future<void> ended_;
  std::thread thread_;
};

inline std::chrono::steady_clock::time_point deadline_in(double seconds) {
  return std::chrono::steady_clock::now() +
         std::chrono::duration_cast<std::chrono::steady_clock::duration>(
             std::chrono::duration<double>(seconds));
}

}  // namespace overspill
