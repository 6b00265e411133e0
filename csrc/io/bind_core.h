// Core for Python: addresses and lengths in, plain tuples out. How one is made is up to the module.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>
#include <vector>

#include "core.h"

namespace overspill {
namespace {

namespace nb = nanobind;

using SegmentTuple =
    std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t, bool>;

void submit(Core& core, std::uint64_t id, bool write, bool urgent,
            const std::vector<SegmentTuple>& tuples) {
  std::vector<Segment> segments;
  segments.reserve(tuples.size());
  for (const auto& [lane, offset, address, nbytes, checksums, changing] : tuples) {
    segments.push_back({lane, offset, address, nbytes, checksums, changing});
  }
  const nb::gil_scoped_release released;
  core.submit(id, write ? Op::kWrite : Op::kRead, urgent, segments);
}

nb::list collect(Core& core, double timeout_s) {
  std::vector<Result> results;
  {
    const nb::gil_scoped_release released;
    results = core.collect(timeout_s);
  }
  nb::list list;
  for (const Result& r : results) {
    list.append(nb::make_tuple(r.id, static_cast<int>(r.outcome), r.error, r.lane, r.offset,
                               r.nbytes, r.expected, r.found, r.started_ns, r.finished_ns));
  }
  return list;
}

nb::list stats(const Core& core) {
  nb::list list;
  for (const LaneStats& s : core.stats()) {
    list.append(nb::make_tuple(s.bytes[0], s.bytes[1], s.blocks[0], s.blocks[1], s.retries,
                               s.busy_ns, s.in_flight, s.queued));
  }
  return list;
}

template <class Result, class... Arguments>
auto unlocked(Result (Core::*method)(Arguments...)) {
  return [method](Core& core, Arguments... arguments) -> Result {
    const nb::gil_scoped_release released;
    return (core.*method)(arguments...);
  };
}

nb::class_<Core> bind_core(nb::module_& m) {
  return nb::class_<Core>(m, "Core")
      .def("submit", &submit)
      .def("collect", &collect)
      .def("cancel", unlocked(&Core::cancel))
      .def("promote", unlocked(&Core::promote))
      .def("wake", &Core::wake)
      .def("add_memory", unlocked(&Core::add_memory))
      .def("drop_memory", unlocked(&Core::drop_memory))
      .def("registered_bytes", &Core::registered_bytes)
      .def("stats", &stats)
      .def("latencies", &Core::latencies)
      .def("close", unlocked(&Core::close));
}

}  // namespace
}  // namespace overspill
