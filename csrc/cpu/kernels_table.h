// The kernels of each instruction set, or nullptr where this machine or build lacks it.
#pragma once

#include "job.h"

namespace overspill {

const Kernels* scalar_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* neon_kernels();

}  // namespace overspill
