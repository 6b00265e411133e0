// The CUDA kernel as a host function, for test_optim_quantised.py.
#include "cuda_on_host.h"
#include "dequantise.cu"

using namespace overspill;

extern "C" void run_dequantise(int blocks, int threads, const u64* given, float factor) {
  launch(blocks, threads, 32, [&] {
    dequantise(reinterpret_cast<const u8*>(given[0]), reinterpret_cast<const float*>(given[1]),
               reinterpret_cast<const float*>(given[2]), reinterpret_cast<const float*>(given[3]),
               reinterpret_cast<const int*>(given[4]), reinterpret_cast<void*>(given[5]), given[6],
               given[7], given[8], given[9], given[10], given[11], given[12], given[13], given[14],
               given[15], given[16], factor);
  });
}
