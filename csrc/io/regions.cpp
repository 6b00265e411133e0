#include "regions.h"

#include <algorithm>
#include <utility>

namespace overspill {
namespace {

constexpr std::uint64_t kMostBytes = 1ULL << 30;

}  // namespace

void Regions::add(std::uint64_t address, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  for (std::uint64_t at = 0; at < nbytes; at += kMostBytes) {
    const auto slot = std::find_if(slots_.begin(), slots_.end(),
                                   [](const Slot& s) { return s.state == State::kFree; });
    if (slot == slots_.end()) return;
    *slot = {State::kAdding, address + at, std::min(kMostBytes, nbytes - at)};
    changes_.push_back({static_cast<unsigned>(slot - slots_.begin()), slot->address, slot->nbytes});
    changed_ = true;
  }
}

void Regions::drop(std::uint64_t address, std::uint64_t nbytes) {
  const std::lock_guard lock(mutex_);
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    Slot& slot = slots_[index];
    const bool mine = slot.address >= address && slot.address - address < nbytes;
    if (!mine || (slot.state != State::kAdding && slot.state != State::kReady)) continue;
    slot.state = State::kDropping;
    changes_.push_back({static_cast<unsigned>(index), 0, 0});
    changed_ = true;
  }
}

std::vector<Regions::Change> Regions::take_changes() {
  const std::lock_guard lock(mutex_);
  changed_ = false;
  return std::exchange(changes_, {});
}

void Regions::settle(const Change& change, bool accepted) {
  const std::lock_guard lock(mutex_);
  Slot& slot = slots_[change.index];
  if (change.nbytes == 0) {
    slot = {};
  } else if (slot.state == State::kAdding) {
    // Refused for want of lockable memory: its transfers pin their pages themselves.
    if (accepted) {
      slot.state = State::kReady;
    } else {
      slot = {};
    }
  }
}

int Regions::find(std::uint64_t address, std::uint64_t nbytes) const {
  const std::lock_guard lock(mutex_);
  for (std::size_t index = 0; index < slots_.size(); ++index) {
    const Slot& slot = slots_[index];
    if (slot.state == State::kReady && address >= slot.address &&
        address + nbytes <= slot.address + slot.nbytes) {
      return static_cast<int>(index);
    }
  }
  return -1;
}

std::uint64_t Regions::ready_bytes() const {
  const std::lock_guard lock(mutex_);
  std::uint64_t sum = 0;
  for (const Slot& slot : slots_) sum += slot.state == State::kReady ? slot.nbytes : 0;
  return sum;
}

}  // namespace overspill
