// One file's queues and the one place where results are judged: short transfers are resumed,
// interruptions retried, checksums taken and compared. Submitters below only move bytes.
#pragma once

#include <array>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

#include "request.h"

namespace overspill {

// How many transfers took how long: four steps to an octave of nanoseconds.
using Latencies = std::array<std::uint64_t, 160>;
constexpr int kLatencySteps = 4;

struct LaneStats {
  std::uint64_t bytes[2] = {0, 0};   // moved, by Op, failed and repeated transfers included
  std::uint64_t blocks[2] = {0, 0};  // finished well, by Op
  std::uint64_t retries = 0;         // transfers repeated or resumed
  std::int64_t busy_ns = 0;          // time with at least one transfer in flight
  std::uint32_t in_flight = 0;
  std::uint32_t queued = 0;
};

class Lane {
 public:
  // `finished` is called once a request's last block has ended, outside all locks.
  Lane(std::uint32_t index, int fd, std::function<void(Request*)> finished)
      : index_(index), fd_(fd), finished_(std::move(finished)) {}

  int fd() const { return fd_; }

  // -- for the core --
  void push(std::vector<Block>& blocks);
  // Takes a cancelled request's blocks back out; how many they were.
  std::uint32_t withdraw(const Request* request);
  void promote(const Request* request);
  // No more blocks will come: `take` says so once the queues are empty.
  void stop();
  LaneStats stats() const;
  Latencies latencies() const;

  // -- for the submitter --
  // Up to `room` blocks to start now. Without any: waits for one if `wait`, until stopped.
  std::size_t take(Block** out, std::size_t room, bool wait);
  // What the kernel said: bytes moved or -errno. The block is the lane's again.
  void finish(Block* block, std::int64_t result);
  bool drained() const;
  // Nanoseconds until a repeated block is due; -1 without one.
  std::int64_t next_due_ns() const;
  // Called on every push and on stop; for submitters that do not sleep in `take`.
  void set_waker(std::function<void()> waker);

 private:
  using Queue = std::deque<Block*>;

  Queue& queue_of(const Block* block);
  void requeue_due(std::int64_t now);
  // The queue whose first block is next of its kind and may start; null without one.
  Queue* next_of(int urgent, int op);
  Block* pick();
  // Puts a copy in the place of memory that others may write to; false without memory for it.
  bool copy(Block* block);
  void resume(Block* block, bool at_once);
  void fail(Block* block, Outcome outcome, int error, std::uint32_t expected, std::uint32_t found);
  void end(Block* block);

  const std::uint32_t index_;
  const int fd_;
  const std::function<void(Request*)> finished_;
  std::function<void()> waker_;

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable wake_;
  // [urgent][read, write, write that needs a copy]; urgent ones first, reads and writes in turn.
  Queue queues_[2][3];
  std::uint64_t next_number_ = 0;
  std::vector<Block*> delayed_;
  std::uint32_t copies_ = 0;      // of memory that others may write to, taken or about to be
  std::vector<OwnMemory> spare_;  // that no copy is in
  bool write_next_ = false;
  bool stopped_ = false;
  std::int64_t busy_since_ns_ = 0;
  LaneStats stats_;
  Latencies latencies_{};
};

}  // namespace overspill
