// The test device: streams that run by themselves on threads of their own, events, and the host
// memory that it may reach.
#pragma once

#include <map>

#include "memory.h"
#include "queue.h"

namespace testdev {

struct Counters {
  std::atomic<int64_t> tasks{0}, learned{0};
  std::atomic<int64_t> pageable_in{0}, pageable_out{0}, pageable_bytes{0};
  std::atomic<int64_t> host_waits{0};  // by synchronise, item and blocking copies
};

struct Settings {
  Pace pace;
  std::atomic<bool> races{true};
  std::atomic<int64_t> lockable{INT64_MAX};  // bytes of host memory that may be registered
};

class Device {
 public:
  static Device& get();

  // -- work
  // Gives `stream` a task, and says its number.  The calling thread's knowledge of what is over
  // comes before it.
  uint64_t submit(int stream, const char* name, const std::vector<Access>& accesses,
                  std::function<void()> run, Link link = Link::None, int64_t link_bytes = 0);
  // As `submit`, and waits; what `run` raises is raised here.  It teaches the clocks nothing.
  void run_now(int stream, const char* name, const std::vector<Access>& accesses,
               const std::function<void()>& run);
  PointPtr record(int stream);
  void block(int stream, const PointPtr& point);
  // Those that the calling thread learns from.
  bool query(const Point& point);
  bool query_stream(int stream);
  void synchronize(const Point& point);
  void synchronize_stream(int stream);
  void synchronize_all();
  void wait_idle();  // without learning from it
  int new_stream();

  // -- memory
  void* allocate(size_t nbytes);
  void free(void* address);
  void used_by(const void* address, int stream);
  void empty_cache();
  template <typename F>
  auto with_memory(F f) {
    std::lock_guard<std::mutex> held(lock_);
    return f(memory_);
  }
  bool contains(const void* address) const { return memory_.contains(address); }
  char* worker(const void* address) const { return memory_.worker(address); }

  // -- host memory
  void lock_host(uintptr_t start, size_t nbytes);
  void unlock_host(uintptr_t start);
  bool is_locked(uintptr_t start, size_t nbytes);
  int64_t locked_bytes();

  // -- errors and ends
  void break_down(const std::string& why);  // from now on every call raises, as after a bad kernel
  void check();
  std::vector<std::string> take_races();
  void stop();

  Counters counters;
  Settings settings;

 private:
  Device();
  std::shared_ptr<Clock> knowledge();
  void learn(const Clock& clock);
  void come_after(Queue& queue);
  PointPtr tail(int stream);
  uint64_t follow(Queue& queue, int stream, const char* name, const std::vector<Access>& accesses,
                  std::vector<Race>& races);
  void give_back();
  void release(const Memory::Block& block, std::vector<Race>& races);
  void tell(const std::vector<Race>& races);

  std::mutex lock_;  // of clocks, shadow, memory and what is given to queues
  Memory memory_;
  Shadow shadow_;
  Clock over_for_all_{};
  std::array<bool, kStreams>
      copies_{};  // of each stream, whether a thread of the engine copies on it
  std::array<Queue, kStreams> queues_;
  std::vector<std::pair<Memory::Block, std::vector<PointPtr>>> waiting_;  // freed, still in use
  std::atomic<int> streams_{0};
  std::atomic<bool> stopped_{false};

  std::mutex host_lock_;
  std::map<uintptr_t, size_t> locked_;
  int64_t locked_bytes_ = 0;

  std::mutex error_lock_;
  std::string error_;
  std::atomic<bool> broken_{false};
  std::vector<std::string> races_;
};

// The stream of the calling thread.
int current_stream();
int exchange_stream(int stream);

}  // namespace testdev
