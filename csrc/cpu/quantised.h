// Dequantisation of weights that other libraries have quantised, with the bits of
// optim/quantised.py. Included once per instruction set.
//
// Note [Dequantisation by rows]
// Every order of codes becomes rows of bits first, so that one decoder serves all of them:
//
// 1. Gather ("interleaved" and "awq" only): transpose the words of a tile in a buffer, in which
//    every row is a sequence of bits. Words are read in memory order; moving them costs little, as
//    a word has several codes.
// 2. Look up: turn the codes of a row into fp32 numbers by the table. With 4 bits the table is in
//    registers.
// 3. Scale: subtract zeros, multiply, and round to ``through``. Scales are spread over a row buffer
//    first: this costs a store per vector, and serves any block and any index.
// 4. Store: round to the dtype of the weight. A transposed weight is written a column at a time,
//    from a tile of rows that were kept as fp32.
//
// All buffers fit in the L2 cache. Tiles begin at multiples of 32 columns, where codes of any
// size begin on a 32-bit word, and at multiples of 8 rows, as a word of "awq" does.

constexpr std::size_t kSpare = 16;  // floats past the end of a row that vectors may touch
constexpr int kAwqNibbles[8] = {0, 4, 1, 5, 2, 6, 3, 7};  // where a word has the codes of its rows

struct RowBuffers {
  alignas(64) std::uint8_t gathered[kTileRows * kTileColumns];  // rows of at most a byte per code
  alignas(64) float made[kTileRows * (kTransposedColumns + kSpare)];
  alignas(64) float scales[kTileColumns + kSpare];
  alignas(64) float zeros[kTileColumns + kSpare];
};

// -- gather ---------------------------------------------------------------------------------------

INLINE void gather_interleaved(const Quantised& q, const Tile& tile, std::uint8_t* to,
                               std::size_t row_bytes) {
  const std::size_t first = tile.column * q.bits / 32;
  const std::size_t words = (tile.columns * q.bits + 31) / 32;
  const std::uint8_t* from = q.codes + 4 * (first * q.rows + tile.row);
  std::size_t word = 0;
  for (; word + 4 <= words; word += 4) {  // a longer store costs no more than one of a word
    for (std::size_t row = 0; row < tile.rows; ++row) {
      std::uint32_t four[4];
      for (int k = 0; k < 4; ++k)
        four[k] = load<std::uint32_t>(from + 4 * ((word + k) * q.rows + row));
      std::memcpy(to + row * row_bytes + 4 * word, four, sizeof four);
    }
  }
  for (; word < words; ++word) {
    for (std::size_t row = 0; row < tile.rows; ++row) {
      std::memcpy(to + row * row_bytes + 4 * word, from + 4 * (word * q.rows + row), 4);
    }
  }
}

// Exchange the upper half of every field of ``a`` with the lower half of that of ``b``.
INLINE void exchange(U& a, U& b, int bits, std::uint32_t lower) {
  const U moved = ((a >> bits) ^ b) & lower;
  b ^= moved;
  a ^= moved << bits;
}

// Transpose eight words of eight nibbles each: nibble j of word i becomes nibble i of word j.
INLINE void transpose_nibbles(U (&word)[8]) {
  for (int i = 0; i < 4; ++i) exchange(word[i], word[i + 4], 16, 0x0000ffffu);
  for (int i : {0, 1, 4, 5}) exchange(word[i], word[i + 2], 8, 0x00ff00ffu);
  for (int i = 0; i < 8; i += 2) exchange(word[i], word[i + 1], 4, 0x0f0f0f0fu);
}

INLINE void gather_awq(const Quantised& q, const Tile& tile, std::uint8_t* to,
                       std::size_t row_bytes) {
  const std::size_t words = tile.rows / 8;
  for (std::size_t column = 0; column < tile.columns; column += 8) {
    for (std::size_t at = 0; at < words; at += LANES) {
      const std::size_t lanes = std::min<std::size_t>(LANES, words - at);
      U word[8] = {};
      for (std::size_t k = 0; k < std::min<std::size_t>(8, tile.columns - column); ++k) {
        const std::size_t place = (tile.column + column + k) * (q.rows / 8) + tile.row / 8 + at;
        if (lanes == LANES) {
          word[k] = load<U>(q.codes + 4 * place);
        } else {
          std::memcpy(&word[k], q.codes + 4 * place, 4 * lanes);
        }
      }
      transpose_nibbles(word);
      for (int row = 0; row < 8; ++row) {
        alignas(64) std::uint32_t each[LANES];
        store(each, word[kAwqNibbles[row]]);
        std::uint8_t* place = to + (8 * at + row) * row_bytes + column / 2;
        for (std::size_t lane = 0; lane < lanes; ++lane) {
          std::memcpy(place + 8 * lane * row_bytes, &each[lane], 4);
        }
      }
    }
  }
}

