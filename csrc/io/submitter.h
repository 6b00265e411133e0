// What moves bytes for one lane. A submitter pulls blocks and hands back the kernel's plain
// answers; it judges nothing.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "lane.h"

namespace overspill {

class Submitter {
 public:
  virtual ~Submitter() = default;
  // Starts its threads. They hold the lane and end by themselves once it is stopped and drained.
  virtual void start() = 0;
  // Whether all threads have ended within `timeout_s`; then they are joined. Otherwise they are
  // stuck in the kernel, and must be left to it.
  virtual bool join(double timeout_s) = 0;
  // Memory that many transfers will use, until `drop_memory` returns. A hint; from any thread.
  virtual void add_memory(std::uint64_t, std::uint64_t) {}
  virtual void drop_memory(std::uint64_t, std::uint64_t) {}
  // How much of it spares transfers the pinning of pages.
  virtual std::uint64_t registered_bytes() const { return 0; }
};

// pread and pwrite on `threads` threads.
std::unique_ptr<Submitter> make_threads(std::shared_ptr<Lane> lane, std::uint32_t threads);

// One io_uring of `depth` entries and one thread. Throws std::system_error if the kernel refuses.
std::unique_ptr<Submitter> make_uring(std::shared_ptr<Lane> lane, std::uint32_t depth);
// Why io_uring cannot be used here; empty if it can.
std::string uring_refusal();

// A lane's submitter, of so many transfers at once.
using SubmitterMaker =
    std::function<std::unique_ptr<Submitter>(std::shared_ptr<Lane>, std::uint32_t depth)>;
// That of a backend: "uring" or "threads". Throws std::invalid_argument for another.
SubmitterMaker submitter_maker(const std::string& backend);

}  // namespace overspill
