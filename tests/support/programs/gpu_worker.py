"""Uses CUDA when it is told to: it answers each line once the driver has answered."""

import ctypes
import sys

from snapagent.workload import libcuda

if __name__ == "__main__":
    cuda = libcuda.load_libcuda()
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    context = ctypes.c_void_p()
    cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    cuda.call("cuCtxSetCurrent", context)
    print("ready", flush=True)  # noqa: T201 - to the test
    for _ in sys.stdin:
        cuda.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        print("done", flush=True)  # noqa: T201 - to the test
