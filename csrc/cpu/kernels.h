// The whole of one instruction set's kernels, in its own namespace. Include after every standard
// header and after the target pragma, with LANES, HAS_F16, ISA_NAME and ISA_SPACE defined.
// No include guard: each isa_*.cpp has one copy.

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))

namespace overspill {
namespace ISA_SPACE {

// Each builds on those before it.
// clang-format off
#include "lanes.h"
#include "isa.h"
#include "halves.h"
#include "layout.h"
#include "moments.h"
#include "rules.h"
#include "packed.h"
#include "activations.h"
#include "quantised.h"
#include "sweep.h"
// clang-format on

}  // namespace ISA_SPACE
}  // namespace overspill
