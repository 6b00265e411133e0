// The engine's own core over a disk that makes mistakes.
#include "bind_core.h"
#include "faulty.h"

NB_MODULE(overspill_faulty_disk, m) {
  using namespace overspill;
  nb::set_leak_warnings(false);
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
  bind_core(m).def("__init__", [](Core* self, const std::vector<int>& fds, const Faults& faults,
                                  std::uint32_t block_bytes, std::uint32_t depth) {
    const SubmitterMaker make = [faults](std::shared_ptr<Lane> lane, std::uint32_t at_once) {
      return make_faulty(std::move(lane), at_once, faults);
    };
    new (self) Core(fds, make, block_bytes, depth);
  });
}
