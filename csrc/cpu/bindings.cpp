// overspill.optim._native: addresses and lengths in, no arrays and no torch. The Python side
// (optim/kernels.py) checks tensors; this side trusts it.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels_table.h"
#include "pool.h"

namespace nb = nanobind;

namespace overspill {
namespace {

std::vector<const Kernels*> available() {
  std::vector<const Kernels*> found;
  for (const Kernels* kernels :
       {avx512_kernels(), avx2_kernels(), neon_kernels(), scalar_kernels()}) {
    if (kernels != nullptr) found.push_back(kernels);
  }
  return found;
}

const Kernels& kernels_named(const std::string& name) {
  std::string names;
  for (const Kernels* kernels : available()) {
    if (name == kernels->name) return *kernels;
    names += names.empty() ? "" : ", ";
    names += kernels->name;
  }
  throw std::invalid_argument("instruction set '" + name + "' is not available; this machine has " +
                              names);
}

// The best at import; the Python side, benchmarks and tests may set another.
std::atomic<const Kernels*> active{nullptr};

const Kernels& kernels() { return *active.load(std::memory_order_relaxed); }

template <class T>
T* address(std::uintptr_t value) {
  return reinterpret_cast<T*>(value);
}

std::size_t tasks_of(std::size_t numel) { return (numel + kTask - 1) / kTask; }

using Addresses = std::array<std::uintptr_t, kMaxMoments>;

bool update(int rule, int moments, std::size_t numel, std::uint64_t position,
            std::uint32_t noise_key, std::uintptr_t grad, int grad_type, std::uintptr_t weight,
            int weight_type, std::uintptr_t master, int master_kind, const Addresses& moment,
            const Addresses& scale, const std::array<double, kCoefficients>& coefficients) {
  if (rule < 0 || rule >= kernels().rule_count || moments < 0 || moments >= kMomentFormats) {
    throw std::invalid_argument("no kernel for rule " + std::to_string(rule) +
                                " with moment format " + std::to_string(moments));
  }
  const RuleKernels& found = kernels().rules[rule];
  const UpdateFn kernel = found.update[moments];
  if (kernel == nullptr) {
    throw std::invalid_argument(std::string(found.name) + " has fp32 moments only");
  }
  Job job;
  job.numel = numel;
  job.position = position;
  job.noise_key = noise_key;
  job.grad = address<const void>(grad);
  job.grad_type = static_cast<FloatType>(grad_type);
  job.weight = address<void>(weight);
  job.weight_type = static_cast<FloatType>(weight_type);
  job.master = address<void>(master);
  job.master_kind = static_cast<Master>(master_kind);
  for (int k = 0; k < kMaxMoments; ++k) {
    job.moment[k] = address<void>(moment[k]);
    job.scale[k] = address<float>(scale[k]);
  }
  for (int k = 0; k < kCoefficients; ++k) {
    job.coefficient[k] = static_cast<float>(coefficients[k]);
  }
  const nb::gil_scoped_release released;
  std::atomic<bool> finite{true};
  auto task = [&](std::size_t index) {
    const std::size_t begin = index * kTask;
    if (!kernel(job, begin, std::min(begin + kTask, numel))) {
      finite.store(false, std::memory_order_relaxed);
    }
  };
  parallel(tasks_of(numel), task);
  return finite.load();
}

// Neumaier's compensated sum, in order.
double compensated(const double* first, const double* last) {
  double sum = 0.0, lost = 0.0;
  for (; first != last; ++first) {
    const double next = sum + *first;
    lost += sum >= *first ? (sum - next) + *first : (*first - next) + sum;
    sum = next;
  }
  return std::isfinite(lost) ? sum + lost : sum;
}

// Below this many tasks waking a thread costs more than it gives.
constexpr std::size_t kAlone = (std::size_t{1} << 22) / kTask;

// One sum for each array; all are of one type.
std::vector<double> sums_of_squares(const std::vector<std::uintptr_t>& data,
                                    const std::vector<std::size_t>& numel, int type) {
  const nb::gil_scoped_release released;
  const auto kind = static_cast<FloatType>(type);
  const std::size_t width = kind == FloatType::kF32 ? 4 : 2;
  std::vector<std::size_t> first{0};  // task of each array, and one past the last
  for (const std::size_t count : numel) first.push_back(first.back() + tasks_of(count));
  std::vector<double> parts(first.back());
  auto task = [&](std::size_t index) {
    const auto after = std::upper_bound(first.begin(), first.end(), index);
    const std::size_t array = after - first.begin() - 1;
    const std::size_t begin = (index - first[array]) * kTask;
    parts[index] = kernels().sum_of_squares(kind, address<const char>(data[array]) + begin * width,
                                            std::min(kTask, numel[array] - begin));
  };
  if (parts.size() < kAlone) {
    for (std::size_t index = 0; index < parts.size(); ++index) task(index);
  } else {
    parallel(parts.size(), task);
  }
  std::vector<double> sums;
  for (std::size_t array = 0; array < numel.size(); ++array) {
    sums.push_back(compensated(parts.data() + first[array], parts.data() + first[array + 1]));
  }
  return sums;
}

void accumulate(std::uintptr_t to, std::uintptr_t from, int type, std::size_t numel) {
  const nb::gil_scoped_release released;
  const auto kind = static_cast<FloatType>(type);
  const std::size_t width = kind == FloatType::kF32 ? 4 : 2;
  auto task = [&](std::size_t index) {
    const std::size_t begin = index * kTask;
    kernels().accumulate(address<float>(to) + begin, kind,
                         address<const char>(from) + begin * width, std::min(kTask, numel - begin));
  };
  parallel(tasks_of(numel), task);
}

void split_master(std::uintptr_t from, std::uintptr_t upper, std::uintptr_t lower,
                  std::size_t numel) {
  const nb::gil_scoped_release released;
  auto task = [&](std::size_t index) {
    const std::size_t begin = index * kTask;
    kernels().split_master(address<const std::uint32_t>(from) + begin,
                           address<std::uint16_t>(upper) + begin,
                           address<std::uint16_t>(lower) + begin, std::min(kTask, numel - begin));
  };
  parallel(tasks_of(numel), task);
}

void unpack(UnpackFn kernel, const Packed& packed, std::size_t numel) {
  const nb::gil_scoped_release released;
  auto task = [&](std::size_t index) {
    const std::size_t begin = index * kTask;
    kernel(packed, begin, std::min(begin + kTask, numel));
  };
  parallel(tasks_of(numel), task);
}

void unpack_nf4(std::uintptr_t codes, std::uintptr_t scale_code, std::uintptr_t scale,
                std::uintptr_t table, std::uintptr_t scale_table, float offset, std::size_t numel,
                std::uintptr_t weight, int weight_type) {
  Packed packed;
  packed.codes = address<const std::uint8_t>(codes);
  packed.scale_code = address<const std::uint8_t>(scale_code);
  packed.scale = address<const float>(scale);
  packed.table = address<const float>(table);
  packed.scale_table = address<const float>(scale_table);
  packed.offset = offset;
  packed.weight = address<void>(weight);
  packed.weight_type = static_cast<FloatType>(weight_type);
  unpack(kernels().unpack_nf4, packed, numel);
}

void unpack_int8(std::uintptr_t codes, std::uintptr_t scale, std::size_t rows, std::size_t columns,
                 std::uintptr_t weight, int weight_type) {
  Packed packed;
  packed.codes = address<const std::uint8_t>(codes);
  packed.scale = address<const float>(scale);
  packed.columns = columns;
  packed.weight = address<void>(weight);
  packed.weight_type = static_cast<FloatType>(weight_type);
  unpack(kernels().unpack_int8, packed, rows * columns);
}

bool pack(PackFn kernel, const Packing& packing, std::size_t count, std::size_t each) {
  const nb::gil_scoped_release released;
  std::atomic<bool> finite{true};
  auto task = [&](std::size_t index) {
    if (!kernel(packing, index * each, std::min((index + 1) * each, count))) finite.store(false);
  };
  parallel((count + each - 1) / each, task);
  return finite.load();
}

bool pack_nf4(std::uintptr_t weight, int weight_type, std::size_t numel, std::uintptr_t edges,
              std::uintptr_t codes, std::uintptr_t scale) {
  Packing packing;
  packing.weight = address<const void>(weight);
  packing.weight_type = static_cast<FloatType>(weight_type);
  packing.edges = address<const float>(edges);
  packing.codes = address<std::uint8_t>(codes);
  packing.scale = address<float>(scale);
  return pack(kernels().pack_nf4, packing, numel, kTask);
}

bool pack_int8(std::uintptr_t weight, int weight_type, std::size_t rows, std::size_t columns,
               std::uintptr_t codes, std::uintptr_t scale) {
  Packing packing;
  packing.weight = address<const void>(weight);
  packing.weight_type = static_cast<FloatType>(weight_type);
  packing.columns = columns;
  packing.codes = address<std::uint8_t>(codes);
  packing.scale = address<float>(scale);
  return pack(kernels().pack_int8, packing, rows, std::max<std::size_t>(1, kTask / columns));
}

void convert(ActivationFn kernel, std::uintptr_t values, int type, std::size_t numel,
             std::uintptr_t blocks) {
  Activation activation;
  activation.values = address<void>(values);
  activation.type = static_cast<FloatType>(type);
  activation.blocks = address<std::uint8_t>(blocks);
  const nb::gil_scoped_release released;
  auto task = [&](std::size_t index) {
    const std::size_t begin = index * kTask;
    kernel(activation, begin, std::min(begin + kTask, numel));
  };
  parallel(tasks_of(numel), task);
}

void pack_activation(std::uintptr_t values, int type, std::size_t numel, std::uintptr_t blocks) {
  convert(kernels().pack_activation, values, type, numel, blocks);
}

void unpack_activation(std::uintptr_t blocks, std::size_t numel, std::uintptr_t values, int type) {
  convert(kernels().unpack_activation, values, type, numel, blocks);
}

std::size_t round_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

// The rows and columns of a task: about kTaskElements, in as few rows as tiles allow.
Tile task_shape(const Quantised& q) {
  constexpr std::size_t kTaskElements = 4 * kTask;
  Tile task{};
  task.columns = std::min(q.columns, q.by_rows() ? kTaskElements : kTileColumns);
  task.rows = kTaskElements / task.columns;
  if (!q.by_rows()) task.rows = round_up(task.rows, kTileRows);
  task.rows = std::min(task.rows, q.rows);
  task.columns = round_up(std::max(task.columns, kTaskElements / task.rows), kTileColumns);
  return task;
}

// ``zeros`` and ``index`` may be 0. There is at least one row and one column.
void dequantise(std::uintptr_t codes, std::uintptr_t table, std::uintptr_t scales,
                std::uintptr_t zeros, std::uintptr_t index, std::uintptr_t weight, int order,
                std::size_t bits, std::size_t rows, std::size_t columns, std::size_t row_bytes,
                std::size_t block_rows, std::size_t block_columns, std::size_t groups,
                bool transposed, int through, int weight_type, float factor) {
  Quantised q;
  q.codes = address<const std::uint8_t>(codes);
  q.table = address<const float>(table);
  q.scales = address<const float>(scales);
  q.zeros = address<const float>(zeros);
  q.index = address<const std::int32_t>(index);
  q.weight = address<void>(weight);
  q.order = static_cast<Order>(order);
  q.bits = bits;
  q.rows = rows;
  q.columns = columns;
  q.row_bytes = row_bytes;
  q.block_rows = block_rows;
  q.block_columns = block_columns;
  q.groups = groups;
  q.transposed = transposed;
  q.through = static_cast<FloatType>(through);
  q.weight_type = static_cast<FloatType>(weight_type);
  q.factor = factor;
  const nb::gil_scoped_release released;
  const DequantiseFn kernel = kernels().dequantise;
  const Tile each = task_shape(q);
  const std::size_t across = (columns + each.columns - 1) / each.columns;
  auto task = [&](std::size_t number) {
    const std::size_t row = number / across * each.rows, column = number % across * each.columns;
    kernel(q, Tile{row, std::min(each.rows, rows - row), column,
                   std::min(each.columns, columns - column)});
  };
  parallel((rows + each.rows - 1) / each.rows * across, task);
}

}  // namespace
}  // namespace overspill

