// Which work comes after which: a clock per stream, and who last touched every byte of the device.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace testdev {

constexpr int kStreams = 33;  // the default one, and those that torch.Stream() gives out in turn

// Of every stream, the number of the last task that is known to come before.
using Clock = std::array<uint64_t, kStreams>;

inline void join(Clock& into, const Clock& other) {
  for (int i = 0; i < kStreams; ++i) into[i] = std::max(into[i], other[i]);
}

// One task of one stream.  `name` outlives everything.
struct Mark {
  int stream;
  uint64_t at;
  const char* name;
};

struct Access {
  uintptr_t start, stop;  // addresses on the device
  bool writes;
};

// Two tasks touch the same bytes, one of them writes, and nothing orders them.
struct Race {
  Mark first, second;
  bool first_wrote, second_writes;
  uintptr_t start;
  uint64_t nbytes;
};

// The last write of every byte, and the reads since.
class Shadow {
 public:
  // Notes an access of the task `mark`, which comes after `clock`; tells of the first race it is
  // in.
  void access(const Access& access, const Mark& mark, const Clock& clock, std::vector<Race>& races);
  // Whatever happened to these bytes is over.
  void forget(uintptr_t start, uintptr_t stop);

 private:
  struct Span {
    uintptr_t stop;
    Mark write;               // at == 0: never written
    std::vector<Mark> reads;  // at most one per stream
  };
  void cut(uintptr_t at);
  std::map<uintptr_t, Span> spans_;
};

}  // namespace testdev
