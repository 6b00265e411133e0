// The three formats of a moment. Each store reads the moments of LANES elements, takes the new ones
// and writes them back: at once, or per stretch where blocks share a scale. Included once per
// instruction set.

// Rounding noise. Within a block, a golden-ratio sequence, which is spread more evenly than random
// numbers; it starts at a hash of the block's place, the moment's number and the step's key. So
// every element's noise is uniform and independent from step to step, and the same for any split
// and any thread. The lower bits are used: as many as the format drops.
constexpr std::uint32_t kHalfGolden = 0x9e37u;  // the golden ratio's part of 2^16, and of 2^20
constexpr std::uint32_t kByteGolden = 0x9e377u;

INLINE std::uint32_t noise_start(std::uint64_t position, int moment, std::uint32_t key) {
  const auto block = static_cast<std::uint32_t>(position / kBlock);
  std::uint32_t x = (block * 4u + static_cast<std::uint32_t>(moment)) ^ key;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
template <class Layout>
INLINE U noise_at(int part, std::uint32_t start, std::size_t place, std::uint32_t golden) {
  return Layout::element_numbers(part) * golden +
         (start + static_cast<std::uint32_t>(place) * golden);
}

constexpr int slots(int count) { return count > 0 ? count : 1; }  // arrays may not be empty

// Where the moments of one step lie: in the buffers themselves, or in a padded copy of a tail.
struct MomentSite {
  void* at[kMaxMoments];
  std::size_t element;  // index of the first in the job
};

// The values of one step: by moment and part.
template <class Layout, int kCount>
using Values = F[slots(kCount)][Layout::kParts];

// What tells how large a moment is, and whether it is finite. Squares have no sign to remove: only
// a NaN may carry one, and that makes it larger still.
template <unsigned kSigned>
INLINE U size_of(int k, F value) {
  return (kSigned >> k) & 1u ? magnitude(bits(value)) : bits(value);
}

template <class, int kCount, unsigned kSigned>
struct PlainMoments {
  using Layout = Straight;
  static constexpr std::size_t kBytes = 4;
  U worst{};
  explicit PlainMoments(const Job&) {}
  INLINE void open(std::size_t) {}
  INLINE void shut() {}
  INLINE void read(const MomentSite& site, Values<Layout, kCount>& value) const {
    for (int k = 0; k < kCount; ++k) value[k][0] = load<F>(site.at[k]);
  }
  INLINE void write(const MomentSite& site, const Values<Layout, kCount>& value,
                    const Layout::Bits& lanes) {
    for (int k = 0; k < kCount; ++k) {
      store(site.at[k], value[k][0]);
      worst = larger(worst, size_of<kSigned>(k, value[k][0]) & lanes[0]);
    }
  }
  INLINE void close(std::size_t, std::size_t) {}
  bool finite() const { return highest_lane(worst) < kInfinity; }
};

template <class Chosen, int kCount, unsigned kSigned>
struct HalfMoments {
  using Layout = Chosen;
  using Bits = typename Layout::Bits;
  static constexpr std::size_t kBytes = 2;
  const Job& job;
  // Of the two noise blocks that a block of the job may touch; ``ahead`` is the place in the first
  // at which the job's block starts.
  std::uint32_t start[2][slots(kCount)];
  std::size_t first = 0, ahead = 0;
  U worst{};
  explicit HalfMoments(const Job& of) : job(of) {}

  INLINE void open(std::size_t begin) {
    first = begin;
    ahead = (job.position + begin) % kBlock;
    for (int k = 0; k < kCount; ++k) {
      start[0][k] = noise_start(job.position + begin, k, job.noise_key);
      start[1][k] = noise_start(job.position + begin + kBlock, k, job.noise_key);
    }
  }
  INLINE void read(const MomentSite& site, Values<Layout, kCount>& value) const {
    for (int k = 0; k < kCount; ++k) {
      Bits raw;
      Layout::load_upper(site.at[k], raw);
      for (int p = 0; p < Layout::kParts; ++p) value[k][p] = floats(raw[p]);
    }
  }
  INLINE void write(const MomentSite& site, const Values<Layout, kCount>& value,
                    const Bits& lanes) {
    const std::size_t place = site.element - first + ahead;
    const int which = place >= kBlock ? 1 : 0;
    for (int k = 0; k < kCount; ++k) {
      Bits half;
      for (int p = 0; p < Layout::kParts; ++p) {
        const U noise = noise_at<Layout>(p, start[which][k], place % kBlock, kHalfGolden);
        half[p] = noisy_half(bits(value[k][p]), noise);
        worst = larger(worst, size_of<kSigned>(k, value[k][p]) & lanes[p]);
      }
      Layout::store_halves(site.at[k], half);
    }
  }
  INLINE void shut() {}
  INLINE void close(std::size_t, std::size_t) {}
  bool finite() const { return highest_lane(worst) < kNoisyBf16Limit; }
};

// Eight codes an octave, shifted so that code 0 is zero: value = (y - kZero) * scale, where y is
// the float whose upper bits the code gives. So encoding is an addition and a shift, and noise
// added below the bits that are kept makes the rounding unbiased. Signed moments have a sign and
// 127 sizes over 16 octaves, unsigned ones (squares) 255 sizes over 32. The zeros are chosen so
// that a code is simply the lowest 7 or 8 of the upper bits.
constexpr int kCodeShift = 20;
constexpr std::uint32_t kCodeNoise = (1u << kCodeShift) - 1;  // as many bits as a code drops
constexpr std::uint32_t kSignedZeroBits = 112u << 3;
constexpr std::uint32_t kUnsignedZeroBits = 96u << 3;
constexpr float kSignedZero = 0x1p-15f;
constexpr float kUnsignedZero = 0x1p-31f;
// The largest y: so far below 1.875, the largest code, that no rounding error passes that.
constexpr float kSignedTop = 1.875f - 0x1p-14f;
constexpr float kUnsignedTop = 1.875f - 0x1p-18f;
constexpr float kSmallestScale = 0x1p-100f;  // so that its reciprocal is finite and normal

// A code at bit kCodeShift of ``raw``.
INLINE F from_code_signed(U raw) {
  const F size = floats((raw & (0x7fu << kCodeShift)) | (kSignedZeroBits << kCodeShift));
  return floats(bits(size - kSignedZero) | ((raw << 4) & 0x80000000u));
}
INLINE F from_code_unsigned(U raw) {
  return floats(raw | (kUnsignedZeroBits << kCodeShift)) - kUnsignedZero;
}
// The code is in the lowest byte of the result. ``inverse`` is 1 / scale.
INLINE U to_code_signed(F value, float inverse, U noise) {
  const U raw = bits(value);
  const F y = floats(magnitude(raw)) * inverse + kSignedZero;
  const U code = (bits(y) + (noise & kCodeNoise)) >> kCodeShift;
  return (code & 0x7fu) | ((raw >> 24) & 0x80u);
}
// A square that is not zero is never stored as zero: the moment that it divides may not be zero.
INLINE U to_code_unsigned(F value, float inverse, U noise) {
  const F y = value * inverse + kUnsignedZero;
  const U code = (bits(y) + (noise & kCodeNoise)) >> kCodeShift;
  return bits(value) != 0u ? larger(code, every(kUnsignedZeroBits + 1u)) : code;
}

// kSigned: bit k says whether moment k has a sign. A stretch of blocks is staged in fp32 and then
// encoded at once, so that the waits for one block's scale are hidden behind another's. Within a
// step the staged values keep the order of the layout.
template <class Chosen, int kCount, unsigned kSigned>
struct ByteMoments {
  using Layout = Chosen;
  using Bits = typename Layout::Bits;
  static constexpr std::size_t kBytes = 1;
  static constexpr std::size_t kBlocks = kStretch / kBlock;
  static constexpr std::size_t kStep = LANES * Layout::kParts;
  const Job& job;
  alignas(64) float staged[kCount][kStretch];
  U highest[kBlocks][kCount] = {};
  U highest_now[kCount] = {};  // of the open block, as is the scale
  float scale[kCount] = {};
  std::size_t block = 0;  // the open block's number in its stretch
  std::uint32_t worst = 0;
  explicit ByteMoments(const Job& of) : job(of) {}

  static constexpr bool is_signed(int k) { return (kSigned >> k) & 1u; }

  INLINE void open(std::size_t begin) {
    block = begin % kStretch / kBlock;
    for (int k = 0; k < kCount; ++k) {
      scale[k] = job.scale[k][begin / kBlock];
      highest_now[k] = U{};
    }
  }
  INLINE void shut() {
    for (int k = 0; k < kCount; ++k) highest[block][k] = highest_now[k];
  }
  INLINE void read(const MomentSite& site, Values<Layout, kCount>& value) const {
    for (int k = 0; k < kCount; ++k) {
      Bits raw;
      Layout::load_codes(site.at[k], raw);
      for (int p = 0; p < Layout::kParts; ++p) {
        value[k][p] =
            (is_signed(k) ? from_code_signed(raw[p]) : from_code_unsigned(raw[p])) * scale[k];
      }
    }
  }
  // ``lanes`` masks what is past the end.
  INLINE void write(const MomentSite& site, const Values<Layout, kCount>& value,
                    const Bits& lanes) {
    for (int k = 0; k < kCount; ++k) {
      float* const to = &staged[k][site.element % kStretch];
      for (int p = 0; p < Layout::kParts; ++p) {
        store(to + p * LANES, bits(value[k][p]) & lanes[p]);
        highest_now[k] = larger(highest_now[k], size_of<kSigned>(k, value[k][p]) & lanes[p]);
      }
    }
  }
  // Ends the stretch [begin, end): begin is a multiple of kStretch.
  INLINE void close(std::size_t begin, std::size_t end) {
    // All scales at once, those past the end too: divisions are slow one by one.
    constexpr std::size_t kScales = kBlocks * kCount;
    std::uint32_t most[kScales] = {};
    float kept[kScales], inverse[kScales];
    for (std::size_t b = 0; b < kBlocks && begin + b * kBlock < end; ++b) {
      for (int k = 0; k < kCount; ++k) {
        most[b * kCount + k] = highest_lane(highest[b][k]) & 0x7fffffffu;
      }
    }
    for (std::size_t s = 0; s < kScales; ++s) {
      worst = most[s] > worst ? most[s] : worst;
      float value;
      std::memcpy(&value, &most[s], sizeof value);
      const float ideal = value / (is_signed(s % kCount) ? kSignedTop : kUnsignedTop);
      // Not a comparison that NaN would pass: a scale that is not finite stays, and poisons.
      kept[s] = ideal < kSmallestScale ? kSmallestScale : ideal;
      inverse[s] = 1.0f / kept[s];
    }
    for (std::size_t b = 0; b < kBlocks && begin + b * kBlock < end; ++b) {
      for (int k = 0; k < kCount; ++k) job.scale[k][begin / kBlock + b] = kept[b * kCount + k];
      const std::size_t at = begin + b * kBlock;
      encode(at, end - at < kBlock ? end : at + kBlock, inverse + b * kCount);
    }
  }
  INLINE void encode(std::size_t begin, std::size_t end, const float* inverse) {
    alignas(64) std::uint8_t padded[kCount][kBlock];
    const bool whole = (end - begin) % kStep == 0;
    std::uint8_t* to[kCount];
    Bits noise[kCount];
    for (int k = 0; k < kCount; ++k) {
      to[k] = whole ? static_cast<std::uint8_t*>(job.moment[k]) + begin : padded[k];
      const std::uint32_t start = noise_start(job.position + begin, k, job.noise_key);
      for (int p = 0; p < Layout::kParts; ++p) {
        noise[k][p] = noise_at<Layout>(p, start, 0, kByteGolden);
      }
    }
    for (std::size_t i = 0; i < end - begin; i += kStep) {
      for (int k = 0; k < kCount; ++k) {
        const float* const from = &staged[k][(begin + i) % kStretch];
        Bits code;
        for (int p = 0; p < Layout::kParts; ++p) {
          const F value = load<F>(from + p * LANES);
          code[p] = is_signed(k) ? to_code_signed(value, inverse[k], noise[k][p])
                                 : to_code_unsigned(value, inverse[k], noise[k][p]);
          noise[k][p] = noise[k][p] + static_cast<std::uint32_t>(kStep * kByteGolden);
        }
        Layout::store_codes(to[k] + i, code);
      }
    }
    for (int k = 0; k < kCount && !whole; ++k) {
      std::memcpy(static_cast<std::uint8_t*>(job.moment[k]) + begin, padded[k], end - begin);
    }
  }
  bool finite() const { return worst < kInfinity; }
};
