// Streams: queues that threads of their own work off, and points in them.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>

#include "clocks.h"

namespace testdev {

// A point in the work of a stream: over once the stream has done task number `at`.
struct Point {
  int stream = 0;
  uint64_t at = 0;
  Clock clock{};
  std::atomic<int64_t> when_ns{0};  // when the stream passed it
};
using PointPtr = std::shared_ptr<Point>;

enum class Link { None, In, Out };  // whose rate a task keeps to

struct Task {
  std::function<void()> run;
  uint64_t at = 0;
  int64_t link_bytes = 0;
  Link link = Link::None;
};

// How fast streams run; may be changed while they do.
struct Pace {
  std::atomic<uint64_t> seed{0};
  std::atomic<int> delayed_percent{0}, delay_us{0};   // so many tasks wait, for up to so long
  std::atomic<double> in_bytes_s{0}, out_bytes_s{0};  // 0: as fast as it goes

  double rate(Link link) const;
  void delay(int stream, uint64_t at) const;  // by a draw that stream and task number decide
};

// One stream: a queue, and the thread that works it off in order.
class Queue {
 public:
  using Failed = std::function<void(const std::string& why)>;

  void open(int stream, const Pace* pace, Failed failed);
  void push(Task task);
  bool over(uint64_t at) const { return done_.load(std::memory_order_acquire) >= at; }
  void wait(uint64_t at);
  void stop();

  Clock clock{};  // guarded by the device's lock
  uint64_t given = 0;

 private:
  void work();
  void run(Task& task);
  int stream_ = 0;
  const Pace* pace_ = nullptr;
  Failed failed_;
  std::thread thread_;
  std::mutex lock_;
  std::condition_variable wake_, passed_;
  std::deque<Task> tasks_;
  std::atomic<uint64_t> done_{0};
  bool stopping_ = false;
};

int64_t now_ns();

}  // namespace testdev
