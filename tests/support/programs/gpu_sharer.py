"""Has memory on a GPU that others can open, or opens theirs: `gpu_sharer [HANDLE]`.

It says the handle of its own memory, in hex, and waits; each line that it then gets is answered
when the driver has answered. With `close` it closes what it has opened.
"""

import ctypes
import sys

from snapagent.workload import libcuda

MIB = 1 << 20


def main(*handles: str) -> None:
    cuda = libcuda.load_libcuda()
    context, own, opened = ctypes.c_void_p(), ctypes.c_uint64(), ctypes.c_uint64()
    cuda.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    cuda.call("cuCtxSetCurrent", context)
    cuda.call("cuMemAlloc_v2", ctypes.byref(own), 4 * MIB)
    for handle in handles:
        there = libcuda.IpcHandle.from_buffer_copy(bytes.fromhex(handle))
        cuda.call("cuIpcOpenMemHandle_v2", ctypes.byref(opened), there, 1)
    handle = libcuda.IpcHandle()
    cuda.call("cuIpcGetMemHandle", ctypes.byref(handle), own.value)
    print(bytes(handle).hex(), flush=True)  # noqa: T201 - to the test
    for line in sys.stdin:
        if line.strip() == "close":
            cuda.call("cuIpcCloseMemHandle", opened)
        else:
            cuda.call("cuCtxSynchronize")
        print("done", flush=True)  # noqa: T201 - to the test


if __name__ == "__main__":
    main(*sys.argv[1:])
