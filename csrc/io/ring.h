// One io_uring over plain system calls: the mapped rings, and its table of registered buffers.
// Nothing of it exists where the kernel's headers are older than Linux 5.11.
#pragma once

#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <linux/time_types.h>
#endif

#if defined(IORING_ENTER_EXT_ARG)

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstring>
#include <system_error>

#include "regions.h"

#ifndef IORING_SETUP_COOP_TASKRUN
#define IORING_SETUP_COOP_TASKRUN (1U << 8)
#endif
#ifndef IORING_SETUP_SINGLE_ISSUER
#define IORING_SETUP_SINGLE_ISSUER (1U << 12)
#endif
#ifndef IORING_SETUP_DEFER_TASKRUN
#define IORING_SETUP_DEFER_TASKRUN (1U << 13)
#endif

namespace overspill {

inline int setup(unsigned entries, io_uring_params* params) {
  return static_cast<int>(syscall(__NR_io_uring_setup, entries, params));
}

inline int enter(int ring, unsigned submit, unsigned complete, unsigned flags, const void* arg,
                 std::size_t nbytes) {
  return static_cast<int>(syscall(__NR_io_uring_enter, ring, submit, complete, flags, arg, nbytes));
}

inline int register_with(int ring, unsigned what, const void* arg, unsigned count) {
  return static_cast<int>(syscall(__NR_io_uring_register, ring, what, arg, count));
}

[[noreturn]] inline void raise(const char* what) {
  throw std::system_error(errno, std::generic_category(), what);
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) close(fd_);
  }
  int get() const { return fd_; }

 private:
  const int fd_;
};

class Mapping {
 public:
  Mapping(int fd, std::size_t nbytes, std::uint64_t what) : nbytes_(nbytes) {
    base_ = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd,
                 static_cast<off_t>(what));
    if (base_ == MAP_FAILED) raise("io_uring: mmap");
  }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() { munmap(base_, nbytes_); }

  template <class T>
  T* at(std::uint32_t offset) const {
    return reinterpret_cast<T*>(static_cast<char*>(base_) + offset);
  }

 private:
  void* base_ = nullptr;
  const std::size_t nbytes_;
};

inline int setup_best(unsigned entries, io_uring_params* params) {
  // Newest manners first: older kernels refuse flags they do not know.
  constexpr unsigned kManners[] = {IORING_SETUP_SINGLE_ISSUER | IORING_SETUP_DEFER_TASKRUN,
                                   IORING_SETUP_COOP_TASKRUN, 0};
  int ring = -1;
  for (const unsigned manner : kManners) {
    std::memset(params, 0, sizeof *params);
    // Created on another thread than the one that submits: it is enabled, and so bound, there.
    params->flags = manner | IORING_SETUP_R_DISABLED | IORING_SETUP_CLAMP;
    ring = setup(entries, params);
    if (ring >= 0 || errno != EINVAL) return ring;
  }
  return ring;
}

class Ring {
 public:
  explicit Ring(unsigned entries)
      : fd_(setup_best(entries, &params_)),
        sq_((check(), fd_.get()), params_.sq_off.array + params_.sq_entries * sizeof(unsigned),
            IORING_OFF_SQ_RING),
        cq_(fd_.get(), params_.cq_off.cqes + params_.cq_entries * sizeof(io_uring_cqe),
            IORING_OFF_CQ_RING),
        sqes_(fd_.get(), params_.sq_entries * sizeof(io_uring_sqe), IORING_OFF_SQES) {
    for (unsigned k = 0; k < params_.sq_entries; ++k) sq_.at<unsigned>(params_.sq_off.array)[k] = k;
  }

  int fd() const { return fd_.get(); }
  bool has_timeouts() const { return (params_.features & IORING_FEAT_EXT_ARG) != 0; }
  int enable() const {
    return register_with(fd_.get(), IORING_REGISTER_ENABLE_RINGS, nullptr, 0) == 0 ? 0 : errno;
  }
  unsigned entries() const { return params_.sq_entries; }

  io_uring_sqe* next_entry() {
    unsigned* tail = sq_.at<unsigned>(params_.sq_off.tail);
    io_uring_sqe* entry = sqes_.at<io_uring_sqe>(0) + ((*tail + prepared_) & (entries() - 1));
    ++prepared_;
    std::memset(entry, 0, sizeof *entry);
    return entry;
  }

