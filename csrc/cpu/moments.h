// The three formats of a moment. Each store reads the moments of LANES elements, takes the new ones
// and writes them back: at once, or per stretch where blocks share a scale. Included once per
// instruction set.

// Rounding noise. Within a block, the van der Corput sequence (an element's number with its bits
// reversed), which is spread more evenly than random numbers, xored with a hash of the block's
// place, the moment's number and the step's key. So every element's noise is uniform and
// independent from step to step, and the same for any split and any thread.
INLINE std::uint32_t noise_start(std::uint64_t position, int moment, std::uint32_t key) {
  const auto block = static_cast<std::uint32_t>(position / kBlock);
  std::uint32_t x = (block * 4u + static_cast<std::uint32_t>(moment)) ^ key;
  x = (x ^ (x >> 16)) * 0x7feb352du;
  x = (x ^ (x >> 15)) * 0x846ca68bu;
  return x ^ (x >> 16);
}
// The sequence as numbers of kBits bits, in the order in which a layout has the lanes.
template <class Layout, int kBits>
struct Spread {
  alignas(64) std::uint32_t at[kBlock] = {};
  constexpr Spread() {
    constexpr std::uint32_t kStep = LANES * Layout::kParts;
    for (std::uint32_t i = 0; i < kBlock; ++i) {
      const std::uint32_t in_step = i % kStep;
      const std::uint32_t element =
          i - in_step + Layout::element_number(in_step / LANES, in_step % LANES);
      std::uint32_t reversed = 0;
      for (int bit = 0; bit < 8; ++bit) reversed |= ((element >> bit) & 1u) << (7 - bit);
      at[i] = reversed << (kBits - 8);
    }
  }
};
template <class Layout, int kBits>
constexpr Spread<Layout, kBits> kSpread{};

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

// What a store keeps of the block in hand is a Block: a value that the compiler can keep in
// registers, unlike the store itself.

template <class, int kCount, unsigned kSigned>
struct PlainMoments {
  using Layout = Straight;
  static constexpr std::size_t kBytes = 4;
  static constexpr bool kStaged = false;
  struct Block {
    U worst{};
  };
  U worst{};
  explicit PlainMoments(const Job&) {}
  INLINE Block open(std::size_t) { return {}; }
  INLINE void read(const Block&, const MomentSite& site, Values<Layout, kCount>& value) const {
    for (int k = 0; k < kCount; ++k) value[k][0] = load<F>(site.at[k]);
  }
  INLINE void write(Block& block, const MomentSite& site, const Values<Layout, kCount>& value,
                    const Layout::Bits& lanes) {
    for (int k = 0; k < kCount; ++k) {
      store(site.at[k], value[k][0]);
      block.worst = larger(block.worst, size_of<kSigned>(k, value[k][0]) & lanes[0]);
    }
  }
  INLINE void shut(const Block& block) { worst = larger(worst, block.worst); }
  template <class Finish>
  INLINE void close(std::size_t, std::size_t, Finish) {}
  bool finite() const { return highest_lane(worst) < kInfinity; }
};

template <class Chosen, int kCount, unsigned kSigned>
struct HalfMoments {
  using Layout = Chosen;
  using Bits = typename Layout::Bits;
  static constexpr std::size_t kBytes = 2;
  static constexpr bool kStaged = false;
  struct Block {
    // Of the two noise blocks that a block of the job may touch; ``ahead`` is the place in the
    // first at which the job's block starts.
    std::uint32_t start[2][slots(kCount)];
    std::size_t first, ahead;
    U worst;
  };
  const Job& job;
  U worst{};
  explicit HalfMoments(const Job& of) : job(of) {}

