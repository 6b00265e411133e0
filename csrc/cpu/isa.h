// The few operations that vector types do not have, or for which compilers emit poor code: square
// root (correctly rounded), half floats where the hardware converts them (to nearest even), and
// moves between 8-, 16- and 32-bit lanes. add_up_to(limit, value, size, added) adds where size is
// at most limit, both below 2^31. Narrowing keeps the lower bits and drops the upper ones.
// (AVX-512-BF16's conversion is not used: it flushes subnormals and rounds ties to even, so it
// would not agree with the others.)

#if LANES == 16  // AVX-512
INLINE F root(F value) { return (F)_mm512_sqrt_ps((__m512)value); }
INLINE F from_f16(H half) { return (F)_mm512_cvtph_ps((__m256i)half); }
INLINE H to_f16(F value) {
  return (H)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE U add_up_to(std::uint32_t limit, U value, U size, U added) {
  const __mmask16 lanes = _mm512_cmple_epi32_mask((__m512i)size, _mm512_set1_epi32(limit));
  return (U)_mm512_mask_add_epi32((__m512i)value, lanes, (__m512i)value, (__m512i)added);
}
INLINE U widen(H value) { return (U)_mm512_cvtepu16_epi32((__m256i)value); }
INLINE U widen_signed(H value) { return (U)_mm512_cvtepi16_epi32((__m256i)value); }
INLINE U widen(B value) { return (U)_mm512_cvtepu8_epi32((__m128i)value); }
INLINE U widen_signed(B value) { return (U)_mm512_cvtepi8_epi32((__m128i)value); }
INLINE H narrow(U value) { return (H)_mm512_cvtepi32_epi16((__m512i)value); }
INLINE B narrow_to_byte(U value) { return (B)_mm512_cvtepi32_epi8((__m512i)value); }

// Bytes to words and back; the lower bytes are kept.
INLINE W words_of_bytes(const void* from) {
  return (W)_mm512_cvtepu8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
INLINE W words_of_signed_bytes(const void* from) {
  return (W)_mm512_cvtepi8_epi16(_mm256_loadu_si256(static_cast<const __m256i*>(from)));
}
INLINE void store_bytes(void* to, W words) {
  _mm256_storeu_si256(static_cast<__m256i*>(to), _mm512_cvtepi16_epi8((__m512i)words));
}
INLINE U unpack_first(W low, W high) {
  return (U)_mm512_unpacklo_epi16((__m512i)low, (__m512i)high);
}
INLINE U unpack_second(W low, W high) {
  return (U)_mm512_unpackhi_epi16((__m512i)low, (__m512i)high);
}
// The inverse of unpacking: words ``kOffset``, ``kOffset`` + 2 and so on of both.
template <int kOffset>
INLINE W every_other_word(U first, U second) {
  W from{};
  for (int word = 0; word < 2 * LANES; ++word) {
    const int group = word / 8, place = word % 8;
    from[word] =
        static_cast<std::uint16_t>((place / 4) * 2 * LANES + group * 8 + (place % 4) * 2 + kOffset);
  }
  return (W)_mm512_permutex2var_epi16((__m512i)first, (__m512i)from, (__m512i)second);
}
INLINE W pack_lower(U first, U second) { return every_other_word<0>(first, second); }
INLINE W pack_upper(U first, U second) { return every_other_word<1>(first, second); }
#elif LANES == 8  // AVX2
INLINE F root(F value) { return (F)_mm256_sqrt_ps((__m256)value); }
INLINE F from_f16(H half) { return (F)_mm256_cvtph_ps((__m128i)half); }
INLINE H to_f16(F value) {
  return (H)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}
INLINE U add_up_to(std::uint32_t limit, U value, U size, U added) {
  return value + (above(size, limit) ? every(0) : added);
}
INLINE U widen(H value) { return (U)_mm256_cvtepu16_epi32((__m128i)value); }
INLINE U widen_signed(H value) { return (U)_mm256_cvtepi16_epi32((__m128i)value); }
INLINE U widen(B value) {
  return (U)_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(load<long long>(&value)));
}
INLINE U widen_signed(B value) { return (widen(value) ^ 0x80u) - 0x80u; }
// The lower halves of each 128 bits, put side by side, then the two quarters of 64 bits.
INLINE H narrow(U value) {
  const __m256i pick = _mm256_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1, 0,
                                        1, 4, 5, 8, 9, 12, 13, -1, -1, -1, -1, -1, -1, -1, -1);
  const __m256i picked = _mm256_shuffle_epi8((__m256i)value, pick);
  return (H)_mm256_castsi256_si128(_mm256_permute4x64_epi64(picked, 0x08));
}
INLINE B narrow_to_byte(U value) {
  const __m128i pick = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, -1, -1, -1, -1, -1, -1, -1, -1);
  const long long bytes = _mm_cvtsi128_si64(_mm_shuffle_epi8((__m128i)narrow(value), pick));
  return load<B>(&bytes);
}

INLINE W words_of_bytes(const void* from) {
  return (W)_mm256_cvtepu8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
INLINE W words_of_signed_bytes(const void* from) {
  return (W)_mm256_cvtepi8_epi16(_mm_loadu_si128(static_cast<const __m128i*>(from)));
}
INLINE void store_bytes(void* to, W words) {
  const __m256i low = (__m256i)(words & 0xff);
  const __m256i packed = _mm256_packus_epi16(low, low);
  const __m256i ordered = _mm256_permute4x64_epi64(packed, 0x08);
  _mm_storeu_si128(static_cast<__m128i*>(to), _mm256_castsi256_si128(ordered));
}
INLINE U unpack_first(W low, W high) {
  return (U)_mm256_unpacklo_epi16((__m256i)low, (__m256i)high);
}
INLINE U unpack_second(W low, W high) {
  return (U)_mm256_unpackhi_epi16((__m256i)low, (__m256i)high);
}
INLINE W pack_lower(U first, U second) {
  return (W)_mm256_packus_epi32((__m256i)(first & 0xffffu), (__m256i)(second & 0xffffu));
}
INLINE W pack_upper(U first, U second) {
  return (W)_mm256_packus_epi32((__m256i)(first >> 16), (__m256i)(second >> 16));
}
#else
#if LANES == 1
INLINE F root(F value) { return __builtin_sqrtf(value); }
#else  // NEON
INLINE F root(F value) { return (F)vsqrtq_f32((float32x4_t)value); }
#endif
INLINE U add_up_to(std::uint32_t limit, U value, U size, U added) {
  return value + (above(size, limit) ? every(0) : added);
}
INLINE U widen(H value) { return convert<U>(value); }
INLINE U widen_signed(H value) { return (convert<U>(value) ^ 0x8000u) - 0x8000u; }
INLINE U widen(B value) { return convert<U>(value); }
INLINE U widen_signed(B value) { return (convert<U>(value) ^ 0x80u) - 0x80u; }
INLINE H narrow(U value) { return convert<H>(value); }
INLINE B narrow_to_byte(U value) { return convert<B>(value); }
#endif
