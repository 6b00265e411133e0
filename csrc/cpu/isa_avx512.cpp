// AVX-512 with the byte, word, doubleword and vector-length extensions.
#include <algorithm>
#include <cstring>

#include "kernels_table.h"

#if defined(__x86_64__)
#include <immintrin.h>

#pragma GCC push_options
// GCC's own header reads "undefined" registers on purpose, and warns of it (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,f16c,prefer-vector-width=512")
#define LANES 16
#define HAS_F16 1
#define ISA_NAME "avx512"
#define ISA_SPACE avx512
#include "kernels.h"
#pragma GCC pop_options

namespace overspill {
const Kernels* avx512_kernels() {
  __builtin_cpu_init();
  const bool has = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                   __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return has ? &avx512::kTable : nullptr;
}
}  // namespace overspill
#else
namespace overspill {
const Kernels* avx512_kernels() { return nullptr; }
}  // namespace overspill
#endif
