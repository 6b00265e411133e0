// Dequantisation of weights that other libraries have quantised, on the GPU: the twin of
// csrc/cpu/quantised.h. A thread dequantises eight columns of one row, and shares no memory.
//
// Where codes and weight both lie row by row, threads are numbered along rows. Else a block has a
// tile of kTileRows by kTileGroups threads: it reads whole sectors of words that lie side by side
// for several rows, from the L1 cache after the first time, and writes whole sectors.
#include "numbers.cuh"

namespace overspill {

enum { kRows = 0, kHalves = 1, kInterleaved = 2, kAwq = 3 };

constexpr u32 kEach = 8;        // columns of a thread
constexpr u32 kTileRows = 64;   // times kTileGroups: the threads of a block
constexpr u32 kTileGroups = 4;  // groups of eight columns

struct Codes {
  const u8* bytes;
  u64 order, bits, rows, columns, row_bytes;
};

// Where eight halves lie, to be written at once.
struct alignas(16) Halves {
  u32 pair[4];
};

// The first eight columns' codes from ``column`` on, or ``count`` of them, lowest bits first.
__device__ __forceinline__ u64 codes_at(const Codes& codes, u64 row, u64 column, u32 count) {
  u64 word = 0;
  if (codes.order == kAwq) {
    const u32 nibble = static_cast<u32>(row % 2 * 4 + row % 8 / 2);
    const u32* words = reinterpret_cast<const u32*>(codes.bytes) + row / 8;
#pragma unroll
    for (u32 k = 0; k < kEach; ++k) {
      if (k >= count) break;
      const u64 code = words[(column + k) * (codes.rows / 8)] >> (4 * nibble) & 15u;
      word |= code << (4 * k);
    }
    return word;
  }
  const u64 first = column / kEach * codes.bits;  // byte
  const u32 bytes = static_cast<u32>(count * codes.bits + 7) / 8;
#pragma unroll
  for (u32 k = 0; k < kEach; ++k) {
    if (k >= bytes) break;
    const u64 byte = first + k;
    const u64 place = codes.order == kInterleaved ? (byte / 4 * codes.rows + row) * 4 + byte % 4
                                                  : row * codes.row_bytes + byte;
    word |= static_cast<u64>(codes.bytes[place]) << (8 * k);
  }
  if (codes.order != kHalves) return word;
  return (word >> 4 & 0x0f0f0f0fu) | (word & 0x0f0f0f0fu) << 4;
}

__device__ __forceinline__ float round_through(u64 type, float value) {
  if (type == kF32) return value;
  return type == kF16 ? from_f16(to_f16(value)) : floats(even_half(bits(value)) << 16);
}

// Bits of a value as it is stored: of fp32, or of a half.
__device__ __forceinline__ u32 as_stored(u64 type, float value) {
  if (type == kF32) return bits(value);
  return type == kF16 ? to_f16(value) : even_half(bits(value));
}

__device__ __forceinline__ void write(u64 type, void* to, u64 at, u32 raw) {
  if (type == kF32) {
    static_cast<u32*>(to)[at] = raw;
  } else {
    static_cast<u16*>(to)[at] = static_cast<u16>(raw);
  }
}

// Whether eight halves could be written at once.
__device__ __forceinline__ bool write_halves(void* to, u64 at, const u32* raw) {
  u16* place = static_cast<u16*>(to) + at;
  if (reinterpret_cast<u64>(place) % sizeof(Halves) != 0) return false;
  *reinterpret_cast<Halves*>(place) = Halves{
      {raw[0] | raw[1] << 16, raw[2] | raw[3] << 16, raw[4] | raw[5] << 16, raw[6] | raw[7] << 16}};
  return true;
}

// ``zeros`` and ``index`` may be nullptr. Launch with 256 threads a block: in tiles, one block for
// each; else as many as cover all rows of groups of eight columns.
extern "C" __global__ void dequantise(const u8* bytes, const float* table, const float* scales,
                                      const float* zeros, const int* index, void* weight, u64 order,
                                      u64 bits, u64 rows, u64 columns, u64 row_bytes,
                                      u64 block_rows, u64 block_columns, u64 groups, u64 transposed,
                                      u64 through, u64 type, float factor) {
  const u64 across = (columns + kEach - 1) / kEach;  // threads of a row
  u64 row, place;
  if (order <= kHalves && !transposed) {
    const u64 number = static_cast<u64>(blockIdx.x) * blockDim.x + threadIdx.x;
    row = number / across;
    place = number % across;
  } else {
    const u64 tiles = (across + kTileGroups - 1) / kTileGroups;
    const u32 by_row = transposed ? threadIdx.x % kTileRows : threadIdx.x / kTileGroups;
    const u32 by_group = transposed ? threadIdx.x / kTileRows : threadIdx.x % kTileGroups;
    row = blockIdx.x / tiles * kTileRows + by_row;
    place = blockIdx.x % tiles * kTileGroups + by_group;
  }
  if (row >= rows || place >= across) return;
  const u64 column = place * kEach;
  const u32 count = static_cast<u32>(columns - column < kEach ? columns - column : kEach);
  const u64 word =
      codes_at(Codes{bytes, order, bits, rows, columns, row_bytes}, row, column, count);
  const u64 shared = row / block_rows * groups;
  u64 group = column / block_columns, passed = column % block_columns;
  u32 raw[kEach];
#pragma unroll
  for (u32 k = 0; k < kEach; ++k) {
    if (k >= count) break;
    const u64 at = shared + (index != nullptr ? static_cast<u64>(index[column + k]) : group);
    float value = table[word >> (k * bits) & ((1u << bits) - 1u)];
    if (zeros != nullptr) value = sub(value, zeros[at]);
    value = mul(mul(value, scales[at]), factor);
    raw[k] = as_stored(type, round_through(through, value));
    if (++passed == block_columns) {
      passed = 0;
      ++group;
    }
  }
  const u64 first = transposed ? column * rows + row : row * columns + column;
  const bool whole = count == kEach && type != kF32 && !transposed;
  if (whole && write_halves(weight, first, raw)) return;
#pragma unroll
  for (u32 k = 0; k < kEach; ++k) {
    if (k >= count) break;
    write(type, weight, first + (transposed ? k * rows : k), raw[k]);
  }
}

}  // namespace overspill
