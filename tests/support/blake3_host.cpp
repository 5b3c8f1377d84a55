// Compiles `snapagent/gpu/blake3.cu` for the processor: the kernels are called once for each thread,
// in any order, since no thread waits for another.
//
// `launch_NAME` runs a kernel as cuLaunchKernel does: with numbers of blocks and of threads in each,
// and an array of addresses of arguments.

#include <cstdint>

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

template <typename Kernel> static void run(uint32_t blocks, uint32_t threads, Kernel kernel) {
    blockDim = {threads, 1, 1};
    for (uint32_t block = 0; block < blocks; block++) {
        for (uint32_t thread = 0; thread < threads; thread++) {
            blockIdx = {block, 0, 0};
            threadIdx = {thread, 0, 0};
            kernel();
        }
    }
}

template <typename Value> static Value argument(void **arguments, int number) {
    return *(Value *)arguments[number];
}

extern "C" void launch_leaf_values(uint32_t blocks, uint32_t threads, void **arguments) {
    run(blocks, threads, [&] {
        leaf_values(argument<const u64 *>(arguments, 0), argument<const u64 *>(arguments, 1),
                    argument<const u32 *>(arguments, 2), argument<u32>(arguments, 3),
                    argument<u32 *>(arguments, 4));
    });
}

extern "C" void launch_join_values(uint32_t blocks, uint32_t threads, void **arguments) {
    run(blocks, threads, [&] {
        join_values(argument<const u32 *>(arguments, 0), argument<const u32 *>(arguments, 1),
                    argument<const u32 *>(arguments, 2), argument<u32>(arguments, 3),
                    argument<u32 *>(arguments, 4));
    });
}
