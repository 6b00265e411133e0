// A disk that makes mistakes, by a seed.
#pragma once

#include <cstdint>
#include <memory>

#include "submitter.h"

namespace overspill {

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

// pread and pwrite with faults, on one thread, in an order the seed decides among `depth` blocks.
std::unique_ptr<Submitter> make_faulty(std::shared_ptr<Lane> lane, std::uint32_t depth,
                                       const Faults& faults);

}  // namespace overspill
