// One element at a time: the reference of every other instruction set, and the fallback.
#include <algorithm>
#include <cstring>

#include "kernels_table.h"

#define LANES 1
#define HAS_F16 0
#define ISA_NAME "scalar"
#define ISA_SPACE scalar
#include "kernels.h"

namespace overspill {
const Kernels* scalar_kernels() { return &scalar::kTable; }
}  // namespace overspill
