// The device's memory: addresses that the host cannot touch, and a caching allocator over them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <unordered_map>
#include <utility>
#include <vector>

namespace testdev {

struct Stats {
  int64_t allocated = 0, allocated_peak = 0;  // bytes that live tensors hold, in whole grains
  int64_t requested = 0, requested_peak = 0;  // bytes they asked for
  int64_t allocations = 0, frees = 0, failures = 0;
  int64_t reserved = 0;  // and those that streams have freed and keep
};

// Blocks are freed to the stream that allocated them, and reused at once in that stream's order.
// One lock, the device's, guards all of it.
class Memory {
 public:
  static constexpr size_t kGrain = 512;

  Memory();
  bool contains(const void* address) const;
  // Where a worker thread sees what the device has at `address`.
  char* worker(const void* address) const;

  struct Block {
    uintptr_t start;
    size_t nbytes, requested;
    int stream;
    std::set<int> used_by;  // other streams, told by record_stream
  };
  // Null if `budget` would be passed, or no addresses are left; `fresh`: it was never used.
  void* allocate(size_t nbytes, int stream, bool& fresh);
  // Takes a block from its tensor; `give` lets others have it.
  Block take(void* address);
  void give(const Block& block);
  void used_by(const void* address, int stream);
  // With the device idle: free blocks of all streams become one.
  std::vector<std::pair<uintptr_t, uintptr_t>> merge();

  size_t budget;
  uint64_t fail_in = 0;  // the allocation that fails, counted from 1; 0: none
  Stats stats;

 private:
  size_t limit_;
  char* device_;
  char* worker_;
  size_t next_ = 0;  // what lies above was never used
  std::unordered_map<uintptr_t, Block> live_;
  std::map<int, std::multimap<size_t, uintptr_t>> free_;  // of each stream, by size
  std::map<uintptr_t, size_t> anyones_;                   // of no stream, by address
};

}  // namespace testdev
