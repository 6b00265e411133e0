#include "queue.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <pthread.h>

#include <chrono>
#include <exception>

namespace testdev {
namespace {

uint64_t mixed(uint64_t x) {  // splitmix64
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace

int64_t now_ns() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

double Pace::rate(Link link) const {
  if (link == Link::None) return 0;
  return link == Link::In ? in_bytes_s : out_bytes_s;
}

void Pace::delay(int stream, uint64_t at) const {
  const uint64_t draw = mixed(seed + static_cast<uint64_t>(stream) * 0x1000003 + at);
  if (static_cast<int>(draw % 100) < delayed_percent)
    std::this_thread::sleep_for(std::chrono::microseconds((draw >> 32) % (delay_us + 1)));
}

void Queue::open(int stream, const Pace* pace, Failed failed) {
  stream_ = stream;
  pace_ = pace;
  failed_ = std::move(failed);
}

void Queue::push(Task task) {
  std::lock_guard<std::mutex> held(lock_);
  if (!thread_.joinable()) thread_ = std::thread(&Queue::work, this);
  tasks_.push_back(std::move(task));
  wake_.notify_one();
}

void Queue::wait(uint64_t at) {
  std::unique_lock<std::mutex> held(lock_);
  passed_.wait(held, [&] { return over(at) || stopping_; });
}

void Queue::stop() {
  {
    std::lock_guard<std::mutex> held(lock_);
    stopping_ = true;
    wake_.notify_one();
    passed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void Queue::work() {
  pthread_setname_np(pthread_self(), "test device");
  // The caller's no_grad and inference mode end at his thread; he has counted versions already.
  at::AutoDispatchBelowADInplaceOrView below;
  while (true) {
    Task task;
    {
      std::unique_lock<std::mutex> held(lock_);
      wake_.wait(held, [&] { return stopping_ || !tasks_.empty(); });
      if (stopping_) return;
      task = std::move(tasks_.front());
      tasks_.pop_front();
    }
    run(task);
    std::lock_guard<std::mutex> held(lock_);
    done_.store(task.at, std::memory_order_release);
    passed_.notify_all();
  }
}

void Queue::run(Task& task) {
  pace_->delay(stream_, task.at);
  const int64_t began = now_ns();
  try {
    if (task.run) task.run();
  } catch (const std::exception& error) {
    failed_(error.what());
  }
  task.run = nullptr;  // what it held is gone before it counts as done
  const double rate = pace_->rate(task.link);
  if (rate <= 0) return;
  const auto takes = static_cast<int64_t>(static_cast<double>(task.link_bytes) / rate * 1e9);
  const int64_t rest = began + takes - now_ns();
  if (rest > 0) std::this_thread::sleep_for(std::chrono::nanoseconds(rest));
}

}  // namespace testdev
