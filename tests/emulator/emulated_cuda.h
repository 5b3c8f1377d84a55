/* Between the emulated driver and kernels that were compiled for the host.
 *
 * A module's image is "EMULATED-CUDA:" and the path of a shared object, ended by a zero byte. For
 * each kernel NAME the object exports, with C linkage,
 *     void NAME__block(const EmulatedLaunch *launch, void **arguments);
 *     const uint32_t NAME__sizes[];   sizes of its arguments in bytes, and a zero
 * NAME__block is called once for each block of the grid, with `launch->block` set, one after the
 * other on the stream's thread; it does the work of all threads of that block.
 */
#ifndef EMULATED_CUDA_H
#define EMULATED_CUDA_H
#include <stdint.h>

typedef struct { uint32_t x, y, z; } EmulatedDim;
typedef struct {
  EmulatedDim grid_dim, block_dim, block;
  uint32_t shared_bytes;
} EmulatedLaunch;
typedef void (*EmulatedKernel)(const EmulatedLaunch *launch, void **arguments);

/* What emulated_cuda_counter(which) counts. */
enum {
  BYTES_IN,           /* host to device */
  BYTES_OUT,          /* device to host */
  BYTES_WITHIN,       /* device to device */
  BYTES_SET,
  PAGEABLE_BYTES_IN,  /* of BYTES_IN, from memory that is not page-locked */
  PAGEABLE_BYTES_OUT,
  REGISTERED_BYTES,
  LAUNCHES,
  CREATES,            /* of physical memory */
  COUNTERS
};
#endif
