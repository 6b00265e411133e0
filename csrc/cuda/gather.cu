// Gathers a unit's gradients into one flat buffer: copy, cast and sum of squares in one pass.
//
// The work is cut into tiles, each of one gradient; a thread block takes one tile. The sum of
// squares is of what was stored, in double, and always in the same order.
#include "numbers.cuh"

namespace overspill {

struct Tile {
  const void* from;
  u64 to;  // first element in the flat buffer
  u32 count;
  int type;
};

constexpr int kThreads = 256;

__device__ __forceinline__ float store_float(int type, void* to, u64 i, float value) {
  if (type == kF32) {
    static_cast<float*>(to)[i] = value;
    return value;
  }
  const u32 half = type == kBf16 ? even_half(bits(value)) : to_f16(value);
  static_cast<u16*>(to)[i] = static_cast<u16>(half);
  return type == kBf16 ? floats(half << 16) : from_f16(half);
}

}  // namespace overspill

// Launch with one block of kThreads threads for each tile; squares has one double for each.
extern "C" __global__ void gather(const overspill::Tile* tiles, void* flat, int flat_type,
                                  double* squares) {
  using namespace overspill;
  __shared__ double sums[kThreads];
  const Tile tile = tiles[blockIdx.x];
  double sum = 0.0;
  for (u32 i = threadIdx.x; i < tile.count; i += kThreads) {
    const double kept =
        store_float(flat_type, flat, tile.to + i, read_float(tile.type, tile.from, i));
    sum = __dadd_rn(sum, __dmul_rn(kept, kept));
  }
  sums[threadIdx.x] = sum;
  for (u32 half = kThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (threadIdx.x < half)
      sums[threadIdx.x] = __dadd_rn(sums[threadIdx.x], sums[threadIdx.x + half]);
  }
  if (threadIdx.x == 0) squares[blockIdx.x] = sums[0];
}
