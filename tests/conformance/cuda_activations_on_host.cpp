// The CUDA kernels as host functions, for test_optim_activations.py.
// clang-format off
#include "cuda_on_host.h"
#include "activations.cu"
// clang-format on

using namespace overspill;

extern "C" void run_pack_activation(int blocks, int threads, const u64* given, int type) {
  launch(blocks, threads, 32, [&] {
    pack_activation(reinterpret_cast<const void*>(given[0]), given[1],
                    reinterpret_cast<u8*>(given[2]), type);
  });
}

extern "C" void run_unpack_activation(int blocks, int threads, const u64* given, int type) {
  launch(blocks, threads, 32, [&] {
    unpack_activation(reinterpret_cast<const u8*>(given[0]), given[1],
                      reinterpret_cast<void*>(given[2]), type);
  });
}
