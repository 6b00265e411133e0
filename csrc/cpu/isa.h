// The few operations that vector types do not have: square root, and half floats where the
// hardware converts them. All correctly rounded. (AVX-512-BF16's conversion is not used: it
// flushes subnormals and rounds ties to even, so it would not agree with the others.)

#if LANES == 1
INLINE F root(F value) { return __builtin_sqrtf(value); }
#elif LANES == 16  // AVX-512
INLINE F root(F value) { return (F)_mm512_sqrt_ps((__m512)value); }
INLINE F from_f16(H half) { return (F)_mm512_cvtph_ps((__m256i)half); }
INLINE H to_f16(F value) {
  return (H)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif LANES == 8  // AVX2
INLINE F root(F value) { return (F)_mm256_sqrt_ps((__m256)value); }
INLINE F from_f16(H half) { return (F)_mm256_cvtph_ps((__m128i)half); }
INLINE H to_f16(F value) {
  return (H)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
#elif LANES == 4  // NEON
INLINE F root(F value) { return (F)vsqrtq_f32((float32x4_t)value); }
#endif
