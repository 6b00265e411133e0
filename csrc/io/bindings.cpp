// overspill.io_engine._native. The Python side checks buffers and keeps them alive while they are
// in use; this side trusts it.
#include "bind_core.h"
#include "checksum.h"

NB_MODULE(_native, m) {
  using namespace overspill;
  nb::set_leak_warnings(false);  // a run that ends by an exception still has its frames
  bind_core(m).def("__init__",
                   [](Core* self, const std::vector<int>& fds, const std::string& backend,
                      std::uint32_t block_bytes, std::uint32_t depth) {
                     new (self) Core(fds, submitter_maker(backend), block_bytes, depth);
                   });
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
