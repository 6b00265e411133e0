// What torch asks of a backend: guard, hooks, allocators, generators, autocast; and our own door.
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/extension.h>

#include "generator.h"
#include "views.h"

namespace testdev {

void register_kernels();

namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
const c10::Device kDevice(kType, 0);

c10::Stream as_stream(int id) { return c10::Stream(c10::Stream::UNSAFE, kDevice, id); }

// -- streams and events -------------------------------------------------------------------------

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device) const override { return kDevice; }
  c10::Device getDevice() const override { return kDevice; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() <= 0, "there is one test device, not a number ", device.index());
  }
  void uncheckedSetDevice(c10::Device) const noexcept override {}
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const override { return as_stream(current_stream()); }
  c10::Stream getDefaultStream(c10::Device) const override { return as_stream(0); }
  c10::Stream getStreamFromGlobalPool(c10::Device, bool) const override {
    return as_stream(Device::get().new_stream());
  }
  c10::Stream getNewStream(c10::Device, int) const override {
    return as_stream(Device::get().new_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    return as_stream(exchange_stream(static_cast<int>(stream.id())));
  }
  bool queryStream(const c10::Stream& stream) const override {
    return Device::get().query_stream(static_cast<int>(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    Device::get().synchronize_stream(static_cast<int>(stream.id()));
  }
  void synchronizeDevice(c10::DeviceIndex) const override { Device::get().synchronize_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    Device::get().used_by(data.get(), static_cast<int>(stream.id()));
  }
  void* getStreamNativeHandle(const c10::Stream stream) const override {
    return reinterpret_cast<void*>(stream.id());
  }

  // An event is a pointer to the point that it was recorded at last.
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex,
              const c10::EventFlag) const override {
    if (*event == nullptr) *event = new PointPtr;
    *static_cast<PointPtr*>(*event) = Device::get().record(static_cast<int>(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr)
      Device::get().block(static_cast<int>(stream.id()), *static_cast<PointPtr*>(event));
  }
  bool queryEvent(void* event) const override {
    return event == nullptr || Device::get().query(**static_cast<PointPtr*>(event));
  }
  void synchronizeEvent(void* event) const override {
    if (event != nullptr) Device::get().synchronize(**static_cast<PointPtr*>(event));
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override {
    delete static_cast<PointPtr*>(event);
  }
  double elapsedTime(void* first, void* second, const c10::DeviceIndex) const override {
    TORCH_CHECK(queryEvent(first) && queryEvent(second), "both events must be over");
    return static_cast<double>((*static_cast<PointPtr*>(second))->when_ns -
                               (*static_cast<PointPtr*>(first))->when_ns) /
           1e6;
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

// -- memory -------------------------------------------------------------------------------------

void free_device(void* address) { Device::get().free(address); }

struct Allocator final : c10::DeviceAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    void* address = Device::get().allocate(nbytes);
    if (address == nullptr && nbytes != 0) {
      const auto [held, budget] = Device::get().with_memory([](Memory& memory) {
        return std::pair<int64_t, size_t>(memory.stats.allocated, memory.budget);
      });
      TORCH_CHECK_WITH(OutOfMemoryError, false, "the test device is out of memory: ", nbytes,
                       " bytes were asked for, ", held, " of ", budget, " are taken");
    }
    return {address, address, free_device, kDevice};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_device; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    Device& device = Device::get();
    const auto start = [](const void* at) { return reinterpret_cast<uintptr_t>(at); };
    device.submit(
        current_stream(), "copy of a storage",
        {{start(from), start(from) + nbytes, false}, {start(to), start(to) + nbytes, true}},
        [to = device.worker(to), from = device.worker(from), nbytes] {
          std::memcpy(to, from, nbytes);
        });
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t) override { Device::get().empty_cache(); }
  void recordStream(const c10::DataPtr& data, c10::Stream stream) override {
    Device::get().used_by(data.get(), static_cast<int>(stream.id()));
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    const Stats now = Device::get().with_memory([](Memory& memory) { return memory.stats; });
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto set = [](auto& of, int64_t current, int64_t peak) {
      of[0].current = current;
      of[0].peak = peak;
    };
    set(stats.allocated_bytes, now.allocated, now.allocated_peak);
    set(stats.active_bytes, now.allocated, now.allocated_peak);
    set(stats.requested_bytes, now.requested, now.requested_peak);
    set(stats.reserved_bytes, now.reserved, now.reserved);
    set(stats.allocation, now.allocations - now.frees, now.allocations);
    stats.num_ooms = now.failures;
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {}
  void resetPeakStats(c10::DeviceIndex) override {
    Device::get().with_memory([](Memory& memory) {
      memory.stats.allocated_peak = memory.stats.allocated;
      memory.stats.requested_peak = memory.stats.requested;
    });
  }
  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex) override {
    return Device::get().with_memory([](Memory& memory) {
      const size_t taken = std::min(memory.budget, static_cast<size_t>(memory.stats.reserved));
      return std::pair<size_t, size_t>(memory.budget - taken, memory.budget);
    });
  }
};
Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator)

// torch's own pinned memory: every block is registered while it lives.
void free_pinned(void* address) {
  Device& device = Device::get();
  device.wait_idle();  // as the caching allocator of CUDA, which records events
  device.unlock_host(reinterpret_cast<uintptr_t>(address));
  std::free(address);
}

struct HostAllocator final : at::HostAllocator {
  c10::DataPtr allocate(size_t nbytes) override {
    if (nbytes == 0) return {nullptr, nullptr, free_pinned, c10::Device(at::kCPU)};
    void* address = std::aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    Device::get().lock_host(reinterpret_cast<uintptr_t>(address), nbytes);
    return {address, address, free_pinned, c10::Device(at::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return free_pinned; }
  void copy_data(void* to, const void* from, std::size_t nbytes) const override {
    std::memcpy(to, from, nbytes);
  }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {}
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAllocator host_allocator;
REGISTER_HOST_ALLOCATOR(kType, &host_allocator)

// -- random numbers -----------------------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  Generator()
      : GeneratorImpl(kDevice, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        cpu(at::detail::createCPUGenerator()) {}
  void set_current_seed(uint64_t seed) override { cpu.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { cpu.set_offset(offset); }
  uint64_t get_offset() const override { return cpu.get_offset(); }
  uint64_t current_seed() const override { return cpu.current_seed(); }
  uint64_t seed() override { return impl()->seed(); }
  void set_state(const c10::TensorImpl& state) override { impl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return impl()->get_state(); }
  Generator* clone_impl() const override {
    auto* copy = new Generator;
    copy->cpu = cpu.clone();
    return copy;
  }
  const c10::intrusive_ptr<c10::GeneratorImpl>& impl() const { return cpu.getIntrusivePtr(); }
  mutable at::Generator cpu;
};

// -- hooks --------------------------------------------------------------------------------------

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  void init() const override {}
  c10::DeviceIndex deviceCount() const override { return 1; }
  void setCurrentDevice(c10::DeviceIndex) const override {}
  c10::DeviceIndex getCurrentDevice() const override { return 0; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex) const override { return 0; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return default_generator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return new_generator(); }
  at::Device getDeviceFromPtr(void*) const override { return kDevice; }
  bool isPinnedPtr(const void* data) const override {
    return Device::get().is_locked(reinterpret_cast<uintptr_t>(data), 1);
  }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator; }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t nbytes) const override {
    auto* impl = storage.unsafeGetStorageImpl();
    const size_t kept = std::min(impl->nbytes(), nbytes);
    c10::DataPtr made = allocator.allocate(nbytes);
    if (kept != 0) allocator.copy_data(made.get(), impl->data(), kept);
    impl->set_data_ptr_noswap(std::move(made));
    impl->set_nbytes(nbytes);
  }
};

}  // namespace

const at::Generator& default_generator() {
  static at::Generator generator = new_generator();
  return generator;
}

at::Generator new_generator() { return at::make_generator<Generator>(); }

at::Generator cpu_generator_of(const at::Generator& generator) {
  auto* own = dynamic_cast<Generator*>(generator.unsafeGetGeneratorImpl());
  TORCH_CHECK(own != nullptr, "a generator of the CPU draws nothing on the test device");
  return own->cpu;
}

}  // namespace testdev

// -- autocast -----------------------------------------------------------------------------------

namespace at::autocast {

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
#define LOWER(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
  AT_FORALL_LOWER_PRECISION_FP(LOWER)
#undef LOWER
#define FULL(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
  AT_FORALL_FP32(FULL)
#undef FULL
#define FULL_OUT(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
  AT_FORALL_FP32_SET_OPT_DTYPE(FULL_OUT)
#undef FULL_OUT
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
#define PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_PROMOTE(PROMOTE)
#undef PROMOTE
}

}  // namespace at::autocast

