// One io_uring per lane: one thread submits, sleeps and reaps, so the kernel can run its
// completions in that thread when it asks (DEFER_TASKRUN), without interrupts.
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <vector>

#include "regions.h"
#include "ring.h"
#include "submitter.h"
#include "worker.h"

// Built on a system whose headers are older than Linux 5.11: then there is no io_uring.
#if defined(IORING_ENTER_EXT_ARG)

namespace overspill {
namespace {

// How many blocks are taken between two looks at the results: checksums are taken there, and the
// disk should not run dry meanwhile.
constexpr unsigned kBatch = 4;
constexpr std::int64_t kPatienceNs = 10'000'000;

class UringThread {
 public:
  UringThread(std::shared_ptr<Lane> lane, std::uint32_t depth)
      : lane_(std::move(lane)), ring_(depth + 1), event_(eventfd(0, EFD_CLOEXEC)), depth_(depth) {
    if (event_.get() < 0) raise("eventfd");
    const int files[] = {lane_->fd(), event_.get()};
    fixed_files_ = register_with(ring_.fd(), IORING_REGISTER_FILES, files, 2) == 0;
  }

  void wake() {
    const std::uint64_t one = 1;
    // Fails only if the counter is full, and then the reader is awake anyway.
    if (write(event_.get(), &one, sizeof one) != sizeof one) return;
  }

  Regions& regions() { return regions_; }

  void run() {
    if (const int error = ring_.enable(); error != 0) return fail_all(error);
    has_table_ = make_table(ring_.fd());
    std::vector<Block*> batch(kBatch);
    while (!lane_->drained()) {
      if (regions_.changed()) change_regions();
      if (!listening_) listen();
      const std::size_t room = std::min<std::size_t>(kBatch, depth_ - in_flight_);
      const std::size_t taken = room > 0 ? lane_->take(batch.data(), room, false) : 0;
      for (std::size_t k = 0; k < taken; ++k) prepare(batch[k]);
      in_flight_ += static_cast<unsigned>(taken);
      const bool more = taken == room && in_flight_ < depth_;
      const unsigned wait = more || ring_.has_results() || lane_->drained() ? 0 : 1;
      const int error = ring_.submit_and_wait(wait, lane_->next_due_ns());
      if (error != 0 && error != EINTR && error != ETIME && error != EAGAIN && error != EBUSY) {
        return fail_all(error);
      }
      reap();
    }
  }

 private:
  void listen() {
    io_uring_sqe* entry = ring_.next_entry();
    target(entry, 1, event_.get());
    entry->opcode = IORING_OP_READ;
    entry->addr = reinterpret_cast<std::uint64_t>(&woken_);
    entry->len = sizeof woken_;
    entry->user_data = 0;
    listening_ = true;
  }

  void prepare(Block* block) {
    io_uring_sqe* entry = ring_.next_entry();
    target(entry, 0, lane_->fd());
    const int region = has_table_ ? regions_.find(address_of(block), block->left()) : -1;
    if (region >= 0) {
      entry->opcode = block->op == Op::kRead ? IORING_OP_READ_FIXED : IORING_OP_WRITE_FIXED;
      entry->buf_index = static_cast<std::uint16_t>(region);
    } else {
      entry->opcode = block->op == Op::kRead ? IORING_OP_READ : IORING_OP_WRITE;
    }
    entry->addr = address_of(block);
    entry->len = block->left();
    entry->off = block->next_offset();
    entry->user_data = reinterpret_cast<std::uint64_t>(block);
  }

  static std::uint64_t address_of(const Block* block) {
    return reinterpret_cast<std::uint64_t>(block->next_address());
  }

  void change_regions() {
    for (const Regions::Change& change : regions_.take_changes()) {
      regions_.settle(change, has_table_ && change_table(ring_.fd(), change));
    }
  }

  void target(io_uring_sqe* entry, int index, int fd) const {
    entry->fd = fixed_files_ ? index : fd;
    entry->flags = fixed_files_ ? IOSQE_FIXED_FILE : 0;
  }

