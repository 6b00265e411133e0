#include "core.h"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace overspill {
namespace {

constexpr std::uint64_t kSector = 4096;

std::uint64_t progress(const std::vector<std::shared_ptr<Lane>>& lanes) {
  std::uint64_t sum = 0;
  for (const auto& lane : lanes) {
    const LaneStats stats = lane->stats();
    sum += stats.bytes[0] + stats.bytes[1] + stats.retries;
  }
  return sum;
}

}  // namespace

SubmitterMaker submitter_maker(const std::string& backend) {
  if (backend == "uring") return make_uring;
  if (backend == "threads") return make_threads;
  throw std::invalid_argument("no backend '" + backend + "'; there are uring, threads");
}

void Results::put(const Result& result) {
  {
    const std::lock_guard lock(mutex_);
    results_.push_back(result);
  }
  ready_.notify_one();
}

std::vector<Result> Results::collect(double timeout_s) {
  std::unique_lock lock(mutex_);
  ready_.wait_for(lock, std::chrono::duration<double>(timeout_s),
                  [this] { return woken_ || !results_.empty(); });
  woken_ = false;
  std::vector<Result> all(results_.begin(), results_.end());
  results_.clear();
  return all;
}

void Results::wake() {
  {
    const std::lock_guard lock(mutex_);
    woken_ = true;
  }
  ready_.notify_one();
}

void Core::State::finished(Request* request) {
  std::unique_ptr<Request> owned;
  {
    const std::lock_guard lock(mutex);
    const auto found = requests.find(request->id);
    owned = std::move(found->second);
    requests.erase(found);
  }
  Result result;
  {
    const std::lock_guard lock(owned->mutex);
    result = owned->result;
  }
  result.id = owned->id;
  result.started_ns = owned->started_ns;
  result.finished_ns = now_ns();
  results.put(result);
}

Core::Core(const std::vector<int>& fds, const SubmitterMaker& make, std::uint32_t block_bytes,
           std::uint32_t depth)
    : block_bytes_(block_bytes) {
  if (fds.empty() || block_bytes == 0 || block_bytes % kSector != 0 || depth == 0) {
    throw std::invalid_argument(
        "an I/O core needs a file, blocks of a multiple of 4096 bytes, and a depth above 0");
  }
  for (const int fd : fds) {
    lanes_.push_back(
        std::make_shared<Lane>(static_cast<std::uint32_t>(lanes_.size()), fd,
                               [state = state_](Request* request) { state->finished(request); }));
    submitters_.push_back(make(lanes_.back(), depth));
  }
  for (const auto& submitter : submitters_) submitter->start();
}

Core::~Core() { close(0.0); }

void Core::submit(std::uint64_t id, Op op, bool urgent, const std::vector<Segment>& segments) {
  auto request = std::make_unique<Request>();
  request->id = id;
  request->urgent = urgent;
  request->blocks.resize(lanes_.size());
  std::uint32_t count = 0;
  for (const Segment& segment : segments) {
    if ((segment.offset | segment.address | segment.nbytes) % kSector != 0 || segment.nbytes == 0 ||
        segment.lane >= lanes_.size()) {
      throw std::invalid_argument(
          "a segment needs a lane that exists, and offset, address and length that are multiples "
          "of 4096");
    }
    std::uint64_t index = 0;
    for (std::uint64_t at = 0; at < segment.nbytes; at += block_bytes_, ++index) {
      Block block;
      block.request = request.get();
      block.op = op;
      block.offset = segment.offset + at;
      block.address = reinterpret_cast<char*>(segment.address + at);
      block.nbytes =
          static_cast<std::uint32_t>(std::min<std::uint64_t>(block_bytes_, segment.nbytes - at));
      if (segment.checksums != 0) {
        block.checksum = reinterpret_cast<std::uint32_t*>(segment.checksums) + index;
      }
      block.changing = segment.changing && op == Op::kWrite;
      request->blocks[segment.lane].push_back(std::move(block));
      ++count;
    }
  }
  if (count == 0) throw std::invalid_argument("a request needs a segment");
  request->remaining = count;
  Request* raw = request.get();
  {
    const std::lock_guard lock(state_->mutex);
    if (!state_->requests.emplace(id, std::move(request)).second) {
      throw std::invalid_argument("a request with this id is in flight");
    }
  }
  // The last push may end the request: count the lanes to push to beforehand.
  std::vector<std::uint32_t> with_blocks;
  for (std::uint32_t lane = 0; lane < lanes_.size(); ++lane) {
    if (!raw->blocks[lane].empty()) with_blocks.push_back(lane);
  }
  for (const std::uint32_t lane : with_blocks) lanes_[lane]->push(raw->blocks[lane]);
}

bool Core::cancel(std::uint64_t id) {
  Request* request = nullptr;
  bool cancelled = false;
  {
    const std::lock_guard lock(state_->mutex);
    const auto found = state_->requests.find(id);
    if (found == state_->requests.end()) return false;
    request = found->second.get();
    // One more hold, so that it outlives this function; none left means it is just ending.
    if (request->remaining.fetch_add(1) == 0) {
      request->remaining.fetch_sub(1);
      return false;
    }
    int queued = Request::kQueued;
    cancelled = request->state.compare_exchange_strong(queued, Request::kCancelled);
    if (cancelled) {
      const std::lock_guard result_lock(request->mutex);
      request->result.outcome = Outcome::kCancelled;
    }
  }
  std::uint32_t count = 1;
  if (cancelled) {
    for (const auto& lane : lanes_) count += lane->withdraw(request);
  }
  if (request->remaining.fetch_sub(count) == count) state_->finished(request);
  return cancelled;
}

void Core::promote(std::uint64_t id) {
  const std::lock_guard lock(state_->mutex);
  const auto found = state_->requests.find(id);
  if (found == state_->requests.end() || found->second->urgent) return;
  for (const auto& lane : lanes_) lane->promote(found->second.get());
}

void Core::add_memory(std::uint64_t address, std::uint64_t nbytes) {
  const std::lock_guard lock(submitters_mutex_);
  for (const auto& submitter : submitters_) submitter->add_memory(address, nbytes);
}

void Core::drop_memory(std::uint64_t address, std::uint64_t nbytes) {
  const std::lock_guard lock(submitters_mutex_);
  for (const auto& submitter : submitters_) submitter->drop_memory(address, nbytes);
}

std::uint64_t Core::registered_bytes() const {
  const std::lock_guard lock(submitters_mutex_);
  std::uint64_t sum = 0;
  for (const auto& submitter : submitters_) sum += submitter->registered_bytes();
  return sum;
}

std::vector<LaneStats> Core::stats() const {
  std::vector<LaneStats> all;
  for (const auto& lane : lanes_) all.push_back(lane->stats());
  return all;
}

Latencies Core::latencies() const {
  Latencies all{};
  for (const auto& lane : lanes_) {
    const Latencies mine = lane->latencies();
    for (std::size_t step = 0; step < all.size(); ++step) all[step] += mine[step];
  }
  return all;
}

bool Core::close(double timeout_s) {
  if (closed_) return true;
  closed_ = true;
  for (const auto& lane : lanes_) lane->stop();
  bool all = true;
  for (const auto& submitter : submitters_) {
    std::uint64_t before = progress(lanes_);
    while (!submitter->join(timeout_s)) {
      const std::uint64_t now = progress(lanes_);
      if (now == before) {
        all = false;
        break;
      }
      before = now;
    }
  }
  const std::lock_guard lock(submitters_mutex_);
  submitters_.clear();  // with their rings; a thread that is stuck keeps what it uses
  return all;
}

}  // namespace overspill
