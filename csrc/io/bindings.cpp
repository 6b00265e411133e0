// overspill.io_engine._native: addresses and lengths in, plain tuples out. The Python side checks
// buffers and keeps them alive while they are in use; this side trusts it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <tuple>

#include "checksum.h"
#include "core.h"

namespace nb = nanobind;

namespace overspill {
namespace {

using SegmentTuple =
    std::tuple<std::uint32_t, std::uint64_t, std::uint64_t, std::uint64_t, std::uint64_t>;

void submit(Core& core, std::uint64_t id, bool write, bool urgent,
            const std::vector<SegmentTuple>& tuples) {
  std::vector<Segment> segments;
  segments.reserve(tuples.size());
  for (const auto& [lane, offset, address, nbytes, checksums] : tuples) {
    segments.push_back({lane, offset, address, nbytes, checksums});
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

}  // namespace
}  // namespace overspill

NB_MODULE(_native, m) {
  using namespace overspill;
  nb::set_leak_warnings(false);  // a run that ends by an exception still has its frames
  nb::class_<Faults>(m, "Faults")
      .def(nb::init<>())
      .def_rw("seed", &Faults::seed)
      .def_rw("delay", &Faults::delay)
      .def_rw("short_transfer", &Faults::short_transfer)
      .def_rw("again", &Faults::again)
      .def_rw("io_error", &Faults::io_error)
      .def_rw("no_space", &Faults::no_space)
      .def_rw("bit_flip", &Faults::bit_flip)
      .def_rw("torn_write", &Faults::torn_write)
      .def_rw("lost_write", &Faults::lost_write)
      .def_rw("misdirected", &Faults::misdirected)
      .def_rw("longest_delay_us", &Faults::longest_delay_us);
  nb::class_<Core>(m, "Core")
      .def(nb::init<const std::vector<int>&, const std::string&, std::uint32_t, std::uint32_t,
                    const Faults&>())
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
  m.def("uring_refusal", &uring_refusal);
  m.def("crc32", [](std::uintptr_t address, std::size_t nbytes, std::uint32_t seed) {
    const nb::gil_scoped_release released;
    return crc32(reinterpret_cast<const void*>(address), nbytes, seed);
  });
  m.def("crc32_by",
        [](const std::string& way, std::uintptr_t address, std::size_t nbytes, std::uint32_t seed) {
          const nb::gil_scoped_release released;
          return crc32_by(way, reinterpret_cast<const void*>(address), nbytes, seed);
        });
  m.def("crc32_ways", &crc32_ways);
}
