// What is asked for (a request), and the pieces in which it meets the disk (its blocks).
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <vector>

namespace overspill {

enum class Op : std::uint8_t { kRead = 0, kWrite = 1 };

enum class Outcome : int {
  kDone = 0,
  kFailed = 1,     // the kernel refused; `error` is the errno
  kCorrupt = 2,    // the bytes read are not the bytes written
  kCancelled = 3,  // nothing was started
  kTruncated = 4,  // the file ended early
};

inline std::int64_t now_ns() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

struct Request;

// Memory of our own for a block, at a multiple of 4096; null where there is none to be had.
struct FreeMemory {
  void operator()(char* memory) const { std::free(memory); }
};
struct OwnMemory {
  std::unique_ptr<char, FreeMemory> memory;
  std::size_t nbytes = 0;
};

// One transfer between memory and one file. Offset, address and length are multiples of 4096.
struct Block {
  Request* request = nullptr;
  std::uint64_t offset = 0;
  char* address = nullptr;
  std::uint32_t* checksum = nullptr;  // stored on write, compared on read; null: neither
  std::uint32_t nbytes = 0;
  std::uint32_t moved = 0;  // how much has been moved; the rest is still to do
  std::uint32_t attempts = 0;
  Op op = Op::kRead;
  bool summed = false;
  bool changing = false;  // others may write to its memory: a copy is what goes to disk
  bool copied = false;    // it is one of the lane's copies, or is about to be
  OwnMemory own;
  std::uint64_t number = 0;     // in the order in which the lane got them
  std::int64_t due_ns = 0;      // not to be tried again before
  std::int64_t started_ns = 0;  // when it was last given to the submitter

  std::uint32_t left() const { return nbytes - moved; }
  char* next_address() const { return address + moved; }
  std::uint64_t next_offset() const { return offset + moved; }
};

// How a request went; the first failure of its blocks is kept.
struct Result {
  std::uint64_t id = 0;
  Outcome outcome = Outcome::kDone;
  int error = 0;
  std::uint32_t lane = 0;
  std::uint64_t offset = 0;
  std::uint64_t nbytes = 0;
  std::uint32_t expected = 0, found = 0;
  std::int64_t started_ns = 0, finished_ns = 0;
};

struct Request {
  enum State : int { kQueued, kStarted, kCancelled };

  std::uint64_t id = 0;
  bool urgent = false;
  std::vector<std::vector<Block>> blocks;  // by lane; never resized once queued
  std::atomic<std::uint32_t> remaining{0};
  std::atomic<int> state{kQueued};
  std::atomic<bool> failed{false};
  std::atomic<std::int64_t> started_ns{0};
  std::mutex mutex;  // guards `result`
  Result result;
};

}  // namespace overspill
