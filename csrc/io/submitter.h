// What moves bytes for one lane. A submitter pulls blocks and hands back the kernel's plain
// answers; it judges nothing.
#pragma once

#include <cstdint>
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

// How often the faulty submitter does what; probabilities per transfer, decided by the seed, the
// place and the attempt alone, so that a seed gives the same faults under any timing.
struct Faults {
  std::uint64_t seed = 0;
  double delay = 0;  // up to `longest_delay_us` before a transfer starts
  double short_transfer = 0;
  double again = 0;        // EAGAIN or EINTR, nothing moved
  double io_error = 0;     // EIO, part of it moved
  double no_space = 0;     // ENOSPC on a write, nothing moved
  double bit_flip = 0;     // a read returns one wrong bit; the file is whole
  double torn_write = 0;   // only a front part reaches the file, all is reported
  double lost_write = 0;   // nothing reaches the file, all is reported
  double misdirected = 0;  // the bytes land elsewhere in the file, all is reported
  std::uint32_t longest_delay_us = 200;
};

// pread and pwrite on `threads` threads.
std::unique_ptr<Submitter> make_threads(std::shared_ptr<Lane> lane, std::uint32_t threads);

// One io_uring of `depth` entries and one thread. Throws std::system_error if the kernel refuses.
std::unique_ptr<Submitter> make_uring(std::shared_ptr<Lane> lane, std::uint32_t depth);
// Why io_uring cannot be used here; empty if it can.
std::string uring_refusal();

// pread and pwrite with faults, on one thread, in an order the seed decides among `depth` blocks.
std::unique_ptr<Submitter> make_faulty(std::shared_ptr<Lane> lane, std::uint32_t depth,
                                       const Faults& faults);

}  // namespace overspill
