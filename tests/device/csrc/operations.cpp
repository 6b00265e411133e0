// The operations that no kernel of the CPU can serve: memory, views, copies, single values.
#include <ATen/EmptyTensor.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <ATen/ops/_local_scalar_dense_native.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_cpu_dispatch.h>
#include <ATen/ops/is_set_to_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_as_complex_native.h>
#include <ATen/ops/view_as_real_native.h>
#include <ATen/ops/view_native.h>
#include <torch/library.h>

#include "views.h"

namespace testdev {
namespace {

using at::Tensor;
constexpr c10::DispatchKeySet kKeys(c10::DispatchKey::PrivateUse1);

Tensor empty(c10::IntArrayRef sizes, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool> pinned,
             std::optional<at::MemoryFormat> format) {
  TORCH_CHECK(!pinned.value_or(false), "only memory of the host can be pinned");
  return at::detail::empty_generic(sizes, c10::GetAllocator(at::kPrivateUse1), kKeys,
                                   c10::dtype_or_default(dtype), format);
}

Tensor empty_strided(c10::IntArrayRef sizes, c10::IntArrayRef strides,
                     std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                     std::optional<at::Device>, std::optional<bool> pinned) {
  TORCH_CHECK(!pinned.value_or(false), "only memory of the host can be pinned");
  return at::detail::empty_strided_generic(sizes, strides, c10::GetAllocator(at::kPrivateUse1),
                                           kKeys, c10::dtype_or_default(dtype));
}

const Tensor& resize_(const Tensor& self, c10::IntArrayRef sizes,
                      std::optional<at::MemoryFormat> format) {
  return at::native::resize_(self, sizes, format);
}

Tensor& set_storage(Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef sizes,
                    c10::IntArrayRef strides) {
  return at::cpu::set_(self, source, offset, sizes, strides);
}

Tensor& set_whole_storage(Tensor& self, at::Storage source) {
  return at::native::set_(self, source);
}

Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return at::native::set_tensor_(self, source);
}

Tensor& set_nothing(Tensor& self) {
  at::Storage none(c10::Storage::use_byte_size_t(), 0, c10::GetAllocator(at::kPrivateUse1), true);
  return self.set_(none, 0, {0}, {});
}

at::Scalar local_scalar_dense(const Tensor& self) {
  Device& device = Device::get();
  const int stream = current_stream();
  at::Scalar value;
  const Tensor seen = seen_by_worker(self);
  device.run_now(stream, "item", {access_of(self, false)},
                 [&] { value = at::native::_local_scalar_dense_cpu(seen); });
  device.synchronize_stream(stream);
  return value;
}

bool same_bytes(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() && a.is_contiguous() &&
         b.is_contiguous();
}

// Pinned is what lies in one registered range; everything else is copied as pageable memory is.
bool pinned(const Tensor& host) {
  return Device::get().is_locked(reinterpret_cast<uintptr_t>(host.const_data_ptr()), host.nbytes());
}

void copy_in(const Tensor& host, const Tensor& to, bool non_blocking) {
  Device& device = Device::get();
  const int stream = current_stream();
  const Tensor seen = seen_by_worker(to);
  const auto nbytes = static_cast<int64_t>(to.nbytes());
  if (same_bytes(host, to) && pinned(host)) {
    // As DMA does: from memory as it is then, whoever owns it by that time.
    const void* from = host.const_data_ptr();
    device.submit(
        stream, "copy in", {access_of(to, true)},
        [=] { std::memcpy(seen.mutable_data_ptr(), from, nbytes); }, Link::In, nbytes);
    if (!non_blocking) device.synchronize_stream(stream);
    return;
  }
  ++device.counters.pageable_in;
  device.counters.pageable_bytes += nbytes;
  const Tensor staged = host.to(host.options(), /*non_blocking=*/false, /*copy=*/true);
  device.submit(
      stream, "pageable copy in", {access_of(to, true)}, [seen, staged] { seen.copy_(staged); },
      Link::In, nbytes);
}

void copy_out(const Tensor& from, const Tensor& host, bool non_blocking) {
  Device& device = Device::get();
  const int stream = current_stream();
  const Tensor seen = seen_by_worker(from);
  const auto nbytes = static_cast<int64_t>(from.nbytes());
  if (same_bytes(host, from) && pinned(host)) {
    void* to = host.mutable_data_ptr();
    device.submit(
        stream, "copy out", {access_of(from, false)},
        [=] { std::memcpy(to, seen.const_data_ptr(), nbytes); }, Link::Out, nbytes);
    if (!non_blocking) device.synchronize_stream(stream);
    return;
  }
  ++device.counters.pageable_out;
  device.counters.pageable_bytes += nbytes;
  device.submit(
      stream, "pageable copy out", {access_of(from, false)}, [seen, host] { host.copy_(seen); },
      Link::Out, nbytes);
  device.synchronize_stream(stream);
}

Tensor copy_from(const Tensor& self, const Tensor& to, bool non_blocking) {
  at::AutoDispatchBelowADInplaceOrView below;
  if (to.numel() == 0) return to;
  if (on_device(self) && on_device(to)) {
    const Tensor from = seen_by_worker(self), seen = seen_by_worker(to);
    Device::get().submit(current_stream(), "copy_", {access_of(self, false), access_of(to, true)},
                         [from, seen] { seen.copy_(from); });
  } else if (on_device(to)) {
    copy_in(self, to, non_blocking);
  } else {
    copy_out(self, to, non_blocking);
  }
  return to;
}

Tensor copy_from_and_resize(const Tensor& self, const Tensor& to) {
  at::native::resize_(to, self.sizes());
  return copy_from(self, to, false);
}

void record_stream(Tensor& self, c10::Stream stream) {
  Device::get().used_by(self.storage().data(), static_cast<int>(stream.id()));
}

bool may_share_impl(const Tensor& self, const Tensor& from) {
  auto plain = [](const Tensor& one) {
    return one.layout() == at::kStrided && (one.device().is_cpu() || on_device(one));
  };
  return self.key_set() == from.key_set() || (plain(self) && plain(from));
}

int64_t sdp_choice(const Tensor&, const Tensor&, const Tensor&, const std::optional<Tensor>&,
                   double, bool, std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

}  // namespace
}  // namespace testdev

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  using namespace testdev;
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", testdev::empty_strided);
  m.impl("as_strided", at::cpu::as_strided);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("view_as_real", at::native::view_as_real);
  m.impl("view_as_complex", at::native::view_as_complex);
  m.impl("is_set_to", at::native::is_set_to);
  m.impl("resize_", testdev::resize_);
  m.impl("set_.source_Storage", set_whole_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("set_", set_nothing);
  m.impl("_local_scalar_dense", local_scalar_dense);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("record_stream", testdev::record_stream);
  m.impl("_has_compatible_shallow_copy_type", may_share_impl);
  m.impl("_fused_sdp_choice", sdp_choice);
}

namespace at::native {
REGISTER_PRIVATEUSE1_DISPATCH(_fused_sdp_choice_stub, &testdev::sdp_choice)
}
