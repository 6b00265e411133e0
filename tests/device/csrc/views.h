// What the worker threads see of a tensor on the device.
#pragma once

#include <ATen/ATen.h>

#include "device.h"

namespace testdev {

// The bytes from the first to the last element.
inline Access access_of(const at::Tensor& tensor, bool writes) {
  if (tensor.numel() == 0) return {0, 0, writes};
  int64_t last = 0;
  for (int64_t i = 0; i < tensor.dim(); ++i) last += (tensor.size(i) - 1) * tensor.stride(i);
  const auto start = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {start, start + (last + 1) * tensor.itemsize(), writes};
}

// A CPU tensor over the same bytes, of the same shape; only a worker, or who has waited, uses it.
inline at::Tensor seen_by_worker(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  char* bytes = Device::get().worker(tensor.const_data_ptr());
  at::Tensor seen = at::from_blob(bytes, tensor.sizes(), tensor.strides(), options);
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number())
    seen.unsafeGetTensorImpl()->set_wrapped_number(true);
  return seen;
}

inline bool on_device(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == c10::DeviceType::PrivateUse1;
}

}  // namespace testdev
