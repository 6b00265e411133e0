// Random numbers of the device: those of a CPU generator of its own.
#pragma once

#include <ATen/core/Generator.h>

namespace testdev {

const at::Generator& default_generator();
at::Generator new_generator();
at::Generator cpu_generator_of(const at::Generator& generator);

}  // namespace testdev
