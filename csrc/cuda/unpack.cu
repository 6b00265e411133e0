// Frozen weights from the format that they are kept in, on the GPU: the twin of csrc/cpu/packed.h.
// A thread takes eight elements; launch with any number of threads that covers them.
#include "numbers.cuh"

namespace overspill {

constexpr u32 kEach = 8;
constexpr u32 kPackedBlock = 64;
constexpr u32 kScaleBlock = 256;
constexpr float kInt8Step = 7.874015718698502e-3f;  // 1 / 127

__device__ __forceinline__ void write(int type, void* to, u64 at, float value) {
  if (type == kF32) {
    static_cast<float*>(to)[at] = value;
  } else {
    const u32 half = type == kF16 ? to_f16(value) : even_half(bits(value));
    static_cast<u16*>(to)[at] = static_cast<u16>(half);
  }
}

__device__ __forceinline__ u64 first_element() {
  return (static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x) * kEach;
}

extern "C" __global__ void unpack_nf4(const u8* codes, const u8* scale_codes, const float* scales,
                                      const float* offset, const float* table,
                                      const float* scale_table, u64 numel, void* weight, int type) {
  const u64 first = first_element();
  if (first >= numel) return;
  const u64 block = first / kPackedBlock;
  const float upper = mul(scale_table[scale_codes[block]], scales[block / kScaleBlock]);
  const float scale = add(upper, *offset);
  for (u32 k = 0; k < kEach && first + k < numel; ++k) {
    const u8 pair = codes[(first + k) / 2];
    write(type, weight, first + k, mul(table[k % 2 == 0 ? pair >> 4 : pair & 15], scale));
  }
}

extern "C" __global__ void unpack_int8(const signed char* codes, const float* scales, u64 columns,
                                       u64 numel, void* weight, int type) {
  const u64 first = first_element();
  for (u32 k = 0; k < kEach && first + k < numel; ++k) {
    const u64 at = first + k;
    const float value = mul(static_cast<float>(codes[at]), scales[at / columns]);
    write(type, weight, at, mul(value, kInt8Step));
  }
}

}  // namespace overspill