  INLINE Block open(std::size_t begin) {
    Block block{{}, begin, (job.position + begin) % kBlock, U{}};
    for (int k = 0; k < kCount; ++k) {
      block.start[0][k] = noise_start(job.position + begin, k, job.noise_key) & 0xffffu;
      block.start[1][k] = noise_start(job.position + begin + kBlock, k, job.noise_key) & 0xffffu;
    }
    return block;
  }
  INLINE void read(const Block&, const MomentSite& site, Values<Layout, kCount>& value) const {
    for (int k = 0; k < kCount; ++k) {
      Bits raw;
      Layout::load_upper(site.at[k], raw);
      for (int p = 0; p < Layout::kParts; ++p) value[k][p] = floats(raw[p]);
    }
  }
  INLINE void write(Block& block, const MomentSite& site, const Values<Layout, kCount>& value,
                    const Bits& lanes) {
    const std::size_t place = site.element - block.first + block.ahead;
    const int which = place >= kBlock ? 1 : 0;
    const std::uint32_t* const spread = kSpread<Layout, 16>.at + place % kBlock;
    for (int k = 0; k < kCount; ++k) {
      Bits rounded;
      for (int p = 0; p < Layout::kParts; ++p) {
        const U noise = load<U>(spread + p * LANES) ^ block.start[which][k];
        rounded[p] = to_noisy_half(bits(value[k][p]), noise);
        block.worst = larger(block.worst, size_of<kSigned>(k, value[k][p]) & lanes[p]);
      }
      Layout::store_upper(site.at[k], rounded);
    }
  }
  INLINE void shut(const Block& block) { worst = larger(worst, block.worst); }
  template <class Finish>
  INLINE void close(std::size_t, std::size_t, Finish) {}
  bool finite() const { return highest_lane(worst) < kNoisyBf16Limit; }
};

// Eight codes an octave, shifted so that code 0 is zero: value = (y - zero) * scale, where y is the
// float whose upper bits the code gives. So encoding is an addition and a shift, and noise added
// below the bits that are kept makes the rounding unbiased. Signed moments have a sign, which y and
// its zero share, and 127 sizes over 16 octaves; unsigned ones (squares) have 255 sizes over 32.
// The zeros are chosen so that a code is simply the lowest 7 or 8 of the upper bits (layout.h).
constexpr std::uint32_t kCodeNoise = (1u << kCodeShift) - 1;  // as many bits as a code drops
constexpr float kUnsignedZero = 0x1p-31f;
// The largest y: so far below 1.875, the largest code, that no rounding error passes that.
constexpr float kSignedTop = 1.875f - 0x1p-14f;
constexpr float kUnsignedTop = 1.875f - 0x1p-18f;
constexpr float kSmallestScale = 0x1p-100f;  // so that its reciprocal is finite and normal

INLINE F signed_zero(F like) { return floats(kept_and_set(bits(like), kSignBit, kSignedZeroBits)); }

// kSigned: bit k says whether moment k has a sign. A stretch of blocks is staged in fp32 and then
// encoded at once, so that the waits for one block's scale are hidden behind another's. Within a
// step the staged values keep the order of the layout.
template <class Chosen, int kCount, unsigned kSigned>
struct ByteMoments {
  using Layout = Chosen;
  using Bits = typename Layout::Bits;
  static constexpr std::size_t kBytes = 1;
  static constexpr bool kStaged = true;
  static constexpr std::size_t kBlocks = kStretch / kBlock;
  static constexpr std::size_t kStep = LANES * Layout::kParts;
  struct Block {
    std::size_t number;  // in its stretch
    float scale[kCount];
    U highest[kCount];
  };
  const Job& job;
  alignas(64) float staged[kCount][kStretch];
  U highest[kBlocks][kCount] = {};
  std::uint32_t worst = 0;
  explicit ByteMoments(const Job& of) : job(of) {}

  static constexpr bool is_signed(int k) { return (kSigned >> k) & 1u; }

