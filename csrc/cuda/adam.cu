// AdamW and Adam over flat buffers on the GPU: one pass, the twin of csrc/cpu (rules.h, sweep.h).
//
// A warp takes a block of 256 elements, eight a thread, interleaved: accesses are coalesced
// whatever the alignment, and an int8 block's scale is found within the warp. Launch with any
// number of blocks of whole warps.
#include "numbers.cuh"

namespace overspill {

constexpr u32 kWarp = 32;
constexpr u32 kWarpsPerBlock = 8;

struct AdamJob {
  const void* grad;
  void* weight;
  void* master;
  void* moment[2];
  float* scale[2];
  u64 numel;
  u64 position;  // of element 0 in its whole buffer: a multiple of 32 (bf16) or 256 (int8 moments)
  float grad_scale, decay, l2, take1, keep2, take2, root_scale, eps, step_size;
  u32 noise_key;
  int grad_type, weight_type, master_kind;
};

__device__ __forceinline__ float read_weight(const AdamJob& job, u64 i) {
  if (job.master_kind == kSplitMaster) {
    return floats(
        join(static_cast<const u16*>(job.weight)[i], static_cast<const u16*>(job.master)[i]));
  }
  if (job.master_kind == kF32Master) return static_cast<const float*>(job.master)[i];
  return read_float(job.weight_type, job.weight, i);
}

// Returns whether the weight is finite as it was stored.
__device__ __forceinline__ bool write_weight(const AdamJob& job, u64 i, float value) {
  const u32 raw = bits(value);
  if (job.master_kind == kSplitMaster) static_cast<u16*>(job.master)[i] = static_cast<u16>(raw);
  if (job.master_kind == kF32Master) static_cast<float*>(job.master)[i] = value;
  if (job.weight_type == kF32) {
    static_cast<float*>(job.weight)[i] = value;
    return magnitude(raw) < kInfinity;
  }
  if (job.weight_type == kF16) {
    static_cast<u16*>(job.weight)[i] = static_cast<u16>(to_f16(value));
    return magnitude(raw) < kF16Limit;
  }
  const u32 half = job.master_kind == kNoMaster ? even_half(raw) : upper_half(raw);
  static_cast<u16*>(job.weight)[i] = static_cast<u16>(half);
  return magnitude(raw) < kBf16Limit;
}

template <int kFormat>
__device__ __forceinline__ float read_moment(const AdamJob& job, int k, u64 i) {
  if (kFormat == kF32Moments) return static_cast<const float*>(job.moment[k])[i];
  if (kFormat == kBf16Moments) return floats(u32(static_cast<const u16*>(job.moment[k])[i]) << 16);
  return from_code(static_cast<const u8*>(job.moment[k])[i], k == 0, job.scale[k][i / kBlock]);
}

__device__ __forceinline__ void step(const AdamJob& job, float g, float& w, float& mean,
                                     float& square) {
  g = mul(g, job.grad_scale);
  if (magnitude(bits(job.l2)) != 0u) g = add(g, mul(w, job.l2));
  w = mul(w, job.decay);
  mean = add(mean, mul(sub(g, mean), job.take1));
  square = add(mul(square, job.keep2), mul(mul(g, job.take2), g));
  const float denominator = add(mul(root(square), job.root_scale), job.eps);
  w = sub(w, div(mul(mean, job.step_size), denominator));
}

__device__ __forceinline__ u32 warp_highest(u32 value) {
  for (u32 away = kWarp / 2; away > 0; away /= 2) {
    const u32 other = __shfl_xor_sync(0xffffffffu, value, away);
    value = other > value ? other : value;
  }
  return value;
}

// What a thread staged of its int8 moments: between the update and the block's scale.
struct Staged {
  float value[2][kWarpsPerBlock][kBlock];
};

// Stores moment k of one element; int8 ones later. Raises ``highest`` to its magnitude.
template <int kFormat>
__device__ __forceinline__ void write_moment(const AdamJob& job, int k, u64 i, float value,
                                             float* staged, u32& highest) {
  const u32 size = magnitude(bits(value));
  highest = size > highest ? size : highest;
  if (kFormat == kF32Moments) {
    static_cast<float*>(job.moment[k])[i] = value;
  } else if (kFormat == kBf16Moments) {
    const u64 place = job.position + i;
    const u32 start = noise_start(place, k, job.noise_key);
    const u32 noise = noise_at<16>(start, static_cast<u32>(place % kBlock));
    static_cast<u16*>(job.moment[k])[i] = static_cast<u16>(noisy_half(bits(value), noise));
  } else {
    *staged = value;
  }
}

// Finds the scale of a block's moment k and encodes what the warp's threads staged, each its own.
__device__ __forceinline__ void encode(const AdamJob& job, int k, u64 begin, u32 lane,
                                       const float* staged, u32 highest) {
  const u32 most = warp_highest(highest);
  const float ideal = div(floats(most), k == 0 ? kSignedTop : kUnsignedTop);
  const float kept = bits(ideal) < bits(kSmallestScale) ? kSmallestScale : ideal;  // NaN stays
  // Every thread has read the old scale: the shuffles above come after that.
  if (lane == 0) job.scale[k][begin / kBlock] = kept;
  const float inverse = div(1.0f, kept);
  const u32 start = noise_start(job.position + begin, k, job.noise_key);
  for (u32 nth = lane; nth < kBlock && begin + nth < job.numel; nth += kWarp) {
    const u32 noise = noise_at<kCodeBits>(start, nth);
    static_cast<u8*>(job.moment[k])[begin + nth] =
        to_code(staged[nth], k == 0, inverse, noise, most == 0u ? 0u : 1u);
  }
}

template <int kFormat>
__device__ __forceinline__ void adam(const AdamJob& job, int* not_finite, Staged* staged) {
  const u32 lane = threadIdx.x % kWarp;
  const u32 warp = threadIdx.x / kWarp;
  const u64 warps = u64(gridDim.x) * kWarpsPerBlock;
  const u64 blocks = (job.numel + kBlock - 1) / kBlock;
  const u32 limit = kFormat == kBf16Moments ? kNoisyBf16Limit : kInfinity;
  bool finite = true;
  for (u64 b = u64(blockIdx.x) * kWarpsPerBlock + warp; b < blocks; b += warps) {
    const u64 begin = b * kBlock;
    u32 highest[2] = {0, 0};
#pragma unroll 2
    for (u32 nth = lane; nth < kBlock; nth += kWarp) {
      const u64 i = begin + nth;
      if (i >= job.numel) break;
      float w = read_weight(job, i);
      float mean = read_moment<kFormat>(job, 0, i);
      float square = read_moment<kFormat>(job, 1, i);
      step(job, read_float(job.grad_type, job.grad, i), w, mean, square);
      finite = write_weight(job, i, w) && finite;
      float* const first = staged == nullptr ? nullptr : &staged->value[0][warp][nth];
      float* const second = staged == nullptr ? nullptr : &staged->value[1][warp][nth];
      write_moment<kFormat>(job, 0, i, mean, first, highest[0]);
      write_moment<kFormat>(job, 1, i, square, second, highest[1]);
    }
    finite = finite && highest[0] < limit && highest[1] < limit;
    if constexpr (kFormat == kInt8Moments) {
      for (int k = 0; k < 2; ++k) encode(job, k, begin, lane, staged->value[k][warp], highest[k]);
    }
  }
  if (!finite) *not_finite = 1;
}

}  // namespace overspill

// ``not_finite`` is in page-locked host memory: whatever else goes over the link, copies that wait
// for a turn of it among them, no update waits for it.
extern "C" {
__global__ void adam_fp32(overspill::AdamJob job, int* not_finite) {
  overspill::adam<overspill::kF32Moments>(job, not_finite, nullptr);
}
__global__ void adam_bf16(overspill::AdamJob job, int* not_finite) {
  overspill::adam<overspill::kBf16Moments>(job, not_finite, nullptr);
}
__global__ void adam_int8(overspill::AdamJob job, int* not_finite) {
  __shared__ overspill::Staged staged;
  overspill::adam<overspill::kInt8Moments>(job, not_finite, &staged);
}
}
