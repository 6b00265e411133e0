// The CUDA kernels as host functions, for test_optim_packed.py.
#include "cuda_on_host.h"
#include "unpack.cu"

using namespace overspill;

extern "C" void run_unpack_nf4(int blocks, int threads, const u64* given, int type) {
  launch(blocks, threads, 32, [&] {
    unpack_nf4(reinterpret_cast<const u8*>(given[0]), reinterpret_cast<const u8*>(given[1]),
               reinterpret_cast<const float*>(given[2]), reinterpret_cast<const float*>(given[3]),
               reinterpret_cast<const float*>(given[4]), reinterpret_cast<const float*>(given[5]),
               given[6], reinterpret_cast<void*>(given[7]), type);
  });
}

extern "C" void run_unpack_int8(int blocks, int threads, const u64* given, int type) {
  launch(blocks, threads, 32, [&] {
    unpack_int8(reinterpret_cast<const signed char*>(given[0]),
                reinterpret_cast<const float*>(given[1]), given[2], given[3],
                reinterpret_cast<void*>(given[4]), type);
  });
}
