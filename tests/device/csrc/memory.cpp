#include "memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <stdexcept>

namespace testdev {

constexpr size_t kLarge = size_t{1} << 20;       // smaller ones do not cut up larger ones
constexpr size_t kAddresses = size_t{16} << 30;  // pages come as they are touched

Memory::Memory() : budget(size_t{4} << 30), limit_(kAddresses) {
  int file = memfd_create("test device", MFD_CLOEXEC);
  if (file < 0 || ftruncate(file, static_cast<off_t>(limit_)) != 0)
    throw std::runtime_error("no memory for the test device");
  // One memory, seen twice.  What tensors hold is an address that faults when the host uses it.
  void* hidden = mmap(nullptr, limit_, PROT_NONE, MAP_SHARED | MAP_NORESERVE, file, 0);
  void* seen = mmap(nullptr, limit_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
  close(file);
  if (hidden == MAP_FAILED || seen == MAP_FAILED)
    throw std::runtime_error("no addresses for the test device");
  device_ = static_cast<char*>(hidden);
  worker_ = static_cast<char*>(seen);
}

bool Memory::contains(const void* address) const {
  return address >= device_ && address < device_ + limit_;
}

char* Memory::worker(const void* address) const {
  return worker_ + (static_cast<const char*>(address) - device_);
}

void* Memory::allocate(size_t requested, int stream, bool& fresh) {
  const size_t nbytes = (requested + kGrain - 1) / kGrain * kGrain;
  if (stats.allocated + nbytes > budget) return nullptr;
  uintptr_t start = 0;
  fresh = false;
  auto& own = free_[stream];
  auto found = own.lower_bound(nbytes);
  if (found != own.end() && nbytes < kLarge && found->first > 2 * nbytes) found = own.end();
  if (found != own.end()) {
    start = found->second;
    const size_t rest = found->first - nbytes;
    own.erase(found);
    if (rest != 0) own.emplace(rest, start + nbytes);
  }
  if (start == 0) stats.reserved += static_cast<int64_t>(nbytes);
  for (auto it = anyones_.begin(); start == 0 && it != anyones_.end(); ++it) {
    if (it->second < nbytes) continue;
    start = it->first;
    const size_t rest = it->second - nbytes;
    anyones_.erase(it);
    if (rest != 0) anyones_.emplace(start + nbytes, rest);
    break;
  }
  if (start == 0) {
    if (next_ + nbytes > limit_) {
      stats.reserved -= static_cast<int64_t>(nbytes);
      return nullptr;
    }
    start = reinterpret_cast<uintptr_t>(device_) + next_;
    next_ += nbytes;
    fresh = true;
  }
  live_[start] = {start, nbytes, requested, stream, {}};
  stats.allocated += nbytes;
  stats.requested += requested;
  stats.allocated_peak = std::max(stats.allocated_peak, stats.allocated);
  stats.requested_peak = std::max(stats.requested_peak, stats.requested);
  ++stats.allocations;
  return reinterpret_cast<void*>(start);
}

Memory::Block Memory::take(void* address) {
  auto node = live_.extract(reinterpret_cast<uintptr_t>(address));
  if (node.empty()) throw std::runtime_error("the test device does not know this block");
  const Block& block = node.mapped();
  stats.requested -= block.requested;
  ++stats.frees;
  return block;
}

void Memory::give(const Block& block) {
  stats.allocated -= block.nbytes;
  free_[block.stream].emplace(block.nbytes, block.start);
}

void Memory::used_by(const void* address, int stream) {
  auto found = live_.find(reinterpret_cast<uintptr_t>(address));
  if (found != live_.end() && found->second.stream != stream) found->second.used_by.insert(stream);
}

std::vector<std::pair<uintptr_t, uintptr_t>> Memory::merge() {
  for (auto& [stream, blocks] : free_) {
    for (auto& [nbytes, start] : blocks) anyones_.emplace(start, nbytes);
    blocks.clear();
  }
  stats.reserved = stats.allocated;
  std::vector<std::pair<uintptr_t, uintptr_t>> freed;
  for (auto it = anyones_.begin(); it != anyones_.end(); ++it) {
    for (auto next = std::next(it); next != anyones_.end() && next->first == it->first + it->second;
         next = anyones_.erase(next))
      it->second += next->second;
    freed.emplace_back(it->first, it->first + it->second);
  }
  return freed;
}

}  // namespace testdev
