// Saved activations in packed blocks: 128 elements are an fp32 scale, then a signed byte each. The
// last block of an activation may have fewer. The codes 127 and -127 stand for elements that are
// rounded to zero: they keep their sign, on which many operators depend (ReLU). Included once per
// instruction set.

constexpr std::uint32_t kLeastMagnitude = 0x0da24260u;  // 1e-30f: below it, a block is all zeros
constexpr float kMostCode = 126.0f;
constexpr std::int32_t kTinyCode = 127;
constexpr std::uint32_t kTinyBits = 0x3c800000u;  // of what it stands for, 2^-6 scales
// 1.5 * 2^23: adding it to a code rounds it to an integer, ties to even, and its lower byte is that
// of the sum's bits.
constexpr float kWhole = 12582912.0f;
constexpr std::uint32_t kWholeBits = 0x4b400000u;
constexpr std::uint32_t kQuietNaN = 0x7fc00000u;  // the scale of a block that is not finite

// The codes, in the lower bytes.
INLINE U codes_of(F value, F inverse) {
  const U code = bits(value * inverse + all(kWhole));
  const U raw = bits(value);
  const U sign = (U)((S)raw >> 31);  // all ones if negative
  const U tiny = (every(kTinyCode) ^ sign) - sign;
  return code == kWholeBits && magnitude(raw) != 0u ? tiny : code;
}

INLINE F value_of(U code, F scale) {
  const S number = (S)code;
  const F tiny = floats((code & 0x80000000u) | kTinyBits);  // with the sign of the code
  return (number == kTinyCode || number == -kTinyCode ? tiny : convert<F>(number)) * scale;
}

// Elements [begin, end); begin is a multiple of kActivationBlock.
void pack_activation(const Activation& activation, std::size_t begin, std::size_t end) {
  const auto* from = static_cast<const std::uint8_t*>(activation.values);
  const FloatType type = activation.type;
  for (std::size_t i = begin; i < end; i += kActivationBlock) {
    const std::size_t stop = std::min(end, i + kActivationBlock);
    std::uint8_t* block = activation.blocks + i / kActivationBlock * kActivationBytes;
    const std::uint32_t most = largest(type, from, i, stop);
    if (most >= kInfinity || most < kLeastMagnitude) {
      store(block, most >= kInfinity ? kQuietNaN : 0u);
      std::memset(block + 4, 0, stop - i);
      continue;
    }
    store(block, size_of(most) / kMostCode);
    const F inverse = all(kMostCode / size_of(most));
    for (std::size_t at = i; at < stop; at += LANES) {
      const F value = read_some(type, from + at * width(type), stop - at);
      const B code = narrow_to_byte(codes_of(value, inverse));
      std::memcpy(block + 4 + (at - i), &code, std::min<std::size_t>(LANES, stop - at));
    }
  }
}

void unpack_activation(const Activation& activation, std::size_t begin, std::size_t end) {
  auto* out = static_cast<std::uint8_t*>(activation.values);
  const FloatType type = activation.type;
  for (std::size_t i = begin; i < end; i += kActivationBlock) {
    const std::size_t stop = std::min(end, i + kActivationBlock);
    const std::uint8_t* block = activation.blocks + i / kActivationBlock * kActivationBytes;
    const F scale = all(load<float>(block));
    const auto made = [&](const std::uint8_t* codes) INLINE_LAMBDA {
      return as_stored(type, value_of(widen_signed(load<B>(codes)), scale));
    };
    std::size_t at = i;
    for (; at + LANES <= stop; at += LANES) {
      const U raw = made(block + 4 + (at - i));
      if (type == FloatType::kF32) {
        store(out + 4 * at, raw);
      } else {
        store(out + 2 * at, narrow(raw));
      }
    }
    if (at < stop) {
      std::uint8_t codes[LANES] = {};
      std::memcpy(codes, block + 4 + (at - i), stop - at);
      const U raw = made(codes);
      const H halves = narrow(raw);
      const bool whole = type == FloatType::kF32;
      std::memcpy(out + width(type) * at, whole ? static_cast<const void*>(&raw) : &halves,
                  width(type) * (stop - at));
    }
  }
}
