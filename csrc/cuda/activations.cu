// Saved activations in packed blocks, on the GPU: the twin of csrc/cpu/activations.h.
// Launch with any number of threads that covers the elements.
#include "numbers.cuh"

namespace overspill {

constexpr u32 kActivationBlock = 128;
constexpr u32 kActivationBytes = kActivationBlock + 4;
constexpr u32 kWarp = 32;
constexpr u32 kEach = 4;                      // elements of a thread
constexpr u32 kLeastMagnitude = 0x0da24260u;  // 1e-30f
constexpr float kMostCode = 126.0f;
constexpr int kTinyCode = 127;
constexpr float kTiny = 0x1p-6f;
constexpr float kWhole = 12582912.0f;  // see csrc/cpu/activations.h
constexpr u32 kQuietNaN = 0x7fc00000u;

__device__ __forceinline__ u32 larger(u32 a, u32 b) { return a > b ? a : b; }

__device__ __forceinline__ u32 code_of(float value, float inverse) {
  const u32 raw = bits(value), code = bits(add(mul(value, inverse), kWhole));
  if (code != bits(kWhole) || magnitude(raw) == 0u) return code & 0xffu;
  return static_cast<u32>(raw >> 31 != 0u ? -kTinyCode : kTinyCode) & 0xffu;
}

// A warp packs one block. All its threads take part, so they may have no elements.
extern "C" __global__ void pack_activation(const void* values, u64 numel, u8* blocks, int type) {
  const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const u64 block = thread / kWarp, first = thread * kEach;
  float value[kEach];
  u32 most = 0;
  for (u32 k = 0; k < kEach; ++k) {
    value[k] = first + k < numel ? read_float(type, values, first + k) : 0.0f;
    most = larger(most, magnitude(bits(value[k])));
  }
  for (u32 away = kWarp / 2; away > 0; away /= 2) {
    most = larger(most, __shfl_xor_sync(0xffffffffu, most, away));
  }
  if (first >= numel) return;
  u8* to = blocks + block * kActivationBytes;
  const bool whole = most < kInfinity && most >= kLeastMagnitude;
  const u32 scale = most >= kInfinity ? kQuietNaN : bits(div(floats(most), kMostCode));
  const float inverse = whole ? div(kMostCode, floats(most)) : 0.0f;
  if (thread % kWarp == 0) *reinterpret_cast<u32*>(to) = whole || most >= kInfinity ? scale : 0u;
  u32 codes = 0;
  for (u32 k = 0; k < kEach; ++k) {
    codes |= (whole ? code_of(value[k], inverse) : 0u) << (8 * k);
  }
  u8* at = to + 4 + first % kActivationBlock;
  if (first + kEach <= numel) {
    *reinterpret_cast<u32*>(at) = codes;
  } else {
    for (u32 k = 0; first + k < numel; ++k) at[k] = static_cast<u8>(codes >> (8 * k));
  }
}

extern "C" __global__ void unpack_activation(const u8* blocks, u64 numel, void* values, int type) {
  const u64 thread = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
  const u64 first = thread * kEach;
  if (first >= numel) return;
  const u8* from = blocks + first / kActivationBlock * kActivationBytes;
  const u32 scale = *reinterpret_cast<const u32*>(from);
  const u8* codes = from + 4 + first % kActivationBlock;
  for (u32 k = 0; k < kEach && first + k < numel; ++k) {
    const int code = static_cast<signed char>(codes[k]);
    const bool tiny = code == kTinyCode || code == -kTinyCode;
    const float factor = tiny ? (code > 0 ? kTiny : -kTiny) : static_cast<float>(code);
    const float value =
        magnitude(scale) > kInfinity ? floats(kQuietNaN) : mul(factor, floats(scale));
    if (type == kF32) {
      static_cast<float*>(values)[first + k] = value;
    } else {
      const u32 half = type == kF16 ? to_f16(value) : even_half(bits(value));
      static_cast<u16*>(values)[first + k] = static_cast<u16>(half);
    }
  }
}

}  // namespace overspill
