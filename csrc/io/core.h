// The data plane of one engine: requests in, results out, everything between without Python.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "lane.h"
#include "request.h"
#include "submitter.h"

namespace overspill {

// A run of one file that a request moves: to or from `address`. `checksums`: the address of one
// uint32 per block, or 0. `changing`: others may write to the memory meanwhile.
struct Segment {
  std::uint32_t lane;
  std::uint64_t offset, address, nbytes, checksums;
  bool changing = false;
};

// Where results wait to be collected. Shared with the lanes, which may outlive the core.
class Results {
 public:
  void put(const Result& result);
  // All that are there; waits up to `timeout_s` for the first.
  std::vector<Result> collect(double timeout_s);
  // Ends the current wait, or the next one.
  void wake();

 private:
  std::mutex mutex_;
  std::condition_variable ready_;
  std::deque<Result> results_;
  bool woken_ = false;
};

class Core {
 public:
  // One lane per descriptor, each with a submitter of its own.
  Core(const std::vector<int>& fds, const SubmitterMaker& make, std::uint32_t block_bytes,
       std::uint32_t depth);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  // Throws std::invalid_argument unless offsets, addresses and lengths are multiples of 4096.
  void submit(std::uint64_t id, Op op, bool urgent, const std::vector<Segment>& segments);
  // True if nothing of it had been started; its result then says kCancelled.
  bool cancel(std::uint64_t id);
  // Moves what has not started ahead of everything that is not urgent.
  void promote(std::uint64_t id);
  std::vector<Result> collect(double timeout_s) { return state_->results.collect(timeout_s); }
  void wake() { state_->results.wake(); }
  // Memory that many transfers will use: registered with the kernel where it allows that. It is not
  // used as such any more once `drop_memory` has returned, and must not be unmapped before.
  void add_memory(std::uint64_t address, std::uint64_t nbytes);
  void drop_memory(std::uint64_t address, std::uint64_t nbytes);
  // The sum over all lanes.
  std::uint64_t registered_bytes() const;
  std::vector<LaneStats> stats() const;
  // How long transfers took, all lanes together.
  Latencies latencies() const;
  // Lets what is queued end, and joins the threads. False if some were still stuck in the kernel
  // after `timeout_s` without any progress; they are then left behind.
  bool close(double timeout_s);

 private:
  struct State {
    std::mutex mutex;  // guards `requests`
    std::unordered_map<std::uint64_t, std::unique_ptr<Request>> requests;
    Results results;

    void finished(Request* request);
  };

  const std::uint32_t block_bytes_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  std::vector<std::shared_ptr<Lane>> lanes_;
  mutable std::mutex submitters_mutex_;  // guards them against close
  std::vector<std::unique_ptr<Submitter>> submitters_;
  bool closed_ = false;
};

}  // namespace overspill
