// The three formats of a moment. Each store reads the moments of LANES elements, takes the new ones
// and writes them back: at once, or per block where a block shares a scale. Included once per
// instruction set.

// A hash of the element's position and the step's key: the same for any split and any thread.
INLINE U noise_at(std::uint32_t position, std::uint32_t key) {
  U x = (lane_numbers() + position) ^ key;
  x = x ^ (x >> 16);
  x = x * 0x7feb352du;
  x = x ^ (x >> 15);
  x = x * 0x846ca68bu;
  return x ^ (x >> 16);
}

constexpr int slots(int count) { return count > 0 ? count : 1; }  // arrays may not be empty

// Where the moments of LANES elements lie: in the buffers themselves, or in a padded copy of a tail.
struct MomentSite {
  void* at[kMaxMoments];
  std::size_t element;  // index of the first lane in the job
};

template <int kCount>
struct PlainMoments {
  static constexpr std::size_t kBytes = 4;
  explicit PlainMoments(const Job&) {}
  INLINE void read(const MomentSite& site, F (&value)[slots(kCount)]) const {
    for (int k = 0; k < kCount; ++k) value[k] = load<F>(site.at[k]);
  }
  INLINE U write(const MomentSite& site, const F (&value)[slots(kCount)], U) {
    U worst{};
    for (int k = 0; k < kCount; ++k) {
      store(site.at[k], value[k]);
      worst = larger(worst, magnitude(bits(value[k])));
    }
    return worst;
  }
  INLINE void close(std::size_t, std::size_t) {}
};

template <int kCount>
struct HalfMoments {
  static constexpr std::size_t kBytes = 2;
  const std::uint32_t first, key;
  explicit HalfMoments(const Job& job)
      : first(static_cast<std::uint32_t>(job.position)), key(job.noise_key) {}
  INLINE void read(const MomentSite& site, F (&value)[slots(kCount)]) const {
    for (int k = 0; k < kCount; ++k) value[k] = from_bf16(load<H>(site.at[k]));
  }
  INLINE U write(const MomentSite& site, const F (&value)[slots(kCount)], U) {
    U noise = noise_at(first + static_cast<std::uint32_t>(site.element), key);
    U worst{};
    for (int k = 0; k < kCount; ++k) {
      const U rounded = to_bf16_noisy(bits(value[k]), noise);
      store(site.at[k], convert<H>(rounded));
      worst = larger(worst, magnitude(rounded << 16));
      noise = noise >> 16;
    }
    return worst;
  }
  INLINE void close(std::size_t, std::size_t) {}
};

// Eight codes an octave, offset so that code 0 is zero: value = (float of the code's bits - kZero)
// * scale. The code is the upper bits of the float y + kZero, y = value / scale; so encoding is an
// addition and a shift, and noise added below the kept bits makes the rounding unbiased.
// Signed moments have 127 magnitudes over 16 octaves, unsigned ones (squares) 255 over 32.
constexpr int kCodeShift = 20;
constexpr std::uint32_t kCodeNoise = (1u << kCodeShift) - 1;
constexpr std::uint32_t kSignedZero = (127u - 16u) << 3;
constexpr std::uint32_t kUnsignedZero = (127u - 32u) << 3;
constexpr float kSignedZeroValue = 0x1p-16f;
constexpr float kUnsignedZeroValue = 0x1p-32f;
constexpr float kSignedTop = 0.9375f - kSignedZeroValue;
constexpr float kUnsignedTop = 0.9375f;  // 0.9375 - 2^-32 rounds to it
constexpr float kSmallestScale = 0x1p-100f;  // so that its reciprocal is finite and normal