  // Submits what is prepared; waits for `complete` results, at most `timeout_ns` if not negative.
  // Returns 0 or the errno.
  int submit_and_wait(unsigned complete, std::int64_t timeout_ns) {
    unsigned* tail = sq_.at<unsigned>(params_.sq_off.tail);
    __atomic_store_n(tail, *tail + prepared_, __ATOMIC_RELEASE);
    unsubmitted_ += prepared_;
    prepared_ = 0;
    __kernel_timespec limit{};
    io_uring_getevents_arg arg{};
    unsigned flags = IORING_ENTER_GETEVENTS;
    const void* extra = nullptr;
    std::size_t extra_bytes = 0;
    if (complete > 0 && timeout_ns >= 0) {
      limit.tv_sec = timeout_ns / 1'000'000'000;
      limit.tv_nsec = timeout_ns % 1'000'000'000;
      arg.ts = reinterpret_cast<std::uint64_t>(&limit);
      flags |= IORING_ENTER_EXT_ARG;
      extra = &arg;
      extra_bytes = sizeof arg;
    }
    const int submitted = enter(fd_.get(), unsubmitted_, complete, flags, extra, extra_bytes);
    if (submitted < 0) return errno;
    unsubmitted_ -= static_cast<unsigned>(submitted);
    return 0;
  }

  // Takes back what is prepared and was never submitted: its user_data, each to `take`.
  template <class Take>
  void withdraw(Take take) {
    unsigned* tail = sq_.at<unsigned>(params_.sq_off.tail);
    const unsigned head = __atomic_load_n(sq_.at<unsigned>(params_.sq_off.head), __ATOMIC_ACQUIRE);
    for (unsigned k = head; k != *tail + prepared_; ++k) {
      take(sqes_.at<io_uring_sqe>(0)[k & (entries() - 1)].user_data);
    }
    __atomic_store_n(tail, head, __ATOMIC_RELEASE);
    prepared_ = unsubmitted_ = 0;
  }

  // Has the kernel hand over results (a ring that defers them does so in no other call), and waits
  // `timeout_ns` at most for one. Returns 0 or the errno.
  int wait_for_result(std::int64_t timeout_ns) {
    __kernel_timespec limit{};
    limit.tv_sec = timeout_ns / 1'000'000'000;
    limit.tv_nsec = timeout_ns % 1'000'000'000;
    io_uring_getevents_arg arg{};
    arg.ts = reinterpret_cast<std::uint64_t>(&limit);
    const unsigned flags = IORING_ENTER_GETEVENTS | IORING_ENTER_EXT_ARG;
    return enter(fd_.get(), 0, 1, flags, &arg, sizeof arg) < 0 ? errno : 0;
  }

  // The next result, if there is one.
  bool pop(io_uring_cqe* out) {
    unsigned* head = cq_.at<unsigned>(params_.cq_off.head);
    const unsigned tail = __atomic_load_n(cq_.at<unsigned>(params_.cq_off.tail), __ATOMIC_ACQUIRE);
    if (*head == tail) return false;
    *out = cq_.at<io_uring_cqe>(params_.cq_off.cqes)[*head & (params_.cq_entries - 1)];
    __atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
    return true;
  }

  bool has_results() const {
    return *cq_.at<unsigned>(params_.cq_off.head) !=
           __atomic_load_n(cq_.at<unsigned>(params_.cq_off.tail), __ATOMIC_ACQUIRE);
  }

 private:
  void check() const {
    if (fd_.get() < 0) raise("io_uring_setup");
  }

  io_uring_params params_{};
  const Descriptor fd_;
  const Mapping sq_, cq_, sqes_;
  unsigned prepared_ = 0, unsubmitted_ = 0;
};

// Registered buffers: a table of so many, empty at first. False where the kernel has no such thing.
constexpr unsigned kRegions = 64;

#ifdef IORING_RSRC_REGISTER_SPARSE

inline bool make_table(int ring) {
  io_uring_rsrc_register table{};
  table.nr = kRegions;
  table.flags = IORING_RSRC_REGISTER_SPARSE;
  return register_with(ring, IORING_REGISTER_BUFFERS2, &table, sizeof table) == 0;
}

inline bool change_table(int ring, const Regions::Change& change) {
  iovec piece{reinterpret_cast<void*>(change.address), change.nbytes};
  io_uring_rsrc_update2 update{};
  update.offset = change.index;
  update.data = reinterpret_cast<std::uint64_t>(&piece);
  update.nr = 1;
  return register_with(ring, IORING_REGISTER_BUFFERS_UPDATE, &update, sizeof update) == 1;
}

#else

inline bool make_table(int) { return false; }
inline bool change_table(int, const Regions::Change&) { return false; }

#endif

}  // namespace overspill

#endif