  INLINE Block open(std::size_t begin) {
    Block block{begin % kStretch / kBlock, {}, {}};
    for (int k = 0; k < kCount; ++k) block.scale[k] = job.scale[k][begin / kBlock];
    return block;
  }
  INLINE void read(const Block& block, const MomentSite& site,
                   Values<Layout, kCount>& value) const {
    for (int k = 0; k < kCount; ++k) {
      Bits raw;
      if (is_signed(k)) {
        Layout::load_signed_codes(site.at[k], raw);
      } else {
        Layout::load_unsigned_codes(site.at[k], raw);
      }
      for (int p = 0; p < Layout::kParts; ++p) {
        const F y = floats(raw[p]);
        value[k][p] = (y - (is_signed(k) ? signed_zero(y) : all(kUnsignedZero))) * block.scale[k];
      }
    }
  }
  // ``lanes`` masks what is past the end.
  INLINE void write(Block& block, const MomentSite& site, const Values<Layout, kCount>& value,
                    const Bits& lanes) {
    for (int k = 0; k < kCount; ++k) {
      float* const to = &staged[k][site.element % kStretch];
      for (int p = 0; p < Layout::kParts; ++p) {
        store(to + p * LANES, bits(value[k][p]) & lanes[p]);
        block.highest[k] = larger(block.highest[k], size_of<kSigned>(k, value[k][p]) & lanes[p]);
      }
    }
  }
  INLINE void shut(const Block& block) {
    for (int k = 0; k < kCount; ++k) highest[block.number][k] = block.highest[k];
  }
  // Ends the stretch [begin, end): begin is a multiple of kStretch. Then calls
  // finish(element, values, count) for each step: what takes long there runs beside the encoding.
  template <class Finish>
  INLINE void close(std::size_t begin, std::size_t end, Finish finish) {
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
      const std::size_t at = begin + b * kBlock;
      for (int k = 0; k < kCount; ++k) job.scale[k][at / kBlock] = kept[b * kCount + k];
      encode(at, std::min(kBlock, end - at), inverse + b * kCount, most + b * kCount, finish);
    }
  }
  // How one block is encoded: per moment, the reciprocal of its scale, its noise, the smallest
  // code.
  struct Encoding {
    float inverse[kCount];
    std::uint32_t start[kCount], least[kCount];
  };
  template <class Finish>
  INLINE void encode(std::size_t begin, std::size_t count, const float* inverse,
                     const std::uint32_t* most, Finish finish) {
    Encoding how;
    std::uint8_t* to[kCount];
    for (int k = 0; k < kCount; ++k) {
      how.inverse[k] = inverse[k];
      how.start[k] = noise_start(job.position + begin, k, job.noise_key) & kCodeNoise;
      how.least[k] = most[k] == 0u ? 0u : 1u;
      to[k] = static_cast<std::uint8_t*>(job.moment[k]) + begin;
    }
    Values<Layout, kCount> value;
    std::size_t i = 0;
    for (; i + kStep <= count; i += kStep) {
      std::uint8_t* here[kCount];
      for (int k = 0; k < kCount; ++k) here[k] = to[k] + i;
      encode_step(how, begin % kStretch + i, here, value);
      finish(begin + i, value, kStep);
    }
    if (i == count) return;
    alignas(64) std::uint8_t padded[kCount][kStep];
    std::uint8_t* here[kCount];
    for (int k = 0; k < kCount; ++k) here[k] = padded[k];
    encode_step(how, begin % kStretch + i, here, value);
    finish(begin + i, value, count - i);
    for (int k = 0; k < kCount; ++k) std::memcpy(to[k] + i, padded[k], count - i);
  }
  // Encodes the step staged at ``place``; gives the values it staged.
  INLINE void encode_step(const Encoding& how, std::size_t place, std::uint8_t* const (&to)[kCount],
                          Values<Layout, kCount>& value) const {
    for (int k = 0; k < kCount; ++k) {
      Bits raw;
      for (int p = 0; p < Layout::kParts; ++p) {
        value[k][p] = load<F>(&staged[k][place + p * LANES]);
        const F y = value[k][p] * how.inverse[k];
        const F zero = is_signed(k) ? signed_zero(y) : all(kUnsignedZero);
        const auto* const spread = kSpread<Layout, kCodeShift>.at + place % kBlock + p * LANES;
        raw[p] = bits(y + zero) + (load<U>(spread) ^ how.start[k]);
      }
      if (is_signed(k)) {
        Layout::store_signed_codes(to[k], raw);
      } else {
        Layout::store_unsigned_codes(to[k], raw, how.least[k]);
      }
    }
  }
  bool finite() const { return worst < kInfinity; }
};
