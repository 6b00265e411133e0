#include "clocks.h"

namespace testdev {

// Makes `at` a border between spans.
void Shadow::cut(uintptr_t at) {
  auto next = spans_.upper_bound(at);
  if (next == spans_.begin()) return;
  auto& [start, span] = *std::prev(next);
  if (start == at || span.stop <= at) return;
  Span rest = span;
  span.stop = at;
  spans_.emplace(at, std::move(rest));
}

void Shadow::access(const Access& access, const Mark& mark, const Clock& clock,
                    std::vector<Race>& races) {
  if (access.start >= access.stop) return;
  cut(access.start);
  cut(access.stop);
  bool told = false;
  auto check = [&](const Mark& before, bool wrote, uintptr_t start, uintptr_t stop) {
    if (before.at == 0 || before.at <= clock[before.stream] || told) return;
    told = true;
    races.push_back({before, mark, wrote, access.writes, start, stop - start});
  };
  auto from = spans_.lower_bound(access.start);
  for (auto it = from; it != spans_.end() && it->first < access.stop; ++it) {
    Span& span = it->second;
    check(span.write, true, it->first, span.stop);
    if (access.writes) {
      for (const Mark& read : span.reads) check(read, false, it->first, span.stop);
    }
  }
  if (access.writes) {
    auto to = spans_.lower_bound(access.stop);
    spans_.erase(from, to);
    spans_.emplace(access.start, Span{access.stop, mark, {}});
    return;
  }
  uintptr_t at = access.start;  // what nobody has touched yet gets a span too
  while (at < access.stop) {
    auto it = spans_.lower_bound(at);
    if (it == spans_.end() || it->first > at) {
      uintptr_t stop = it == spans_.end() ? access.stop : std::min(access.stop, it->first);
      it = spans_.emplace(at, Span{stop, {0, 0, ""}, {}}).first;
    }
    auto& reads = it->second.reads;
    auto same = std::find_if(reads.begin(), reads.end(),
                             [&](const Mark& read) { return read.stream == mark.stream; });
    if (same == reads.end()) {
      reads.push_back(mark);
    } else {
      *same = mark;
    }
    at = it->second.stop;
  }
}

void Shadow::forget(uintptr_t start, uintptr_t stop) {
  cut(start);
  cut(stop);
  spans_.erase(spans_.lower_bound(start), spans_.lower_bound(stop));
}

}  // namespace testdev
