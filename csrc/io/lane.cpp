#include "lane.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <iterator>
#include <utility>

#include "checksum.h"

namespace overspill {
namespace {

constexpr std::uint32_t kSector = 4096;
// Repeats without progress: the waits double from 20 us to 50 ms and add up to some 2 s.
constexpr std::uint32_t kMaxAttempts = 50;
constexpr std::int64_t kFirstWaitNs = 20'000;
constexpr std::int64_t kLongestWaitNs = 50'000'000;
// Enough to keep a disk busy; their memory is beside all budgets.
constexpr std::uint32_t kMostCopies = 2;

constexpr int kWaiting = 2;  // queue of writes that need a copy, behind those of reads and writes

// It is taken only to be dropped.
bool ended(const Request* request) {
  return request->failed || request->state == Request::kCancelled;
}

bool worth_repeating(std::int64_t result) {
  return result == -EINTR || result == -EAGAIN || result == -EBUSY || result == -ENOBUFS;
}

std::size_t latency_step(std::int64_t ns) {
  const double octaves = std::log2(static_cast<double>(std::max<std::int64_t>(ns, 1)));
  return std::min(static_cast<std::size_t>(octaves * kLatencySteps), Latencies{}.size() - 1);
}

}  // namespace

Lane::Queue& Lane::queue_of(const Block* block) {
  const bool waits = block->changing && !block->copied;
  return queues_[block->request->urgent ? 1 : 0][waits ? kWaiting : static_cast<int>(block->op)];
}

void Lane::push(std::vector<Block>& blocks) {
  std::function<void()> waker;
  {
    const std::lock_guard lock(mutex_);
    for (Block& block : blocks) {
      block.number = next_number_++;
      queue_of(&block).push_back(&block);
    }
    stats_.queued += static_cast<std::uint32_t>(blocks.size());
    waker = waker_;
  }
  wake_.notify_all();
  if (waker) waker();
}

std::uint32_t Lane::withdraw(const Request* request) {
  const std::lock_guard lock(mutex_);
  std::uint32_t count = 0;
  for (auto& by_op : queues_) {
    for (Queue& queue : by_op) {
      const auto mine = [request](const Block* block) { return block->request == request; };
      const auto end = std::remove_if(queue.begin(), queue.end(), mine);
      count += static_cast<std::uint32_t>(queue.end() - end);
      queue.erase(end, queue.end());
    }
  }
  stats_.queued -= count;
  return count;
}

void Lane::promote(const Request* request) {
  const std::lock_guard lock(mutex_);
  for (std::size_t kind = 0; kind < std::size(queues_[0]); ++kind) {
    Queue& from = queues_[0][kind];
    const auto theirs = [request](const Block* block) { return block->request != request; };
    const auto mine = std::stable_partition(from.begin(), from.end(), theirs);
    queues_[1][kind].insert(queues_[1][kind].end(), mine, from.end());
    from.erase(mine, from.end());
  }
}

void Lane::stop() {
  std::function<void()> waker;
  {
    const std::lock_guard lock(mutex_);
    stopped_ = true;
    waker = waker_;
  }
  wake_.notify_all();
  if (waker) waker();
}

void Lane::set_waker(std::function<void()> waker) {
  const std::lock_guard lock(mutex_);
  waker_ = std::move(waker);
}

LaneStats Lane::stats() const {
  const std::lock_guard lock(mutex_);
  LaneStats now = stats_;
  if (now.in_flight > 0) now.busy_ns += now_ns() - busy_since_ns_;
  return now;
}

Latencies Lane::latencies() const {
  const std::lock_guard lock(mutex_);
  return latencies_;
}

bool Lane::drained() const {
  const std::lock_guard lock(mutex_);
  return stopped_ && stats_.queued == 0 && stats_.in_flight == 0;
}

std::int64_t Lane::next_due_ns() const {
  const std::lock_guard lock(mutex_);
  if (delayed_.empty()) return -1;
  std::int64_t due = delayed_.front()->due_ns;
  for (const Block* block : delayed_) due = std::min(due, block->due_ns);
  return std::max<std::int64_t>(due - now_ns(), 0);
}

void Lane::requeue_due(std::int64_t now) {
  for (std::size_t k = 0; k < delayed_.size();) {
    if (delayed_[k]->due_ns > now) {
      ++k;
      continue;
    }
    queue_of(delayed_[k]).push_front(delayed_[k]);
    delayed_[k] = delayed_.back();
    delayed_.pop_back();
  }
}

Lane::Queue* Lane::next_of(int urgent, int op) {
  Queue& plain = queues_[urgent][op];
  Queue* found = plain.empty() ? nullptr : &plain;
  if (op == static_cast<int>(Op::kRead)) return found;
  Queue& waiting = queues_[urgent][kWaiting];
  if (waiting.empty()) return found;
  if (copies_ >= kMostCopies && !ended(waiting.front()->request)) return found;
  return found != nullptr && plain.front()->number < waiting.front()->number ? found : &waiting;
}

Block* Lane::pick() {
  for (int urgent = 1; urgent >= 0; --urgent) {
    const int first = write_next_ ? 1 : 0;
    for (const int op : {first, 1 - first}) {
      Queue* queue = next_of(urgent, op);
      if (queue == nullptr) continue;
      Block* block = queue->front();
      queue->pop_front();
      write_next_ = op == 0;
      return block;
    }
  }
  return nullptr;
}

std::size_t Lane::take(Block** out, std::size_t room, bool wait) {
  std::size_t taken = 0;
  std::vector<Block*> dropped;
  {
    std::unique_lock lock(mutex_);
    for (;;) {
      const std::int64_t now = now_ns();
      if (!delayed_.empty()) requeue_due(now);
      while (taken < room) {
        Block* block = pick();
        if (block == nullptr) break;
        --stats_.queued;
        if (stats_.in_flight++ == 0) busy_since_ns_ = now;
        Request* request = block->request;
        int queued = Request::kQueued;
        if (request->state.compare_exchange_strong(queued, Request::kStarted)) {
          request->started_ns = now;
        }
        // A request that has failed already is not worth the rest of its transfers.
        if (queued == Request::kCancelled || request->failed) {
          dropped.push_back(block);
        } else {
          if (block->changing && !block->copied) {
            block->copied = true;
            ++copies_;
          }
          block->started_ns = now;
          out[taken++] = block;
        }
      }
      if (taken > 0 || !dropped.empty() || !wait) break;
      if (stopped_ && stats_.queued == 0) break;
      if (delayed_.empty()) {
        wake_.wait(lock);
      } else {
        std::int64_t due = delayed_.front()->due_ns;
        for (const Block* block : delayed_) due = std::min(due, block->due_ns);
        wake_.wait_for(lock, std::chrono::nanoseconds(std::max<std::int64_t>(due - now, 0)));
      }
    }
  }
  for (Block* block : dropped) end(block);
  std::size_t kept = 0;
  for (std::size_t k = 0; k < taken; ++k) {
    Block* block = out[k];
    if (block->changing && block->own.memory == nullptr && !copy(block)) {
      fail(block, Outcome::kFailed, ENOMEM, 0, 0);
      continue;
    }
    out[kept++] = block;
    if (block->op == Op::kWrite && block->checksum != nullptr && !block->summed) {
      *block->checksum = crc32(block->address, block->nbytes);
      block->summed = true;
    }
  }
  // Only dropped blocks, or failed ones: once more, since nothing in flight would wake who sleeps.
  const bool none = kept == 0 && (taken > 0 || !dropped.empty());
  return none ? take(out, room, wait) : kept;
}

bool Lane::copy(Block* block) {
  OwnMemory own;
  {
    const std::lock_guard lock(mutex_);
    if (!spare_.empty()) {
      own = std::move(spare_.back());
      spare_.pop_back();
    }
  }
  if (own.nbytes < block->nbytes) {
    own.memory.reset(static_cast<char*>(std::aligned_alloc(kSector, block->nbytes)));
    own.nbytes = own.memory != nullptr ? block->nbytes : 0;
  }
  if (own.memory == nullptr) return false;
  std::memcpy(own.memory.get(), block->address, block->nbytes);
  block->address = own.memory.get();
  block->own = std::move(own);
  return true;
}

void Lane::resume(Block* block, bool at_once) {
  {
    const std::lock_guard lock(mutex_);
    ++stats_.retries;
    if (--stats_.in_flight == 0) stats_.busy_ns += now_ns() - busy_since_ns_;
    ++stats_.queued;
    if (at_once) {
      queue_of(block).push_front(block);
    } else {
      const std::uint32_t doublings = std::min<std::uint32_t>(block->attempts, 12);
      block->due_ns = now_ns() + std::min(kFirstWaitNs << doublings, kLongestWaitNs);
      delayed_.push_back(block);
    }
  }
  wake_.notify_one();
}

void Lane::finish(Block* block, std::int64_t result) {
  if (result > 0) {
    const std::size_t step = latency_step(now_ns() - block->started_ns);
    const std::lock_guard lock(mutex_);
    ++latencies_[step];
    stats_.bytes[static_cast<int>(block->op)] += static_cast<std::uint64_t>(result);
  }
  if (result == block->left()) {
    block->moved = block->nbytes;
    if (block->op == Op::kRead && block->checksum != nullptr) {
      const std::uint32_t found = crc32(block->address, block->nbytes);
      if (found != *block->checksum) {
        return fail(block, Outcome::kCorrupt, 0, *block->checksum, found);
      }
    }
    {
      const std::lock_guard lock(mutex_);
      ++stats_.blocks[static_cast<int>(block->op)];
    }
    return end(block);
  }
  if (result > static_cast<std::int64_t>(block->left())) {
    return fail(block, Outcome::kFailed, EIO, 0, 0);
  }
  if (result == 0 && block->op == Op::kRead) return fail(block, Outcome::kTruncated, EIO, 0, 0);
  if (result < 0 && !worth_repeating(result)) {
    return fail(block, Outcome::kFailed, static_cast<int>(-result), 0, 0);
  }
  // O_DIRECT goes on only from a whole sector: what is short of one is moved again.
  const std::uint32_t whole =
      result > 0 ? static_cast<std::uint32_t>(result) / kSector * kSector : 0;
  block->moved += whole;
  block->attempts = whole > 0 ? 0 : block->attempts + 1;
  if (block->attempts > kMaxAttempts) {
    return fail(block, Outcome::kFailed, result < 0 ? static_cast<int>(-result) : EIO, 0, 0);
  }
  resume(block, whole > 0 || result == -EINTR);
}

void Lane::fail(Block* block, Outcome outcome, int error, std::uint32_t expected,
                std::uint32_t found) {
  Request* request = block->request;
  {
    const std::lock_guard lock(request->mutex);
    if (!request->failed) {
      Result& result = request->result;
      result.outcome = outcome;
      result.error = error;
      result.lane = index_;
      result.offset = block->offset;
      result.nbytes = block->nbytes;
      result.expected = expected;
      result.found = found;
      request->failed = true;
    }
  }
  end(block);
}

void Lane::end(Block* block) {
  const bool copied = block->copied;
  {
    const std::lock_guard lock(mutex_);
    if (--stats_.in_flight == 0) stats_.busy_ns += now_ns() - busy_since_ns_;
    if (copied) {
      --copies_;
      if (block->own.memory != nullptr) spare_.push_back(std::move(block->own));
    }
  }
  if (copied) wake_.notify_all();  // who waits may start the next one
  Request* request = block->request;
  if (request->remaining.fetch_sub(1) == 1) finished_(request);
}

}  // namespace overspill
