// Lanes: the vocabulary in which the kernels are written once, for any width.
//
// Included inside one namespace per instruction set, with LANES defined. No include guard: that is
// the point. F holds floats, U their bits, H halves of them, B bytes;
// W holds twice as many 16-bit words, in as many bits as F. Compilers lower these vector
// types to whatever the enabled target offers. Operators round once, as IEEE 754 says; nothing here
// may contract or reorder them, because all instruction sets must agree bitwise.

#if LANES == 1
using F = float;
using U = std::uint32_t;
using S = std::int32_t;
using H = std::uint16_t;
using B = std::uint8_t;
template <class To, class From>
INLINE To convert(From from) {
  return static_cast<To>(from);
}
INLINE U highest_lane(U value) { return value; }
#else
typedef float F __attribute__((vector_size(4 * LANES)));
typedef std::uint32_t U __attribute__((vector_size(4 * LANES)));
typedef std::int32_t S __attribute__((vector_size(4 * LANES)));
typedef std::uint16_t H __attribute__((vector_size(2 * LANES)));
typedef std::uint8_t B __attribute__((vector_size(LANES)));
typedef std::uint16_t W __attribute__((vector_size(4 * LANES)));
template <class To, class From>
INLINE To convert(From from) {
  return __builtin_convertvector(from, To);
}
INLINE std::uint32_t highest_lane(U value) {
  std::uint32_t highest = 0;
  for (int lane = 0; lane < LANES; ++lane) highest = value[lane] > highest ? value[lane] : highest;
  return highest;
}
#endif

template <class T>
INLINE T load(const void* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

template <class T>
INLINE void store(void* to, T value) {
  std::memcpy(to, &value, sizeof value);
}

INLINE U bits(F value) { return load<U>(&value); }
INLINE F floats(U value) { return load<F>(&value); }
INLINE U magnitude(U value) { return value & 0x7fffffffu; }
// A mask of the lanes above a limit; both below 2^31, where signed comparison is cheaper on x86.
INLINE auto above(U value, std::uint32_t limit) { return (S)value > (std::int32_t)limit; }
template <class T>
INLINE T larger(T a, T b) {
  return a > b ? a : b;
}
// The bits of ``value`` that ``kept`` has, with those of ``set``, which are others.
INLINE U kept_and_set(U value, std::uint32_t kept, std::uint32_t set) {
#if LANES == 16
  return (U)_mm512_ternarylogic_epi32((__m512i)value, _mm512_set1_epi32(kept),
                                      _mm512_set1_epi32(set), 0xea);
#else
  return (value & kept) | set;
#endif
}
INLINE U every(std::uint32_t value) { return U{} + value; }
INLINE F all(float value) { return F{} + value; }
