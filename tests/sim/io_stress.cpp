// The C++ core alone, under load from several threads, for the sanitizers: no Python in between.
// Usage: io_stress DIRECTORY SECONDS SEED
#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "core.h"
#include "faulty.h"

namespace {

using namespace overspill;

constexpr std::uint32_t kBlock = 8192;
constexpr std::size_t kMost = 6 * kBlock;
constexpr int kExtents = 16;  // per client, in turn on the two lanes
constexpr int kClients = 3;

struct Slot {
  char* memory = nullptr;
  std::vector<std::uint32_t> sums = std::vector<std::uint32_t>(kMost / kBlock);
  std::uint64_t request = 0;  // in flight; 0: none
  bool writing = false, whole = false;
  unsigned char value = 0, next_value = 0;
};

[[noreturn]] void die(const std::string& why) {
  std::fprintf(stderr, "io_stress: %s\n", why.c_str());
  std::exit(1);
}

class Client {
 public:
  Client(Core& core, int number, std::uint64_t seed)
      : core_(core), number_(number), rng_(seed * 31 + static_cast<std::uint64_t>(number)) {
    memory_ = static_cast<char*>(std::aligned_alloc(4096, kExtents * kMost));
    for (int k = 0; k < kExtents; ++k) slots_[k].memory = memory_ + k * kMost;
    core_.add_memory(reinterpret_cast<std::uint64_t>(memory_), kExtents * kMost);
  }
  ~Client() { std::free(memory_); }

  void act() {
    const int k = static_cast<int>(rng_() % kExtents);
    const std::lock_guard lock(mutex_);
    Slot& slot = slots_[k];
    if (rng_() % 1024 == 0) {
      core_.drop_memory(reinterpret_cast<std::uint64_t>(memory_), kExtents * kMost);
      core_.add_memory(reinterpret_cast<std::uint64_t>(memory_), kExtents * kMost);
    }
    if (slot.request != 0) {
      if (rng_() % 64 == 0) core_.cancel(slot.request);
      if (rng_() % 16 == 0) core_.promote(slot.request);
      return;
    }
    slot.writing = !slot.whole || rng_() % 2 == 0;
    if (slot.writing) slot.next_value = static_cast<unsigned char>(rng_());
    std::memset(slot.memory, slot.writing ? slot.next_value : 0xA5, kMost);
    slot.request = (++count_ * kClients + static_cast<std::uint64_t>(number_)) * kExtents +
                   static_cast<std::uint64_t>(k);
    const std::uint64_t offset = (static_cast<std::uint64_t>(number_) * kExtents + k) * kMost;
    core_.submit(
        slot.request, slot.writing ? Op::kWrite : Op::kRead, rng_() % 4 == 0,
        {{static_cast<std::uint32_t>(k % 2), offset, reinterpret_cast<std::uint64_t>(slot.memory),
          kMost, reinterpret_cast<std::uint64_t>(slot.sums.data()), rng_() % 2 == 0}});
  }

  void ended(const Result& result) {
    const std::lock_guard lock(mutex_);
    Slot& slot = slots_[result.id % kExtents];
    if (slot.request != result.id) die("a request ended twice");
    slot.request = 0;
    if (slot.writing && result.outcome != Outcome::kCancelled) {
      slot.whole = result.outcome == Outcome::kDone;
      slot.value = slot.next_value;
    }
    if (slot.writing || result.outcome != Outcome::kDone) return;
    for (std::size_t k = 0; k < kMost; ++k) {
      if (static_cast<unsigned char>(slot.memory[k]) != slot.value) die("wrong bytes, no error");
    }
    ++right;
  }

  bool idle() {
    const std::lock_guard lock(mutex_);
    for (const Slot& slot : slots_) {
      if (slot.request != 0) return false;
    }
    return true;
  }

  std::uint64_t right = 0;

 private:
  Core& core_;
  const int number_;
  std::mt19937_64 rng_;
  std::mutex mutex_;
  char* memory_ = nullptr;
  std::uint64_t count_ = 0;
  Slot slots_[kExtents];
};

int open_file(const std::string& path) {
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  if (fd < 0 || ftruncate(fd, kClients * kExtents * kMost) != 0) die("cannot make " + path);
  unlink(path.c_str());
  return fd;
}

std::uint64_t stress(const std::string& directory, const std::string& backend, double seconds,
                     std::uint64_t seed) {
  const std::vector<int> fds = {open_file(directory + "/a"), open_file(directory + "/b")};
  Faults faults;
  faults.seed = seed;
  faults.short_transfer = faults.again = faults.bit_flip = faults.lost_write = 0.05;
  faults.io_error = faults.misdirected = 0.02;
  faults.delay = 0.2;
  std::uint64_t right = 0;
  {
    const SubmitterMaker wrong = [faults](std::shared_ptr<Lane> lane, std::uint32_t depth) {
      return make_faulty(std::move(lane), depth, faults);
    };
    Core core(fds, backend == "faulty" ? wrong : submitter_maker(backend), kBlock, 4);
    std::vector<std::unique_ptr<Client>> clients;
    for (int k = 0; k < kClients; ++k) clients.push_back(std::make_unique<Client>(core, k, seed));
    std::atomic<bool> stop{false};
    std::vector<std::thread> threads;
    for (auto& client : clients) {
      threads.emplace_back([&stop, mine = client.get()] {
        while (!stop) {
          mine->act();
          std::this_thread::yield();
        }
      });
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    const auto collect = [&] {
      for (const Result& result : core.collect(0.01)) {
        clients[result.id / kExtents % kClients]->ended(result);
      }
    };
    while (std::chrono::steady_clock::now() < deadline) {
      collect();
      core.stats();
    }
    stop = true;
    for (std::thread& thread : threads) thread.join();
    for (auto& client : clients) {
      while (!client->idle()) collect();
      right += client->right;
    }
    if (!core.close(10)) die("threads are stuck");
  }
  for (const int fd : fds) close(fd);
  return right;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) die("usage: io_stress DIRECTORY SECONDS SEED");
  for (const char* backend : {"threads", "faulty", "uring"}) {
    if (std::string(backend) == "uring" && !uring_refusal().empty()) {
      std::printf("uring: not here (%s)\n", uring_refusal().c_str());
      continue;
    }
    const std::uint64_t right =
        stress(argv[1], backend, std::atof(argv[2]), std::strtoull(argv[3], nullptr, 10));
    std::printf("%s: %llu reads right\n", backend, static_cast<unsigned long long>(right));
    if (right == 0) die("nothing was read");
  }
  return 0;
}
