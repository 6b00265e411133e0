// The simulated disk: the same files through pread and pwrite, with seeded mistakes. It stands
// where the real submitters stand, so that everything above it is the code that runs in earnest.
#include "faulty.h"

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>
#include <unordered_map>
#include <vector>

#include "worker.h"

namespace overspill {
namespace {

constexpr std::uint64_t kSector = 4096;

// Steele, Lea and Flood's splitmix64.
std::uint64_t mix(std::uint64_t value) {
  value += 0x9E3779B97F4A7C15;
  value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9;
  value = (value ^ (value >> 27)) * 0x94D049BB133111EB;
  return value ^ (value >> 31);
}

// The dice of one transfer: the n-th of its kind at its place.
class Dice {
 public:
  explicit Dice(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() { return state_ = mix(state_); }
  bool hit(double probability) { return static_cast<double>(next() >> 11) * 0x1p-53 < probability; }
  std::uint64_t below(std::uint64_t limit) { return next() % limit; }

 private:
  std::uint64_t state_;
};

class FaultyDisk {
 public:
  FaultyDisk(std::shared_ptr<Lane> lane, std::uint32_t depth, const Faults& faults)
      : lane_(std::move(lane)), depth_(depth), faults_(faults), order_(mix(faults.seed)) {}

  void run() {
    std::vector<Block*> waiting;
    for (;;) {
      const std::size_t held = waiting.size();
      waiting.resize(depth_);
      const std::size_t taken = lane_->take(waiting.data() + held, depth_ - held, held == 0);
      waiting.resize(held + taken);
      if (waiting.empty()) return;
      const std::size_t chosen = order_.below(waiting.size());
      Block* block = waiting[chosen];
      waiting[chosen] = waiting.back();
      waiting.pop_back();
      lane_->finish(block, transfer(*block));
    }
  }

 private:
  Dice dice_for(const Block& block) {
    const std::uint64_t place = mix(block.next_offset() * 2 + static_cast<std::uint64_t>(block.op));
    return Dice(mix(faults_.seed ^ place) + ++times_[place]);
  }

  std::int64_t transfer(const Block& block) {
    Dice dice = dice_for(block);
    if (dice.hit(faults_.delay)) {
      std::this_thread::sleep_for(
          std::chrono::microseconds(dice.below(faults_.longest_delay_us + 1)));
    }
    if (dice.hit(faults_.again)) return dice.hit(0.5) ? -EAGAIN : -EINTR;
    const bool broken = dice.hit(faults_.io_error);
    const bool shortened = dice.hit(faults_.short_transfer);
    std::uint64_t nbytes = block.left();
    // Any length, whole sectors or not: the layer above has to cope with both.
    if (broken || shortened) nbytes = dice.below(nbytes) + 1;
    const std::int64_t moved =
        block.op == Op::kRead ? read(block, nbytes, dice) : write(block, nbytes, dice);
    return broken ? -EIO : moved;
  }

  std::int64_t read(const Block& block, std::uint64_t nbytes, Dice& dice) {
    const std::int64_t moved =
        answer(pread(lane_->fd(), block.next_address(), nbytes, at(block.next_offset())));
    if (moved > 0 && dice.hit(faults_.bit_flip)) {
      const std::uint64_t bit = dice.below(static_cast<std::uint64_t>(moved) * 8);
      block.next_address()[bit / 8] ^= static_cast<char>(1 << (bit % 8));
    }
    return moved;
  }

  std::int64_t write(const Block& block, std::uint64_t nbytes, Dice& dice) {
    if (dice.hit(faults_.no_space)) return -ENOSPC;
    if (dice.hit(faults_.lost_write)) return static_cast<std::int64_t>(nbytes);
    std::uint64_t reaches = nbytes;
    if (dice.hit(faults_.torn_write)) reaches = dice.below(nbytes);
    std::uint64_t offset = block.next_offset();
    if (dice.hit(faults_.misdirected)) {
      struct stat file{};
      if (fstat(lane_->fd(), &file) != 0) return -static_cast<std::int64_t>(errno);
      const std::uint64_t sectors = static_cast<std::uint64_t>(file.st_size) / kSector;
      const std::uint64_t mine = (reaches + kSector - 1) / kSector;
      offset = dice.below(sectors - std::min(mine, sectors - 1)) * kSector;
    }
    if (reaches > 0) {
      const std::int64_t moved =
          answer(pwrite(lane_->fd(), block.next_address(), reaches, at(offset)));
      if (moved < 0) return moved;
    }
    return static_cast<std::int64_t>(nbytes);
  }

  static off_t at(std::uint64_t offset) { return static_cast<off_t>(offset); }
  static std::int64_t answer(ssize_t moved) {
    return moved >= 0 ? moved : -static_cast<std::int64_t>(errno);
  }

  const std::shared_ptr<Lane> lane_;
  const std::uint32_t depth_;
  const Faults faults_;
  Dice order_;
  std::unordered_map<std::uint64_t, std::uint64_t> times_;
};

class Faulty final : public Submitter {
 public:
  Faulty(std::shared_ptr<Lane> lane, std::uint32_t depth, const Faults& faults)
      : disk_(std::make_shared<FaultyDisk>(std::move(lane), depth, faults)) {}

  void start() override {
    workers_.emplace_back([disk = disk_] { disk->run(); });
  }

  bool join(double timeout_s) override {
    return workers_.empty() || workers_.front().join(deadline_in(timeout_s));
  }

 private:
  const std::shared_ptr<FaultyDisk> disk_;
  std::vector<Worker> workers_;
};

}  // namespace

std::unique_ptr<Submitter> make_faulty(std::shared_ptr<Lane> lane, std::uint32_t depth,
                                       const Faults& faults) {
  return std::make_unique<Faulty>(std::move(lane), depth, faults);
}

}  // namespace overspill
