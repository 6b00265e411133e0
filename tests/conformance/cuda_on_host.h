// Enough of CUDA to run our kernels on the host, for tests of their arithmetic: every CUDA thread
// is a std::thread, one group of them (a warp, or a thread block) at a time.
#pragma once
#include <cmath>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <thread>
#include <vector>

#define __global__
#define __device__
#define __forceinline__ inline
#define __shared__ static

struct Index {
  unsigned x;
};
inline thread_local Index threadIdx, blockIdx, blockDim, gridDim;

class Meeting {
 public:
  explicit Meeting(unsigned count) : count_(count) {}
  void wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    const unsigned long turn = turn_;
    if (++here_ == count_) {
      here_ = 0;
      ++turn_;
      all_.notify_all();
    } else {
      all_.wait(lock, [&] { return turn_ != turn; });
    }
  }

 private:
  const unsigned count_;
  unsigned here_ = 0;
  unsigned long turn_ = 0;
  std::mutex mutex_;
  std::condition_variable all_;
};
inline Meeting* meeting = nullptr;
inline unsigned exchanged[32];

inline unsigned __float_as_uint(float value) {
  unsigned raw;
  std::memcpy(&raw, &value, sizeof raw);
  return raw;
}
inline float __uint_as_float(unsigned raw) {
  float value;
  std::memcpy(&value, &raw, sizeof value);
  return value;
}
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fsqrt_rn(float a) { return std::sqrt(a); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dmul_rn(double a, double b) { return a * b; }
inline void __syncthreads() { meeting->wait(); }
inline unsigned __brev(unsigned value) {
  unsigned reversed = 0;
  for (int bit = 0; bit < 32; ++bit) reversed |= ((value >> bit) & 1u) << (31 - bit);
  return reversed;
}
inline unsigned __shfl_xor_sync(unsigned, unsigned value, unsigned away) {
  exchanged[threadIdx.x % 32] = value;
  meeting->wait();
  const unsigned other = exchanged[(threadIdx.x % 32) ^ away];
  meeting->wait();
  return other;
}

// Runs a grid of one-dimensional thread blocks, ``together`` threads at a time.
template <class Kernel>
void launch(unsigned blocks, unsigned threads, unsigned together, Kernel kernel) {
  for (unsigned block = 0; block < blocks; ++block) {
    for (unsigned first = 0; first < threads; first += together) {
      Meeting group(together);
      meeting = &group;
      std::vector<std::thread> running;
      for (unsigned thread = first; thread < first + together; ++thread) {
        running.emplace_back([=] {
          threadIdx = {thread};
          blockIdx = {block};
          blockDim = {threads};
          gridDim = {blocks};
          kernel();
        });
      }
      for (std::thread& one : running) one.join();
    }
  }
}
