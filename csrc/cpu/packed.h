// Frozen weights from the format that they are kept in: nf4 in blocks of 64 with a scale that is
// itself a byte, and int8 with a scale per row. Included once per instruction set.

// fp32 as it is stored: its bits, or those of a half in the lower 16.
INLINE U as_stored(FloatType type, F value) {
  if (type == FloatType::kF32) return bits(value);
  return type == FloatType::kF16 ? widen(to_f16(value)) : even_half(bits(value));
}

// Of a block there are but sixteen values: they are made once, and looked up.
struct Sixteen {
  std::uint32_t value[16];
};

INLINE Sixteen values_of(FloatType type, const float* table, float scale) {
  Sixteen made;
  for (int code = 0; code < 16; code += LANES) {
    store(made.value + code, as_stored(type, load<F>(table + code) * all(scale)));
  }
  return made;
}

// Codes of ``count`` elements, an even one in the upper half of a byte.
INLINE void look_up(const Sixteen& made, FloatType type, const std::uint8_t* codes, void* to,
                    std::size_t count) {
  std::size_t i = 0;
#if LANES == 16
  if (type != FloatType::kF32) {
    const __m512i words = _mm512_loadu_si512(made.value);
    const __m512i table = _mm512_castsi256_si512(_mm512_cvtepi32_epi16(words));
    const __m512i low = _mm512_set1_epi32(15);
    for (; i + 32 <= count; i += 32) {
      const __m512i pair =
          _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2)));
      const __m512i odd = _mm512_slli_epi32(_mm512_and_si512(pair, low), 16);
      const __m512i which = _mm512_or_si512(_mm512_srli_epi32(pair, 4), odd);
      _mm512_storeu_si512(static_cast<std::uint16_t*>(to) + i,
                          _mm512_permutexvar_epi16(which, table));
    }
  }
#elif LANES == 8
  if (type != FloatType::kF32) {
    alignas(16) std::uint8_t lower[16], upper[16];
    for (int code = 0; code < 16; ++code) {
      lower[code] = static_cast<std::uint8_t>(made.value[code]);
      upper[code] = static_cast<std::uint8_t>(made.value[code] >> 8);
    }
    const __m128i lowers = _mm_load_si128(reinterpret_cast<const __m128i*>(lower));
    const __m128i uppers = _mm_load_si128(reinterpret_cast<const __m128i*>(upper));
    const __m128i low = _mm_set1_epi8(15);
    for (; i + 32 <= count; i += 32) {
      const __m128i pair = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i / 2));
      const __m128i even = _mm_and_si128(_mm_srli_epi16(pair, 4), low);
      const __m128i odd = _mm_and_si128(pair, low);
      for (int half = 0; half < 2; ++half) {
        const __m128i which =
            half == 0 ? _mm_unpacklo_epi8(even, odd) : _mm_unpackhi_epi8(even, odd);
        const __m128i first = _mm_shuffle_epi8(lowers, which);
        const __m128i second = _mm_shuffle_epi8(uppers, which);
        auto* at = reinterpret_cast<__m128i*>(static_cast<std::uint16_t*>(to) + i + 16 * half);
        _mm_storeu_si128(at, _mm_unpacklo_epi8(first, second));
        _mm_storeu_si128(at + 1, _mm_unpackhi_epi8(first, second));
      }
    }
  }
#endif
  for (; i < count; ++i) {
    const std::uint8_t pair = codes[i / 2];
    const std::uint32_t value = made.value[i % 2 == 0 ? pair >> 4 : pair & 15];
    if (type == FloatType::kF32) {
      static_cast<std::uint32_t*>(to)[i] = value;
    } else {
      static_cast<std::uint16_t*>(to)[i] = static_cast<std::uint16_t>(value);
    }
  }
}

// Elements [begin, end); begin is a multiple of kTask, hence of a block.
void unpack_nf4(const Packed& packed, std::size_t begin, std::size_t end) {
  auto* out = static_cast<std::uint8_t*>(packed.weight);
  for (std::size_t i = begin; i < end; i += kPackedBlock) {
    const std::size_t block = i / kPackedBlock;
    const float scale =
        packed.scale_table[packed.scale_code[block]] * packed.scale[block / kScaleBlock] +
        packed.offset;
    const Sixteen made = values_of(packed.weight_type, packed.table, scale);
    look_up(made, packed.weight_type, packed.codes + i / 2, out + i * width(packed.weight_type),
            std::min(kPackedBlock, end - i));
  }
}

