// AVX2 with F16C; no FMA, since all instruction sets round alike.
#include <algorithm>
#include <cstring>

#include "kernels_table.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
#pragma GCC target("avx2,f16c")
#define LANES 8
#define HAS_F16 1
#define ISA_NAME "avx2"
#define ISA_SPACE avx2
#include "kernels.h"
#pragma GCC pop_options

namespace overspill {
const Kernels* avx2_kernels() {
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c") ? &avx2::kTable : nullptr;
}
}  // namespace overspill
#else
namespace overspill {
const Kernels* avx2_kernels() { return nullptr; }
}  // namespace overspill
#endif
