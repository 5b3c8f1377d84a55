// Compiles `snapagent/gpu/blake3.cu` for the processor: the kernels are called once for each thread,
// in any order, since no thread waits for another.
// What it exports is what the emulated driver launches.

#include <cstdint>

#include "../emulator/emulated_cuda.h"

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct Place {
    uint32_t x, y, z;
};

static thread_local Place threadIdx, blockIdx, blockDim;

#define __global__
#define __device__
#define __forceinline__ inline

#include "../../snapagent/gpu/blake3.cu"

template <typename Kernel> static void run_block(const EmulatedLaunch *launch, Kernel kernel) {
    blockDim = {launch->block_dim.x, 1, 1};
    blockIdx = {launch->block.x, 0, 0};
    for (uint32_t thread = 0; thread < launch->block_dim.x; thread++) {
        threadIdx = {thread, 0, 0};
        kernel();
    }
}

template <typename Value> static Value argument(void **arguments, int number) {
    return *(Value *)arguments[number];
}

extern "C" const uint32_t leaf_values__sizes[] = {8, 8, 8, 4, 8, 0};
extern "C" const uint32_t join_values__sizes[] = {8, 8, 8, 4, 8, 0};

extern "C" void leaf_values__block(const EmulatedLaunch *launch, void **arguments) {
    run_block(launch, [&] {
        leaf_values(argument<const u64 *>(arguments, 0), argument<const u64 *>(arguments, 1),
                    argument<const u32 *>(arguments, 2), argument<u32>(arguments, 3),
                    argument<u32 *>(arguments, 4));
    });
}

extern "C" void join_values__block(const EmulatedLaunch *launch, void **arguments) {
    run_block(launch, [&] {
        join_values(argument<const u32 *>(arguments, 0), argument<const u32 *>(arguments, 1),
                    argument<const u32 *>(arguments, 2), argument<u32>(arguments, 3),
                    argument<u32 *>(arguments, 4));
    });
}
