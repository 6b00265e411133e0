// 16-bit floats to fp32 and back, and the split master. Included once per instruction set.

INLINE F from_bf16(H half) { return floats(convert<U>(half) << 16); }

// Round to nearest, ties to even, as torch does; NaN stays NaN.
INLINE H to_bf16_even(F value) {
  const U raw = bits(value);
  const U rounded = (raw + 0x7fffu + ((raw >> 16) & 1u)) >> 16;
  return convert<H>(magnitude(raw) > kInfinity ? (raw >> 16) | 0x40u : rounded);
}

// The rule of every bf16 weight that comes from a master: ties away from zero, NaN truncated and
// quiet. Only this rule can be undone with no more than the lower half (see join).
INLINE U upper_half(U raw) {
  return magnitude(raw) > kInfinity ? (raw >> 16) | 0x40u : (raw + 0x8000u) >> 16;
}
INLINE U lower_half(U raw) {
  return magnitude(raw) > kInfinity ? every(0) : raw & 0xffffu;
}
// A lower half of 0x8000 or more rounded the upper half up by one: take it back. Exact for every
// finite value and for infinity, the largest finite ones (whose upper half is infinity) included.
INLINE F join(U high, U low) { return floats(((high - (low >> 15)) << 16) | low); }

// Stochastic rounding: adds 16 bits of noise below the mantissa; not to infinity or NaN.
INLINE U to_bf16_noisy(U raw, U noise) {
  const U rounded = (raw + (noise & 0xffffu)) >> 16;
  const U kept = magnitude(raw) > kInfinity ? (raw >> 16) | 0x40u : raw >> 16;
  return magnitude(raw) >= kInfinity ? kept : rounded;
}

#if !HAS_F16
// IEEE half to single by integer arithmetic and one exact multiplication (for subnormals).
INLINE F from_f16(H half) {
  const U raw = convert<U>(half);
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
  return convert<H>(result | sign);
}
#endif
