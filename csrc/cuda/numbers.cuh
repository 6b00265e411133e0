// Number formats of the optimizer on the GPU: the same arithmetic as csrc/cpu (halves.h,
// moments.h), bit for bit. Arithmetic is written as instructions that say how they round: no
// compiler flag can contract a product and a sum, or take what is denormal for zero, as CuPy asks
// of every kernel (-ftz=true, after what its caller asks). Other numbers are compared by their
// bits. No standard headers: this also compiles at run time (NVRTC).
#pragma once

namespace overspill {

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef unsigned char u8;

enum { kF32 = 0, kBf16 = 1, kF16 = 2 };  // types of gradients and weights
enum { kNoMaster = 0, kSplitMaster = 1, kF32Master = 2 };
enum { kF32Moments = 0, kBf16Moments = 1, kInt8Moments = 2 };

constexpr u32 kBlock = 256;  // elements that share an int8 scale, and a start of the noise
constexpr u32 kInfinity = 0x7f800000u;
constexpr u32 kBf16Limit = 0x7f7f8000u;
constexpr u32 kNoisyBf16Limit = 0x7f7f0001u;
constexpr u32 kF16Limit = 0x477ff000u;

__device__ __forceinline__ u32 bits(float value) { return __float_as_uint(value); }
__device__ __forceinline__ float floats(u32 value) { return __uint_as_float(value); }
__device__ __forceinline__ u32 magnitude(u32 raw) { return raw & 0x7fffffffu; }

#ifdef __CUDA_ARCH__
__device__ __forceinline__ float add(float a, float b) {
  float sum;
  asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
  return sum;
}
__device__ __forceinline__ float sub(float a, float b) {
  float difference;
  asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
  return difference;
}
__device__ __forceinline__ float mul(float a, float b) {
  float product;
  asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
  return product;
}
__device__ __forceinline__ float div(float a, float b) {
  float quotient;
  asm("div.rn.f32 %0, %1, %2;" : "=f"(quotient) : "f"(a), "f"(b));
  return quotient;
}
__device__ __forceinline__ float root(float a) {
  float result;
  asm("sqrt.rn.f32 %0, %1;" : "=f"(result) : "f"(a));
  return result;
}
#else  // on the host, for tests, and where HIP stands in for CUDA
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ float sub(float a, float b) { return __fadd_rn(a, -b); }
__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ float div(float a, float b) { return __fdiv_rn(a, b); }
__device__ __forceinline__ float root(float a) { return __fsqrt_rn(a); }
#endif

__device__ __forceinline__ float from_f16(u32 half) {
  const u32 sign = (half & 0x8000u) << 16;
  const u32 body = (half & 0x7fffu) << 13;
  const u32 exponent = body & 0x0f800000u;
  if (exponent == 0x0f800000u) {
    const u32 quiet = (body & 0x007fffffu) != 0u ? 0x00400000u : 0u;
    return floats(body | kInfinity | quiet | sign);
  }
  if (exponent == 0u) {
    const float tiny = sub(floats(body + (113u << 23)), floats(113u << 23));
    return floats(bits(tiny) | sign);
  }
  return floats((body + ((127u - 15u) << 23)) | sign);
}

__device__ __forceinline__ u32 to_f16(float value) {
  const u32 raw = bits(value);
  const u32 sign = (raw >> 16) & 0x8000u;
  const u32 body = magnitude(raw);
  if (body > kInfinity) return ((body >> 13) & 0x3ffu) | 0x7e00u | sign;
  if (body >= kF16Limit) return 0x7c00u | sign;
  if (body < 0x38800000u) return (bits(add(floats(body), 0.5f)) - 0x3f000000u) | sign;
  return ((body - ((127u - 15u) << 23) + 0xfffu + ((body >> 13) & 1u)) >> 13) | sign;
}

// To nearest, ties to even: weights without a master, and gradients.
__device__ __forceinline__ u32 even_half(u32 raw) {
  if (magnitude(raw) > kInfinity) return (raw >> 16) | 0x40u;
  return (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
}
// To nearest, ties away from zero: weights that have a master.
__device__ __forceinline__ u32 upper_half(u32 raw) {
  return (magnitude(raw) > kInfinity ? raw : raw + 0x8000u) >> 16;
}
__device__ __forceinline__ u32 join(u32 upper, u32 lower) {
  return (((upper << 16) | lower) ^ 0x8000u) - 0x8000u;
}
__device__ __forceinline__ u32 noisy_half(u32 raw, u32 noise) {
  return (magnitude(raw) >= kInfinity ? raw : raw + noise) >> 16;
}

__device__ __forceinline__ float read_float(int type, const void* from, u64 i) {
  if (type == kF32) return static_cast<const float*>(from)[i];
  const u32 half = static_cast<const u16*>(from)[i];
  return type == kBf16 ? floats(half << 16) : from_f16(half);
}

__device__ __forceinline__ u32 noise_start(u64 position, int moment, u32 key) {
  u32 x = (static_cast<u32>(position / kBlock) * 4u + moment) ^ key;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
// kBits bits of noise for an element at ``place`` in its block.
template <int kBits>
__device__ __forceinline__ u32 noise_at(u32 start, u32 place) {
  return (start & ((1u << kBits) - 1u)) ^ ((__brev(place) >> 24) << (kBits - 8));
}

// Byte codes: see csrc/cpu/moments.h.
constexpr int kCodeBits = 20;  // that a code drops, and as many of noise
constexpr u32 kSignedZeroBits = 112u << 23;
constexpr u32 kUnsignedZeroBits = 96u << 23;
constexpr float kUnsignedZero = 0x1p-31f;
constexpr float kSignedTop = 1.875f - 0x1p-14f;
constexpr float kUnsignedTop = 1.875f - 0x1p-18f;
constexpr float kSmallestScale = 0x1p-100f;

__device__ __forceinline__ float zero_of(bool has_sign, float like) {
  return has_sign ? floats((bits(like) & 0x80000000u) | kSignedZeroBits) : kUnsignedZero;
}
__device__ __forceinline__ float from_code(u32 code, bool has_sign, float scale) {
  const u32 raw = has_sign ? ((code & 0x80u) << 24) | ((code & 0x7fu) << 20) | kSignedZeroBits
                           : (code << 20) | kUnsignedZeroBits;
  const float y = floats(raw);
  return mul(sub(y, zero_of(has_sign, y)), scale);
}
// ``least``: the smallest code that an unsigned moment may have in its block.
__device__ __forceinline__ u8 to_code(float value, bool has_sign, float inverse, u32 noise,
                                      u32 least) {
  const float y = mul(value, inverse);
  const u32 raw = bits(add(y, zero_of(has_sign, y))) + noise;
  if (has_sign) return static_cast<u8>(((raw >> 20) & 0x7fu) | ((raw >> 24) & 0x80u));
  const u32 code = (raw - kUnsignedZeroBits) >> 20;
  return static_cast<u8>(code < least ? least : code);
}

}  // namespace overspill
