// NEON, which every 64-bit Arm processor has.
#include <algorithm>
#include <cstring>

#include "kernels_table.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define LANES 4
#define HAS_F16 0
#define ISA_NAME "neon"
#define ISA_SPACE neon
#include "kernels.h"

namespace overspill {
const Kernels* neon_kernels() { return &neon::kTable; }
}  // namespace overspill
#else
namespace overspill {
const Kernels* neon_kernels() { return nullptr; }
}  // namespace overspill
#endif
