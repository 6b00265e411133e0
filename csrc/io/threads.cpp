#include <unistd.h>

#include <cerrno>
#include <vector>

#include "submitter.h"
#include "worker.h"

namespace overspill {
namespace {

std::int64_t transfer(int fd, const Block& block) {
  const auto offset = static_cast<off_t>(block.next_offset());
  const ssize_t moved = block.op == Op::kRead
                            ? pread(fd, block.next_address(), block.left(), offset)
                            : pwrite(fd, block.next_address(), block.left(), offset);
  return moved >= 0 ? moved : -static_cast<std::int64_t>(errno);
}

void serve(Lane& lane) {
  Block* block = nullptr;
  while (lane.take(&block, 1, true) == 1) lane.finish(block, transfer(lane.fd(), *block));
}

class Threads final : public Submitter {
 public:
  Threads(std::shared_ptr<Lane> lane, std::uint32_t threads)
      : lane_(std::move(lane)), threads_(threads) {}

  void start() override {
    for (std::uint32_t k = 0; k < threads_; ++k) {
      workers_.emplace_back([lane = lane_] { serve(*lane); });
    }
  }

  bool join(double timeout_s) override {
    const auto deadline = deadline_in(timeout_s);
    bool all = true;
    for (Worker& worker : workers_) all &= worker.join(deadline);
    return all;
  }

 private:
  const std::shared_ptr<Lane> lane_;
  const std::uint32_t threads_;
  std::vector<Worker> workers_;
};

}  // namespace

std::unique_ptr<Submitter> make_threads(std::shared_ptr<Lane> lane, std::uint32_t threads) {
  return std::make_unique<Threads>(std::move(lane), threads);
}

}  // namespace overspill