void unpack_int8(const Packed& packed, std::size_t begin, std::size_t end) {
  auto* out = static_cast<std::uint8_t*>(packed.weight);
  const FloatType type = packed.weight_type;
  for (std::size_t i = begin; i < end;) {
    const std::size_t row = i / packed.columns;
    const std::size_t stop = std::min(end, (row + 1) * packed.columns);
    const F scale = all(packed.scale[row]);
    const auto made = [&](const std::uint8_t* codes) INLINE_LAMBDA {
      const F code = convert<F>((S)widen_signed(load<B>(codes)));
      return as_stored(type, code * scale * all(kInt8Step));
    };
    for (; i + LANES <= stop; i += LANES) {
      const U raw = made(packed.codes + i);
      if (type == FloatType::kF32) {
        store(out + 4 * i, raw);
      } else {
        store(out + 2 * i, narrow(raw));
      }
    }
    if (i < stop) {
      std::uint8_t codes[LANES] = {};
      std::memcpy(codes, packed.codes + i, stop - i);
      const U raw = made(codes);
      const H halves = narrow(raw);
      const bool whole = type == FloatType::kF32;
      std::memcpy(out + width(type) * i, whole ? static_cast<const void*>(&raw) : &halves,
                  width(type) * (stop - i));
      i = stop;
    }
  }
}

// ``count`` elements, at most LANES; what is beyond them is zero.
INLINE F read_some(FloatType type, const std::uint8_t* from, std::size_t count) {
  if (count >= LANES) {
    if (type == FloatType::kF32) return load<F>(from);
    return type == FloatType::kF16 ? from_f16(load<H>(from)) : from_bf16(load<H>(from));
  }
  alignas(64) std::uint8_t raw[4 * LANES] = {};
  std::memcpy(raw, from, count * width(type));
  return read_some(type, raw, LANES);
}

// The magnitude (bits without the sign) of the largest of elements [begin, end).
INLINE std::uint32_t largest(FloatType type, const std::uint8_t* from, std::size_t begin,
                             std::size_t end) {
  U most{};
  for (std::size_t i = begin; i < end; i += LANES) {
    most = larger(most, magnitude(bits(read_some(type, from + i * width(type), end - i))));
  }
  return highest_lane(most);
}

INLINE float size_of(std::uint32_t magnitude) {
  float size;
  std::memcpy(&size, &magnitude, sizeof size);
  return size;
}

// Both say whether all elements of [begin, end) are finite; what is not has no codes.
bool pack_nf4(const Packing& packing, std::size_t begin, std::size_t end) {
  const auto* from = static_cast<const std::uint8_t*>(packing.weight);
  const FloatType type = packing.weight_type;
  for (std::size_t i = begin; i < end; i += kPackedBlock) {
    const std::size_t stop = std::min(end, i + kPackedBlock);
    const std::uint32_t most = largest(type, from, i, stop);
    if (most >= kInfinity) return false;
    packing.scale[i / kPackedBlock] = size_of(most);
    const F inverse = all(1.0f / std::max(size_of(most), kSmallestSize));
    alignas(64) std::uint32_t codes[kPackedBlock];
    for (std::size_t at = i; at < stop; at += LANES) {
      const F value = read_some(type, from + at * width(type), stop - at) * inverse;
      U code = every(0);
      for (int edge = 0; edge < 15; ++edge) {  // between two values each
        code += value > all(packing.edges[edge]) ? every(1) : every(0);
      }
      store(codes + (at - i), code);
    }
    if ((stop - i) % 2 != 0) codes[stop - i] = kCodeOfZero;
    for (std::size_t pair = 0; pair < stop - i; pair += 2) {
      packing.codes[(i + pair) / 2] = static_cast<std::uint8_t>(codes[pair] << 4 | codes[pair + 1]);
    }
  }
  return true;
}

// Of rows [begin, end).
bool pack_int8(const Packing& packing, std::size_t begin, std::size_t end) {
  const auto* from = static_cast<const std::uint8_t*>(packing.weight);
  const FloatType type = packing.weight_type;
  constexpr float kWhole = 12582912.0f;  // beyond it an fp32 has no fraction: ties go to even
  for (std::size_t row = begin; row < end; ++row) {
    const std::size_t first = row * packing.columns, stop = first + packing.columns;
    const std::uint32_t most = largest(type, from, first, stop);
    if (most >= kInfinity) return false;
    packing.scale[row] = size_of(most);
    const F inverse = all(127.0f / std::max(size_of(most), kSmallestSize));
    for (std::size_t at = first; at < stop; at += LANES) {
      const F value = read_some(type, from + at * width(type), stop - at) * inverse;
      const B code = narrow_to_byte((U)convert<S>(value + all(kWhole) - all(kWhole)));
      std::memcpy(packing.codes + at, &code, std::min<std::size_t>(LANES, stop - at));
    }
  }
  return true;
}
