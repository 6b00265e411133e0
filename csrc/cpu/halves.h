// 16-bit floats to fp32 and back, and the split master. Included once per instruction set.

INLINE F from_bf16(H half) { return floats(widen(half) << 16); }

// Bits of fp32 to bf16, to nearest, ties to even, as torch does; NaN stays NaN.
INLINE U even_half(U raw) {
  const U rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
  return above(magnitude(raw), kInfinity) ? (raw >> 16) | 0x40u : rounded;
}

// The rule of every bf16 weight that comes from a master: ties away from zero. Only this rule can
// be undone with no more than the lower half (see join). NaN is not rounded, so that it stays one:
// what arithmetic gives is quiet, with a bit set in the upper half. The lower 16 bits of the result
// are to be cut off.
INLINE U to_upper_half(U raw) { return add_up_to(kInfinity, raw, magnitude(raw), every(0x8000u)); }
// Halves have the lower one's sign between them: a lower half of 0x8000 or more had rounded the
// upper one up by one, and as a negative number takes it back. Exact for every finite value and for
// infinity, the largest finite ones (whose upper half is infinity) included.
INLINE U join(U high, U low_sign_extended) { return (high << 16) + low_sign_extended; }

// Stochastic rounding: adds 16 bits of noise below the mantissa; not to infinity or NaN. The lower
// 16 bits of the result are to be cut off.
INLINE U to_noisy_half(U raw, U noise) {
  return add_up_to(kInfinity - 1, raw, magnitude(raw), noise);
}

// From these magnitudes on, a value is not finite when stored as a half.
constexpr std::uint32_t kBf16Limit = 0x7f7f8000u;  // to nearest, either tie rule
constexpr std::uint32_t kNoisyBf16Limit = 0x7f7f0001u;
constexpr std::uint32_t kF16Limit = 0x477ff000u;

// Bytes of an element.
INLINE std::size_t width(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }

#if !HAS_F16
// IEEE half to single by integer arithmetic and one exact multiplication (for subnormals).
INLINE F from_f16(H half) {
  const U raw = widen(half);
  const U sign = (raw & 0x8000u) << 16;
  const U body = (raw & 0x7fffu) << 13;
  const U exponent = body & 0x0f800000u;
  const U normal = body + ((127u - 15u) << 23);
  const U special = body | kInfinity;
  const U tiny = bits(floats(body + (113u << 23)) - floats(every(113u << 23)));
  const U quiet = (body & 0x007fffffu) != 0u ? special | 0x00400000u : special;
  const U value = exponent == 0x0f800000u ? quiet : exponent == 0u ? tiny : normal;
  return floats(value | sign);
}

// Single to half, nearest even. Adding 0.5 to a value below the smallest normal half rounds it to
// a multiple of 2^-24, the spacing of subnormal halves.
INLINE H to_f16(F value) {
  const U raw = bits(value);
  const U sign = (raw >> 16) & 0x8000u;
  const U body = magnitude(raw);
  const U tiny = bits(floats(body) + all(0.5f)) - 0x3f000000u;
  const U odd = (body >> 13) & 1u;
  const U normal = (body - ((127u - 15u) << 23) + 0xfffu + odd) >> 13;
  const U special = body > kInfinity ? ((body >> 13) & 0x3ffu) | 0x7e00u : every(0x7c00u);
  const U result = body >= 0x477ff000u ? special : body < 0x38800000u ? tiny : normal;
  return narrow(result | sign);
}
#endif
