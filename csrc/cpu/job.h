// What one optimizer call sweeps: plain facts, shared by the bindings and every instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

namespace overspill {

enum class FloatType : int { kF32 = 0, kBf16 = 1, kF16 = 2 };

// How a low-precision weight keeps its fp32 master: not at all, as lower halves, or whole.
enum class Master : int { kNone = 0, kSplit = 1, kF32 = 2 };

enum class MomentFormat : int { kF32 = 0, kBf16 = 1, kInt8 = 2 };

constexpr int kMomentFormats = 3;
constexpr int kMaxMoments = 3;
constexpr int kCoefficients = 9;

// Elements that share one int8 scale, and how many elements are encoded at once.
constexpr std::size_t kBlock = 256;
constexpr std::size_t kStretch = 4 * kBlock;

// Elements of one task of the thread pool: results that are summed (norms) are summed per task and
// then over tasks in order, so that no result depends on the number of threads.
constexpr std::size_t kTask = 16384;

// A magnitude (bits without the sign) from which on an fp32 value is not finite.
constexpr std::uint32_t kInfinity = 0x7f800000u;

struct Job {
  std::size_t numel = 0;
  std::uint64_t position = 0;   // of element 0 in the whole flat buffer: keys the rounding noise
  std::uint32_t noise_key = 0;  // differs by step
  FloatType grad_type = FloatType::kF32;
  FloatType weight_type = FloatType::kF32;
  Master master_kind = Master::kNone;
  const void* grad = nullptr;
  void* weight = nullptr;
  void* master = nullptr;
  void* moment[kMaxMoments] = {};
  float* scale[kMaxMoments] = {};  // int8 only: one per kBlock elements
  float coefficient[kCoefficients] = {};
};

// Elements of a frozen weight that share one nf4 scale, and scales that share one of their own.
constexpr std::size_t kPackedBlock = 64;
constexpr std::size_t kScaleBlock = 256;
constexpr float kInt8Step = 7.874015718698502e-3f;  // 1 / 127

// A frozen weight in the format that it is kept in, and where it is to be as compute has it.
struct Packed {
  const std::uint8_t* codes = nullptr;       // nf4: two a byte; int8: one
  const std::uint8_t* scale_code = nullptr;  // nf4: one per block
  const float* scale = nullptr;              // nf4: one per kScaleBlock blocks; int8: per row
  const float* table = nullptr;              // nf4: the sixteen values
  const float* scale_table = nullptr;        // nf4: the 256 that scales have, of their own scale
  float offset = 0.0f;                       // nf4: added to every scale
  std::size_t columns = 0;                   // int8: of a row
  void* weight = nullptr;
  FloatType weight_type = FloatType::kF32;
};

// A frozen weight as compute has it, and where it is to be in the format that it is kept in.
struct Packing {
  const void* weight = nullptr;
  FloatType weight_type = FloatType::kF32;
  const float* edges = nullptr;  // nf4: the fifteen between two values each
  std::size_t columns = 0;       // int8: of a row
  std::uint8_t* codes = nullptr;
  float* scale = nullptr;  // nf4: one per block, as it is; int8: per row
};

// Where the codes of a quantised matrix lie: see optim/quantised.py.
enum class Order : int { kRows = 0, kHalves = 1, kInterleaved = 2, kAwq = 3 };

// Tiles in which matrices are dequantised: see Note [Dequantisation by rows] in quantised.h.
constexpr std::size_t kTileRows = 128;
constexpr std::size_t kTileColumns = 512;
constexpr std::size_t kTransposedColumns = 64;

// A quantised matrix, and the weight to be made from it.
struct Quantised {
  const std::uint8_t* codes = nullptr;
  const float* table = nullptr;         // the number that each code stands for
  const float* scales = nullptr;        // ``groups`` for every block of rows
  const float* zeros = nullptr;         // like scales, or nullptr for zero
  const std::int32_t* index = nullptr;  // the group of each column, or nullptr for blocks
  void* weight = nullptr;
  Order order = Order::kRows;
  std::size_t bits = 0;
  std::size_t rows = 0;
  std::size_t columns = 0;
  std::size_t row_bytes = 0;
  std::size_t block_rows = 0;
  std::size_t block_columns = 0;
  std::size_t groups = 0;
  bool transposed = false;
  FloatType through = FloatType::kF32;
  FloatType weight_type = FloatType::kF32;
  float factor = 1.0f;

  // Whether both codes and weight lie row by row, so that no tile of several rows is needed.
  bool by_rows() const { return order <= Order::kHalves && !transposed; }
};

// Rows and columns of a matrix: the first of each, and how many.
struct Tile {
  std::size_t row, rows, column, columns;
};

// The first column is a multiple of kTileColumns; the first row of kTileRows, unless by_rows().
using DequantiseFn = void (*)(const Quantised& quantised, const Tile& tile);

// Elements of a saved activation that share a scale, and the bytes that they are packed in.
constexpr std::size_t kActivationBlock = 128;
constexpr std::size_t kActivationBytes = kActivationBlock + 4;

// A saved activation as compute has it, and in packed blocks: either is made from the other.
struct Activation {
  void* values = nullptr;
  FloatType type = FloatType::kF32;
  std::uint8_t* blocks = nullptr;
};

constexpr float kSmallestSize = 1e-38f;  // whose reciprocal is finite
constexpr std::uint32_t kCodeOfZero = 7;

using PackFn = bool (*)(const Packing& packing, std::size_t begin, std::size_t end);
using ActivationFn = void (*)(const Activation& activation, std::size_t begin, std::size_t end);
using UnpackFn = void (*)(const Packed& packed, std::size_t begin, std::size_t end);

// Updates elements [begin, end); begin is a multiple of kTask. Returns whether all values that it
// wrote are finite as stored.
using UpdateFn = bool (*)(const Job& job, std::size_t begin, std::size_t end);
using SumOfSquaresFn = double (*)(FloatType type, const void* data, std::size_t numel);
using SplitMasterFn = void (*)(const std::uint32_t* from, std::uint16_t* upper,
                               std::uint16_t* lower, std::size_t numel);
using AccumulateFn = void (*)(float* to, FloatType type, const void* from, std::size_t numel);

// One rule's kernels by the format of its moments; nullptr where it has none.
struct RuleKernels {
  const char* name;
  UpdateFn update[kMomentFormats];
};

// The kernels of one instruction set; their rules are the same, in one order.
struct Kernels {
  const char* name;
  const RuleKernels* rules;
  int rule_count;
  SumOfSquaresFn sum_of_squares;
  AccumulateFn accumulate;
  SplitMasterFn split_master;
  UnpackFn unpack_nf4;
  UnpackFn unpack_int8;
  PackFn pack_nf4;
  PackFn pack_int8;
  ActivationFn pack_activation;
  ActivationFn unpack_activation;
  DequantiseFn dequantise;
};

}  // namespace overspill