// -- look up --------------------------------------------------------------------------------------

#if LANES == 16
// A table of sixteen numbers in registers. It ignores all but the lowest four bits of a lane.
struct NibbleTable {
  F numbers;
  explicit NibbleTable(const float* table) : numbers(load<F>(table)) {}
  INLINE F operator[](__m512i codes) const {
    return (F)_mm512_permutexvar_ps(codes, (__m512)numbers);
  }
};
// Bytes of two codes in 64-bit lanes, so that every 32-bit lane has its code in the lowest bits.
template <bool kUpperFirst>
INLINE __m512i spread_nibbles(const std::uint8_t* from) {
  const __m512i pair = _mm512_cvtepu8_epi64(_mm_loadl_epi64((const __m128i*)from));
  if (kUpperFirst) return _mm512_or_si512(_mm512_srli_epi64(pair, 4), _mm512_slli_epi64(pair, 32));
  return _mm512_or_si512(pair, _mm512_slli_epi64(pair, 28));
}
#elif LANES == 8
struct NibbleTable {
  F lower, upper;
  explicit NibbleTable(const float* table) : lower(load<F>(table)), upper(load<F>(table + 8)) {}
  INLINE F operator[](__m256i codes) const {
    const __m256 fourth_bit = _mm256_castsi256_ps(_mm256_slli_epi32(codes, 28));
    return (F)_mm256_blendv_ps(_mm256_permutevar8x32_ps((__m256)lower, codes),
                               _mm256_permutevar8x32_ps((__m256)upper, codes), fourth_bit);
  }
};
template <bool kUpperFirst>
INLINE __m256i spread_nibbles(const std::uint8_t* from) {
  const __m256i pair = _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(load<int>(from)));
  if (kUpperFirst) return _mm256_or_si256(_mm256_srli_epi64(pair, 4), _mm256_slli_epi64(pair, 32));
  return _mm256_or_si256(pair, _mm256_slli_epi64(pair, 28));
}
#endif

// Numbers of ``count`` codes; up to seven more are written.
template <int kBits, bool kUpperFirst>
void look_up_row(const float* table, const std::uint8_t* codes, std::size_t count, float* to) {
  std::size_t i = 0;
#if LANES >= 8
  if constexpr (kBits == 4) {
    const NibbleTable numbers(table);
    for (; i + LANES <= count; i += LANES) {
      store(to + i, numbers[spread_nibbles<kUpperFirst>(codes + i / 2)]);
    }
  }
#endif
  const std::size_t bytes = (count * kBits + 7) / 8;
  for (; i < count; i += 8) {
    const std::size_t at = i / 8 * kBits;
    std::uint64_t word = 0;
    if (at + sizeof word <= bytes) {
      word =
          load<std::uint64_t>(codes + at);  // in one piece, which takes less time than fewer bytes
    } else {
      std::memcpy(&word, codes + at, std::min<std::size_t>(kBits, bytes - at));
    }
    if (kUpperFirst) word = (word >> 4 & 0x0f0f0f0fu) | (word & 0x0f0f0f0fu) << 4;
    for (int k = 0; k < 8; ++k) to[i + k] = table[word >> (k * kBits) & ((1u << kBits) - 1)];
  }
}

using LookUpFn = void (*)(const float* table, const std::uint8_t* codes, std::size_t count,
                          float* to);

INLINE LookUpFn look_up_of(const Quantised& q) {
  constexpr LookUpFn kByBits[] = {&look_up_row<1, false>, &look_up_row<2, false>,
                                  &look_up_row<3, false>, &look_up_row<4, false>,
                                  &look_up_row<5, false>, &look_up_row<6, false>,
                                  &look_up_row<7, false>, &look_up_row<8, false>};
  return q.order == Order::kHalves ? &look_up_row<4, true> : kByBits[q.bits - 1];
}

// -- scale ----------------------------------------------------------------------------------------

// Spread what blocks share over the columns of a row; up to LANES - 1 more are written.
INLINE void spread_row(const Quantised& q, const float* shared, const Tile& tile, std::size_t row,
                       float* to) {
  const float* of_row = shared + row / q.block_rows * q.groups;
  if (q.index != nullptr) {
    for (std::size_t i = 0; i < tile.columns; ++i) to[i] = of_row[q.index[tile.column + i]];
    return;
  }
  std::size_t group = tile.column / q.block_columns;
  std::size_t left = q.block_columns - tile.column % q.block_columns;  // columns of this group
  for (std::size_t i = 0; i < tile.columns; ++group, left = q.block_columns) {
    const std::size_t stop = i + std::min(left, tile.columns - i);
    const F each = all(of_row[group]);
    for (std::size_t at = i; at < stop; at += LANES) store(to + at, each);
    i = stop;
  }
}