NB_MODULE(_native, m) {
  using namespace overspill;
  using namespace nb::literals;
  active.store(available().front());
  m.def("update", &update);
  m.def("sums_of_squares", &sums_of_squares);
  m.def("accumulate", &accumulate);
  m.def("split_master", &split_master);
  m.def("unpack_nf4", &overspill::unpack_nf4);
  m.def("unpack_int8", &overspill::unpack_int8);
  m.def("pack_nf4", &overspill::pack_nf4);
  m.def("pack_int8", &overspill::pack_int8);
  m.def("pack_activation", &overspill::pack_activation);
  m.def("unpack_activation", &overspill::unpack_activation);
  m.def("dequantise", &overspill::dequantise, "codes"_a, "table"_a, "scales"_a, "zeros"_a,
        "index"_a, "weight"_a, "order"_a, "bits"_a, "rows"_a, "columns"_a, "row_bytes"_a,
        "block_rows"_a, "block_columns"_a, "groups"_a, "transposed"_a, "through"_a, "weight_type"_a,
        "factor"_a);
  m.def("set_threads", [](int count) {
    const nb::gil_scoped_release released;
    set_pool_threads(count);
  });
  m.def("threads", &pool_threads);
  m.def("isa", [] { return std::string(kernels().name); });
  m.def("rules", [] {
    std::vector<std::string> names;
    for (int rule = 0; rule < kernels().rule_count; ++rule) {
      names.emplace_back(kernels().rules[rule].name);
    }
    return names;
  });
  m.def("isas", [] {
    std::vector<std::string> names;
    for (const Kernels* kernels : available()) names.emplace_back(kernels->name);
    return names;
  });
  m.def("set_isa", [](const std::string& name) { active.store(&kernels_named(name)); });
}
