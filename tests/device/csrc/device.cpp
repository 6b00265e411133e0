#include "device.h"

#include <Python.h>
#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <sstream>
#include <stdexcept>

namespace testdev {
namespace {

const pid_t owner = getpid();  // a forked child has no threads of ours
thread_local int stream_of_thread = 0;

// The GIL is given back while C++ waits: whoever is waited for may need it.
class Unlocked {
 public:
  Unlocked() {
    if (Py_IsInitialized() && PyGILState_Check()) saved_ = PyEval_SaveThread();
  }
  ~Unlocked() {
    if (saved_ != nullptr) PyEval_RestoreThread(saved_);
  }

 private:
  PyThreadState* saved_ = nullptr;
};

// The main thread waits for backward, which runs on the autograd thread of the device: what one of
// them knows to be over, the other may take for over.
bool trains() {
  if (syscall(SYS_gettid) == getpid()) return true;
  char name[32] = "";
  pthread_getname_np(pthread_self(), name, sizeof(name));
  return std::strncmp(name, "pt_autograd", 11) == 0;
}

bool is_copy_out(const char* name) {
  return std::strcmp(name, "copy out") == 0 || std::strcmp(name, "pageable copy out") == 0;
}

bool is_copy(const char* name) {
  const bool in = std::strcmp(name, "copy in") == 0 || std::strcmp(name, "pageable copy in") == 0;
  return in || is_copy_out(name);
}

std::string stack_of_caller() {
  if (!Py_IsInitialized() || _Py_IsFinalizing()) return "";
  const PyGILState_STATE gil = PyGILState_Ensure();
  std::string text;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  if (PyObject* module = PyImport_ImportModule("traceback")) {
    if (PyObject* lines = PyObject_CallMethod(module, "format_stack", "Oi", Py_None, 12)) {
      for (Py_ssize_t i = 0; i < PyList_Size(lines); ++i)
        text += PyUnicode_AsUTF8(PyList_GetItem(lines, i));
      Py_DECREF(lines);
    }
    Py_DECREF(module);
  }
  PyErr_Clear();
  PyErr_Restore(type, value, trace);
  PyGILState_Release(gil);
  return text;
}

}  // namespace

int current_stream() { return stream_of_thread; }

int exchange_stream(int stream) {
  std::swap(stream, stream_of_thread);
  return stream;
}

// -- work ---------------------------------------------------------------------------------------

Device::Device() {
  for (int stream = 0; stream < kStreams; ++stream)
    queues_[stream].open(stream, &settings.pace, [this](const auto& why) { break_down(why); });
}

Device& Device::get() {
  static Device* device = new Device;  // never destroyed: tensors outlive everything
  return *device;
}

std::shared_ptr<Clock> Device::knowledge() {
  static auto of_trainers = std::make_shared<Clock>();
  thread_local std::shared_ptr<Clock> own = trains() ? of_trainers : std::make_shared<Clock>();
  return own;
}

void Device::learn(const Clock& clock) {
  std::lock_guard<std::mutex> held(lock_);
  join(*knowledge(), clock);
}

// What a thread submits comes after all that it knows to be over.
void Device::come_after(Queue& queue) {
  join(queue.clock, *knowledge());
  join(queue.clock, over_for_all_);
}

// The next task of `queue`: its number, after everything that is known to come before.
uint64_t Device::follow(Queue& queue, int stream, const char* name,
                        const std::vector<Access>& accesses, std::vector<Race>& races) {
  queue.clock[stream] = ++queue.given;
  if (is_copy(name) && !trains()) copies_[stream] = true;
  if (settings.races) {
    const Mark mark{stream, queue.given, name};
    for (const Access& access : accesses) shadow_.access(access, mark, queue.clock, races);
  }
  ++counters.tasks;
  return queue.given;
}

uint64_t Device::submit(int stream, const char* name, const std::vector<Access>& accesses,
                        std::function<void()> run, Link link, int64_t link_bytes) {
  check();
  if (stopped_) return 0;
  std::vector<Race> races;
  uint64_t at;
  {
    std::lock_guard<std::mutex> held(lock_);
    Queue& queue = queues_[stream];
    come_after(queue);
    at = follow(queue, stream, name, accesses, races);
    queue.push({std::move(run), at, link_bytes, link});
  }
  tell(races);
  return at;
}

void Device::run_now(int stream, const char* name, const std::vector<Access>& accesses,
                     const std::function<void()>& run) {
  std::exception_ptr raised;
  const uint64_t at = submit(stream, name, accesses, [&] {
    try {
      run();
    } catch (...) {
      raised = std::current_exception();
    }
  });
  {
    Unlocked unlocked;
    queues_[stream].wait(at);
  }
  if (raised) std::rethrow_exception(raised);
  check();
}

PointPtr Device::tail(int stream) {
  auto point = std::make_shared<Point>();
  point->stream = stream;
  point->at = queues_[stream].given;
  point->clock = queues_[stream].clock;
  return point;
}

PointPtr Device::record(int stream) {
  check();
  std::lock_guard<std::mutex> held(lock_);
  std::vector<Race> none;
  Queue& queue = queues_[stream];
  come_after(queue);
  follow(queue, stream, "record", {}, none);
  PointPtr point = tail(stream);
  if (!stopped_) queue.push({[point] { point->when_ns = now_ns(); }, point->at});
  return point;
}

void Device::block(int stream, const PointPtr& point) {
  check();
  if (point->stream == stream || stopped_) return;
  std::lock_guard<std::mutex> held(lock_);
  std::vector<Race> none;
  Queue& queue = queues_[stream];
  join(queue.clock, point->clock);
  come_after(queue);
  const uint64_t at = follow(queue, stream, "wait", {}, none);
  Queue* first = &queues_[point->stream];
  queue.push({[first, point] { first->wait(point->at); }, at});
}

bool Device::query(const Point& point) {
  check();
  if (!queues_[point.stream].over(point.at)) return false;
  learn(point.clock);
  return true;
}

bool Device::query_stream(int stream) {
  PointPtr point;
  {
    std::lock_guard<std::mutex> held(lock_);
    point = tail(stream);
  }
  return query(*point);
}

void Device::synchronize(const Point& point) {
  check();
  if (stopped_) return;
  ++counters.host_waits;
  {
    Unlocked unlocked;
    queues_[point.stream].wait(point.at);
  }
  learn(point.clock);
  check();
}

void Device::synchronize_stream(int stream) {
  PointPtr point;
  {
    std::lock_guard<std::mutex> held(lock_);
    point = tail(stream);
  }
  synchronize(*point);
}

// Whatever any thread submits once the whole device has been idle comes after all of that.
void Device::synchronize_all() {
  Clock all{};
  for (int stream = 0; stream < kStreams; ++stream) {
    PointPtr point;
    {
      std::lock_guard<std::mutex> held(lock_);
      point = tail(stream);
    }
    synchronize(*point);
    all[stream] = point->at;
  }
  std::lock_guard<std::mutex> held(lock_);
  join(over_for_all_, all);
}

int Device::new_stream() { return 1 + streams_++ % (kStreams - 1); }

// -- memory -------------------------------------------------------------------------------------

// Blocks whose last uses on other streams are over go back to the stream that allocated them.
void Device::give_back() {
  std::vector<Race> races;
  for (size_t i = 0; i < waiting_.size();) {
    auto& [block, points] = waiting_[i];
    const bool over = std::all_of(points.begin(), points.end(), [&](const PointPtr& point) {
      return queues_[point->stream].over(point->at);
    });
    if (!over) {
      ++i;
      continue;
    }
    for (const PointPtr& point : points) join(queues_[block.stream].clock, point->clock);
    release(block, races);
    waiting_.erase(waiting_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

// Whoever still reads the block finds NaN, or is found by the clocks.  That what the freeing thread
// knows comes before counts for the block alone: the collector frees on any thread.
void Device::release(const Memory::Block& block, std::vector<Race>& races) {
  Queue& queue = queues_[block.stream];
  const Access access{block.start, block.start + block.nbytes, true};
  const Clock kept = queue.clock;
  come_after(queue);
  std::vector<Race> found;
  const uint64_t at = follow(queue, block.stream, "free", {access}, found);
  // Who copies holds the memory until the copy is over, whoever then drops it last: that order is
  // the host's, and not known to the thread.  A copy that still runs is a race.  The engine's
  // streams for copies also pack and unpack.
  for (const Race& race : found) {
    const Mark& first = race.first;
    const bool copied =
        first.stream == 0 ? is_copy_out(first.name) && !race.first_wrote : copies_[first.stream];
    if (!copied || !queues_[first.stream].over(first.at)) races.push_back(race);
  }
  queue.clock = kept;
  queue.clock[block.stream] = at;
  char* bytes = memory_.worker(reinterpret_cast<void*>(block.start));
  queue.push({[bytes, n = block.nbytes] { std::memset(bytes, 0xFF, n); }, at});
  memory_.give(block);
}

void* Device::allocate(size_t nbytes) {
  if (nbytes == 0) return nullptr;
  check();
  const int stream = current_stream();
  for (int attempt = 0;; ++attempt) {
    {
      std::unique_lock<std::mutex> held(lock_);
      give_back();
      if (memory_.fail_in != 0 && --memory_.fail_in == 0) {
        ++memory_.stats.failures;
        return nullptr;
      }
      bool fresh = false;
      if (void* found = memory_.allocate(nbytes, stream, fresh)) {
        if (fresh) std::memset(memory_.worker(found), 0xFF, nbytes);
        return found;
      }
      if (attempt == 1) {
        ++memory_.stats.failures;
        return nullptr;
      }
    }
    empty_cache();
  }
}

void Device::free(void* address) {
  if (address == nullptr || stopped_ || getpid() != owner) return;
  std::vector<Race> races;
  {
    std::unique_lock<std::mutex> held(lock_);
    const Memory::Block block = memory_.take(address);
    if (block.used_by.empty()) {
      release(block, races);
    } else {
      std::vector<PointPtr> points;
      for (int stream : block.used_by) points.push_back(tail(stream));
      waiting_.emplace_back(block, std::move(points));
    }
  }
  tell(races);
}

void Device::used_by(const void* address, int stream) {
  std::lock_guard<std::mutex> held(lock_);
  memory_.used_by(address, stream);
}

void Device::wait_idle() {
  Unlocked unlocked;
  for (Queue& queue : queues_) {
    uint64_t at;
    {
      std::lock_guard<std::mutex> held(lock_);
      at = queue.given;
    }
    queue.wait(at);
  }
}

void Device::empty_cache() {
  wait_idle();
  std::unique_lock<std::mutex> held(lock_);
  give_back();
  held.unlock();
  wait_idle();  // for their poison
  held.lock();
  for (auto [start, stop] : memory_.merge()) shadow_.forget(start, stop);
}

// -- host memory --------------------------------------------------------------------------------

void Device::lock_host(uintptr_t start, size_t nbytes) {
  check();
  std::lock_guard<std::mutex> held(host_lock_);
  auto next = locked_.lower_bound(start);
  const bool meets_next = next != locked_.end() && next->first < start + nbytes;
  const bool meets_last =
      next != locked_.begin() && std::prev(next)->first + std::prev(next)->second > start;
  if (nbytes == 0 || meets_next || meets_last)
    throw std::runtime_error("host memory is registered twice");
  if (locked_bytes_ + static_cast<int64_t>(nbytes) > settings.lockable)
    throw std::runtime_error("no more host memory can be registered");
  locked_.emplace(start, nbytes);
  locked_bytes_ += static_cast<int64_t>(nbytes);
}

void Device::unlock_host(uintptr_t start) {
  std::lock_guard<std::mutex> held(host_lock_);
  auto found = locked_.find(start);
  if (found == locked_.end()) throw std::runtime_error("host memory was not registered");
  locked_bytes_ -= static_cast<int64_t>(found->second);
  locked_.erase(found);
}

bool Device::is_locked(uintptr_t start, size_t nbytes) {
  std::lock_guard<std::mutex> held(host_lock_);
  auto after = locked_.upper_bound(start);
  if (after == locked_.begin()) return false;
  auto range = std::prev(after);
  return start + nbytes <= range->first + range->second;
}

int64_t Device::locked_bytes() {
  std::lock_guard<std::mutex> held(host_lock_);
  return locked_bytes_;
}

// -- errors and ends ----------------------------------------------------------------------------

void Device::break_down(const std::string& why) {
  std::lock_guard<std::mutex> held(error_lock_);
  error_ = why;
  broken_ = !why.empty();
}

void Device::check() {
  if (!broken_) return;
  std::lock_guard<std::mutex> held(error_lock_);
  throw std::runtime_error("test device: an earlier task failed: " + error_);
}

void Device::tell(const std::vector<Race>& races) {
  if (races.empty()) return;
  const std::string stack = stack_of_caller();
  std::lock_guard<std::mutex> held(error_lock_);
  for (const Race& race : races) {
    std::ostringstream text;
    text << race.second.name << " on stream " << race.second.stream
         << (race.second_writes ? " writes " : " reads ") << race.nbytes << " bytes at 0x"
         << std::hex << race.start << std::dec << " that " << race.first.name << " on stream "
         << race.first.stream << (race.first_wrote ? " wrote" : " read")
         << ", and nothing orders them\n"
         << stack;
    races_.push_back(text.str());
  }
}

std::vector<std::string> Device::take_races() {
  std::lock_guard<std::mutex> held(error_lock_);
  return std::exchange(races_, {});
}

void Device::stop() {
  if (stopped_.exchange(true)) return;
  Unlocked unlocked;
  for (Queue& queue : queues_) queue.stop();
}

}  // namespace testdev