INLINE F from_code_signed(B code) {
  const U raw = convert<U>(code);
  const F size = floats(((raw & 0x7fu) + kSignedZero) << kCodeShift) - all(kSignedZeroValue);
  return floats(bits(size) | ((raw & 0x80u) << 24));
}
INLINE F from_code_unsigned(B code) {
  return floats((convert<U>(code) + kUnsignedZero) << kCodeShift) - all(kUnsignedZeroValue);
}
// ``inverse`` is 1 / scale.
INLINE B to_code_signed(F value, float inverse, U noise) {
  const U raw = bits(value);
  const F y = floats(magnitude(raw)) * inverse + kSignedZeroValue;
  const U code = smaller((bits(y) + (noise & kCodeNoise)) >> kCodeShift, every(kSignedZero + 127u));
  return convert<B>((code - kSignedZero) | ((raw >> 24) & 0x80u));
}
// A square that is not zero is never stored as zero: the moment that it divides may not be zero.
INLINE B to_code_unsigned(F value, float inverse, U noise) {
  const F y = floats(magnitude(bits(value))) * inverse + kUnsignedZeroValue;
  const U code =
      smaller((bits(y) + (noise & kCodeNoise)) >> kCodeShift, every(kUnsignedZero + 255u));
  const U least = bits(value) != 0u ? every(kUnsignedZero + 1u) : every(kUnsignedZero);
  return convert<B>(larger(code, least) - kUnsignedZero);
}

// kSigned: bit k says whether moment k has a sign.
template <int kCount, unsigned kSigned>
struct ByteMoments {
  static constexpr std::size_t kBytes = 1;
  const Job& job;
  alignas(64) float staged[kCount][kBlock + LANES];
  U highest[kCount] = {};
  explicit ByteMoments(const Job& of) : job(of) {}

  INLINE void read(const MomentSite& site, F (&value)[slots(kCount)]) const {
    for (int k = 0; k < kCount; ++k) {
      const B code = load<B>(site.at[k]);
      const F part = (kSigned >> k) & 1u ? from_code_signed(code) : from_code_unsigned(code);
      value[k] = part * job.scale[k][site.element / kBlock];
    }
  }
  // ``lanes`` masks what is past the end.
  INLINE U write(const MomentSite& site, const F (&value)[slots(kCount)], U lanes) {
    U worst{};
    for (int k = 0; k < kCount; ++k) {
      const U raw = bits(value[k]) & lanes;
      store(&staged[k][site.element % kBlock], raw);
      highest[k] = larger(highest[k], magnitude(raw));
      worst = larger(worst, highest[k]);
    }
    return worst;
  }
  INLINE void close(std::size_t begin, std::size_t end) {
    const std::uint32_t first = static_cast<std::uint32_t>(job.position + begin);
    float inverse[kCount];
    for (int k = 0; k < kCount; ++k) {
      const float top = (kSigned >> k) & 1u ? kSignedTop : kUnsignedTop;
      const std::uint32_t raw = highest_lane(highest[k]);
      float most;
      std::memcpy(&most, &raw, sizeof most);
      const float scale = most / top;
      // Not a comparison that NaN would pass: a scale that is not finite stays, and poisons.
      const float kept = scale < kSmallestScale ? kSmallestScale : scale;
      job.scale[k][begin / kBlock] = kept;
      inverse[k] = 1.0f / kept;
      highest[k] = U{};
    }
    alignas(64) std::uint8_t codes[kCount][kBlock + LANES];
    for (std::size_t i = 0; i < end - begin; i += LANES) {
      U noise = noise_at(first + static_cast<std::uint32_t>(i), job.noise_key);
      for (int k = 0; k < kCount; ++k) {
        const F value = load<F>(&staged[k][i]);
        store(&codes[k][i], (kSigned >> k) & 1u ? to_code_signed(value, inverse[k], noise)
                                                : to_code_unsigned(value, inverse[k], noise));
        noise = noise >> 12;
      }
    }
    for (int k = 0; k < kCount; ++k) {
      std::memcpy(static_cast<std::uint8_t*>(job.moment[k]) + begin, codes[k], end - begin);
    }
  }
};
