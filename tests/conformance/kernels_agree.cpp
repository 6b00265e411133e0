// Runs every kernel of this machine's instruction sets on the same buffers, and prints a checksum
// of all that they wrote. Ends with 1 where one differs from the scalar kernels. Built for another
// processor too, so it knows no Python.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "kernels_table.h"

using namespace overspill;

#ifdef PORTABLE_ONLY  // without the x86 kernels, which take long to compile
namespace overspill {
const Kernels* avx2_kernels() { return nullptr; }
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace overspill
#endif

namespace {

std::uint32_t drawn = 12345;
std::uint32_t draw() { return drawn = drawn * 1664525u + 1013904223u; }

// Bits of a float of any sign within some decades around one thousandth.
std::uint32_t some_float() {
  const std::uint32_t exponent = 127u - 20u + (draw() >> 8) % 20u;
  return (draw() & 0x80000000u) | exponent << 23 | draw() >> 9;
}

struct Buffers {
  std::vector<std::uint8_t> grad, weight, master, moment[kMaxMoments];
  std::vector<float> scale[kMaxMoments];
};

std::size_t width(FloatType type) { return type == FloatType::kF32 ? 4 : 2; }

void fill(std::vector<std::uint8_t>& buffer, FloatType type) {
  for (std::size_t i = 0; i < buffer.size(); i += width(type)) {
    std::uint32_t raw = some_float();
    if (type == FloatType::kBf16) raw >>= 16;
    if (type == FloatType::kF16) raw = (draw() & 0x8000u) | (draw() >> 16) % 0x5000u;
    std::memcpy(&buffer[i], &raw, width(type));
  }
}

Buffers make(std::size_t numel, FloatType grad, FloatType weight, Master master, int format) {
  Buffers made;
  made.grad.resize(numel * width(grad));
  made.weight.resize(numel * width(weight));
  made.master.resize(numel * (master == Master::kF32 ? 4 : 2));
  fill(made.grad, grad);
  fill(made.weight, weight);
  fill(made.master, master == Master::kF32 ? FloatType::kF32 : FloatType::kBf16);
  constexpr std::size_t kWidths[] = {4, 2, 1};
  for (int k = 0; k < kMaxMoments; ++k) {
    made.moment[k].resize(numel * kWidths[format]);
    made.scale[k].resize((numel + kBlock - 1) / kBlock);
  }
  return made;
}

Job job_of(Buffers& b, std::size_t numel, FloatType grad, FloatType weight, Master master,
           int step) {
  Job job;
  job.numel = numel;
  job.position = 512;
  job.noise_key = 77u * static_cast<std::uint32_t>(step);
  job.grad_type = grad;
  job.weight_type = weight;
  job.master_kind = master;
  job.grad = b.grad.data();
  job.weight = b.weight.data();
  job.master = b.master.data();
  for (int k = 0; k < kMaxMoments; ++k) {
    job.moment[k] = b.moment[k].data();
    job.scale[k] = b.scale[k].data();
  }
  const float coefficients[kCoefficients] = {0.5f,  0.999f, 0.01f, 0.1f, 0.95f,
                                             0.05f, 1.5f,   1e-8f, 1e-3f};
  std::copy(coefficients, coefficients + kCoefficients, job.coefficient);
  return job;
}

std::uint64_t hashed = 1469598103934665603ull;
void hash(const void* data, std::size_t bytes) {
  const auto* at = static_cast<const std::uint8_t*>(data);
  for (std::size_t i = 0; i < bytes; ++i) hashed = (hashed ^ at[i]) * 1099511628211ull;
}

bool same(const Buffers& a, const Buffers& b) {
  bool equal = a.weight == b.weight && a.master == b.master;
  for (int k = 0; k < kMaxMoments; ++k) {
    equal = equal && a.moment[k] == b.moment[k] && a.scale[k] == b.scale[k];
  }
  return equal;
}

}  // namespace

int main() {
  std::vector<const Kernels*> all;
  for (const Kernels* kernels :
       {scalar_kernels(), neon_kernels(), avx2_kernels(), avx512_kernels()}) {
    if (kernels != nullptr) all.push_back(kernels);
  }
  struct {
    FloatType weight;
    Master master;
  } const forms[] = {{FloatType::kF32, Master::kNone},   {FloatType::kBf16, Master::kNone},
                     {FloatType::kBf16, Master::kSplit}, {FloatType::kBf16, Master::kF32},
                     {FloatType::kF16, Master::kNone},   {FloatType::kF16, Master::kF32}};
  int differ = 0, compared = 0;
  for (int rule = 0; rule < kRules; ++rule) {
    for (int format = 0; format < kMomentFormats; ++format) {
      if (all[0]->update[rule][format] == nullptr) continue;
      for (const auto& form : forms) {
        for (const FloatType grad : {FloatType::kF32, FloatType::kBf16, FloatType::kF16}) {
          for (const std::size_t numel : {1u, 15u, 33u, 300u, 1100u}) {
            const Buffers start = make(numel, grad, form.weight, form.master, format);
            Buffers first;
            for (std::size_t n = 0; n < all.size(); ++n) {
              Buffers mine = start;
              for (int step = 1; step <= 3; ++step) {
                const Job job = job_of(mine, numel, grad, form.weight, form.master, step);
                all[n]->update[rule][format](job, 0, numel);
              }
              if (n == 0) first = mine;
              ++compared;
              if (!same(mine, first)) {
                ++differ;
                std::printf("%s differs: rule %d, moments %d, %zu elements\n", all[n]->name, rule,
                            format, numel);
              }
            }
            hash(first.weight.data(), first.weight.size());
            for (int k = 0; k < kMaxMoments; ++k) {
              hash(first.moment[k].data(), first.moment[k].size());
            }
          }
        }
      }
    }
  }
  for (const Kernels* kernels : all) std::printf("%s ", kernels->name);
  std::printf("\n%d %016llx\n", compared, static_cast<unsigned long long>(hashed));
  return differ != 0;
}
