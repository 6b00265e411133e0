// Memory that a ring has registered with the kernel, so that a transfer need not pin its pages.
#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace overspill {

// The user's side of the kernel's table of registered buffers. Any thread adds and drops; the
// ring's own thread carries the changes to the kernel, and looks regions up.
class Regions {
 public:
  // What to put at `index` of the kernel's table; no bytes: nothing any more.
  struct Change {
    unsigned index;
    std::uint64_t address, nbytes;
  };

  explicit Regions(unsigned slots) : slots_(slots) {}

  // Wishes for a region, in pieces of at most 1 GiB, which is the most that the kernel takes.
  // Where no slot is free, the rest goes unregistered.
  void add(std::uint64_t address, std::uint64_t nbytes);
  // From its return on, the region is not found any more, whatever is mapped there next.
  void drop(std::uint64_t address, std::uint64_t nbytes);

  bool changed() const { return changed_; }
  std::vector<Change> take_changes();
  // How the kernel took a change.
  void settle(const Change& change, bool accepted);
  // The index of the region that holds these bytes as a whole; -1 if none does.
  int find(std::uint64_t address, std::uint64_t nbytes) const;
  std::uint64_t ready_bytes() const;

 private:
  enum class State : std::uint8_t { kFree, kAdding, kReady, kDropping };
  struct Slot {
    State state = State::kFree;
    std::uint64_t address = 0, nbytes = 0;
  };

  mutable std::mutex mutex_;
  std::vector<Slot> slots_;
  std::vector<Change> changes_;
  std::atomic<bool> changed_{false};
};

}  // namespace overspill