INLINE F round_through(FloatType through, F value) {
  if (through == FloatType::kF32) return value;
  if (through == FloatType::kF16) return from_f16(to_f16(value));
  return floats(even_half(bits(value)) << 16);
}

// (number - zero) * scale * factor, in place; ``zeros`` may be nullptr.
INLINE void scale_row(const Quantised& q, float* made, const float* scales, const float* zeros,
                      std::size_t count) {
  const F factor = all(q.factor);
  const FloatType through = q.through;
  for (std::size_t i = 0; i < count; i += LANES) {
    F value = load<F>(made + i);
    if (zeros != nullptr) value = value - load<F>(zeros + i);
    value = value * load<F>(scales + i);
    value = value * factor;
    store(made + i, round_through(through, value));
  }
}

// -- store ----------------------------------------------------------------------------------------

INLINE void store_rounded(FloatType type, void* to, F value) {
  if (type == FloatType::kF32) return store(to, value);
  if (type == FloatType::kF16) return store(to, to_f16(value));
  store(to, narrow(even_half(bits(value))));
}

INLINE void store_row(const Quantised& q, std::size_t element, const float* made,
                      std::size_t count) {
  const FloatType type = q.weight_type;
  auto* to = static_cast<std::uint8_t*>(q.weight) + element * width(type);
  std::size_t i = 0;
  for (; i + LANES <= count; i += LANES)
    store_rounded(type, to + i * width(type), load<F>(made + i));
  if (i < count) {
    alignas(64) std::uint8_t last[4 * LANES];
    store_rounded(type, last, load<F>(made + i));
    std::memcpy(to + i * width(type), last, (count - i) * width(type));
  }
}

INLINE void store_transposed(const Quantised& q, const Tile& tile, const float* made,
                             std::size_t stride) {
  alignas(64) float line[kTileRows + kSpare];
  for (std::size_t column = 0; column < tile.columns; ++column) {
    for (std::size_t row = 0; row < tile.rows; ++row) line[row] = made[row * stride + column];
    store_row(q, (tile.column + column) * q.rows + tile.row, line, tile.rows);
  }
}

// -- tiles ----------------------------------------------------------------------------------------

// A tile of at most kTileRows, and kTileColumns or, transposed, kTransposedColumns.
INLINE void dequantise_tile(const Quantised& q, const Tile& tile, LookUpFn look_up,
                            RowBuffers& buffers) {
  const std::uint8_t* codes = buffers.gathered;
  std::size_t row_bytes = kTileColumns * q.bits / 8;
  if (q.order == Order::kInterleaved) {
    gather_interleaved(q, tile, buffers.gathered, row_bytes);
  } else if (q.order == Order::kAwq) {
    gather_awq(q, tile, buffers.gathered, row_bytes);
  } else {
    row_bytes = q.row_bytes;
    codes = q.codes + tile.row * row_bytes + tile.column * q.bits / 8;
  }
  constexpr std::size_t kStride = kTransposedColumns + kSpare;
  for (std::size_t k = 0; k < tile.rows; ++k) {
    float* made = buffers.made + (q.transposed ? k * kStride : 0);
    look_up(q.table, codes + k * row_bytes, tile.columns, made);
    spread_row(q, q.scales, tile, tile.row + k, buffers.scales);
    if (q.zeros != nullptr) spread_row(q, q.zeros, tile, tile.row + k, buffers.zeros);
    scale_row(q, made, buffers.scales, q.zeros == nullptr ? nullptr : buffers.zeros, tile.columns);
    if (!q.transposed) store_row(q, (tile.row + k) * q.columns + tile.column, made, tile.columns);
  }
  if (q.transposed) store_transposed(q, tile, buffers.made, kStride);
}

void dequantise(const Quantised& q, const Tile& task) {
  RowBuffers buffers;  // uninitialised
  const LookUpFn look_up = look_up_of(q);
  const std::size_t high = q.by_rows() ? 1 : kTileRows;
  const std::size_t wide = q.transposed ? kTransposedColumns : kTileColumns;
  const std::size_t last_row = task.row + task.rows, last_column = task.column + task.columns;
  for (std::size_t row = task.row; row < last_row; row += high) {
    for (std::size_t column = task.column; column < last_column; column += wide) {
      const Tile tile{row, std::min(high, last_row - row), column,
                      std::min(wide, last_column - column)};
      dequantise_tile(q, tile, look_up, buffers);
    }
  }
}