// -- our own door -------------------------------------------------------------------------------

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  using testdev::Device;
  static Device& device = Device::get();
  at::RegisterPrivateUse1HooksInterface(new testdev::Hooks);
  testdev::register_kernels();
  m.def("register_host", [](uintptr_t start, size_t nbytes) { device.lock_host(start, nbytes); });
  m.def("unregister_host", [](uintptr_t start) { device.unlock_host(start); });
  m.def("registered_bytes", [] { return device.locked_bytes(); });
  m.def("set_lockable_bytes", [](int64_t nbytes) { device.settings.lockable = nbytes; });
  m.def("set_budget", [](size_t nbytes) {
    device.with_memory([&](testdev::Memory& memory) { memory.budget = nbytes; });
  });
  m.def("fail_allocation", [](uint64_t number) {
    device.with_memory([&](testdev::Memory& memory) { memory.fail_in = number; });
  });
  m.def("set_delays", [](uint64_t seed, int percent, int longest_us) {
    device.settings.pace.seed = seed;
    device.settings.pace.delayed_percent = percent;
    device.settings.pace.delay_us = longest_us;
  });
  m.def("set_rates", [](double in_bytes_s, double out_bytes_s) {
    device.settings.pace.in_bytes_s = in_bytes_s;
    device.settings.pace.out_bytes_s = out_bytes_s;
  });
  m.def("check_races", [](bool check) { device.settings.races = check; });
  m.def("take_races", [] { return device.take_races(); });
  m.def("break_down", [](const std::string& why) { device.break_down(why); });
  m.def("counters", [] {
    const auto& counters = device.counters;
    py::dict dict;
    dict["tasks"] = counters.tasks.load();
    dict["learned"] = counters.learned.load();
    dict["pageable_in"] = counters.pageable_in.load();
    dict["pageable_out"] = counters.pageable_out.load();
    dict["pageable_bytes"] = counters.pageable_bytes.load();
    dict["host_waits"] = counters.host_waits.load();
    return dict;
  });
  m.def("sleep", [](int64_t us) {  // a kernel that takes its time, on the current stream
    device.submit(testdev::current_stream(), "sleep", {},
                  [us] { std::this_thread::sleep_for(std::chrono::microseconds(us)); });
  });
  m.def("default_generator", [] { return testdev::default_generator(); });
  Py_AtExit([] { Device::get().stop(); });  // after all that Python ends, whoever began first
}
