// The CUDA kernels as host functions, for test_optim_cuda_sources.py.
#include "cuda_on_host.h"

#include "adam.cu"

extern "C" int run_adam(int format, const overspill::AdamJob* job) {
  int not_finite = 0;
  launch(2, 256, 32, [&] {
    if (format == 0) adam_fp32(*job, &not_finite);
    if (format == 1) adam_bf16(*job, &not_finite);
    if (format == 2) adam_int8(*job, &not_finite);
  });
  return not_finite;
}