  void reap() {
    io_uring_cqe result;
    for (unsigned count = 0; count < kBatch && ring_.pop(&result);) {
      if (result.user_data == 0) {
        listening_ = false;
        continue;
      }
      --in_flight_;
      ++count;
      lane_->finish(reinterpret_cast<Block*>(result.user_data), result.res);
    }
  }

  // The ring is of no more use: what it has in flight ends first, for the kernel may still write to
  // its memory; the rest fails, what was prepared and never submitted among it.
  void fail_all(int error) {
    ring_.withdraw([this, error](std::uint64_t data) {
      if (data == 0) return;
      --in_flight_;
      lane_->finish(reinterpret_cast<Block*>(data), -error);
    });
    io_uring_cqe result;
    while (in_flight_ > 0) {
      if (!ring_.pop(&result)) {
        const int refused = ring_.wait_for_result(kPatienceNs);
        if (refused != 0 && refused != ETIME && refused != EINTR) {
          std::this_thread::sleep_for(std::chrono::nanoseconds(kPatienceNs));
        }
        continue;
      }
      if (result.user_data == 0) continue;
      --in_flight_;
      lane_->finish(reinterpret_cast<Block*>(result.user_data), result.res);
    }
    Block* block = nullptr;
    while (lane_->take(&block, 1, true) == 1) lane_->finish(block, -error);
  }

  const std::shared_ptr<Lane> lane_;
  Ring ring_;
  const Descriptor event_;
  const unsigned depth_;
  Regions regions_{kRegions};
  bool fixed_files_ = false;
  bool has_table_ = false;
  bool listening_ = false;
  unsigned in_flight_ = 0;
  std::uint64_t woken_ = 0;
};

class Uring final : public Submitter {
 public:
  Uring(std::shared_ptr<Lane> lane, std::uint32_t depth)
      : lane_(std::move(lane)), thread_(std::make_shared<UringThread>(lane_, depth)) {}
  ~Uring() override { lane_->set_waker(nullptr); }

  void start() override {
    lane_->set_waker([thread = thread_] { thread->wake(); });
    workers_.emplace_back([thread = thread_] { thread->run(); });
  }

  bool join(double timeout_s) override {
    return workers_.empty() || workers_.front().join(deadline_in(timeout_s));
  }

  void add_memory(std::uint64_t address, std::uint64_t nbytes) override {
    thread_->regions().add(address, nbytes);
    thread_->wake();
  }

  void drop_memory(std::uint64_t address, std::uint64_t nbytes) override {
    thread_->regions().drop(address, nbytes);
    thread_->wake();
  }

  std::uint64_t registered_bytes() const override { return thread_->regions().ready_bytes(); }

 private:
  const std::shared_ptr<Lane> lane_;
  const std::shared_ptr<UringThread> thread_;
  std::vector<Worker> workers_;
};

}  // namespace

std::unique_ptr<Submitter> make_uring(std::shared_ptr<Lane> lane, std::uint32_t depth) {
  return std::make_unique<Uring>(std::move(lane), depth);
}

std::string uring_refusal() {
  try {
    // The whole way once: a security profile may let some of the calls pass and not others.
    Ring ring(4);
    if (!ring.has_timeouts()) return "the kernel is older than 5.11";
    if (const int error = ring.enable(); error != 0) {
      return std::string("io_uring_register: ") + std::strerror(error);
    }
    ring.next_entry()->opcode = IORING_OP_NOP;
    if (const int error = ring.submit_and_wait(1, 1'000'000'000); error != 0) {
      return std::string("io_uring_enter: ") + std::strerror(error);
    }
    io_uring_cqe result;
    return ring.pop(&result) && result.res == 0 ? "" : "io_uring_enter: no result";
  } catch (const std::system_error& error) {
    return error.what();
  }
}

}  // namespace overspill

#else

namespace overspill {

std::unique_ptr<Submitter> make_uring(std::shared_ptr<Lane>, std::uint32_t) {
  throw std::system_error(ENOSYS, std::generic_category(), uring_refusal());
}

std::string uring_refusal() { return "built with kernel headers older than 5.11"; }

}  // namespace overspill

#endif
