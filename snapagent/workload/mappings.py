"""Address ranges of this process: reserved, mapped at fixed addresses, and reserved again.

A reserved range takes no memory, and touching it is SIGSEGV. All functions may be called from any
thread; they change only the pages they are given.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Final

__all__ = ["PAGE_BYTES", "array_at", "map_shared", "reserve", "reserve_again", "unmap"]

PAGE_BYTES: Final = mmap.PAGESIZE

_PROT_NONE = 0
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FIXED_NOREPLACE = 0x100000
_MAP_FAILED = ctypes.c_void_p(-1).value
_FLAGS_RESERVED = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def reserve(address: int, length: int) -> bool:
    """Reserve a range of addresses; returns false if something is there already.

    Raises:
        OSError: This process may not have so many addresses.
    """
    try:
        _mmap(address, length, _PROT_NONE, _FLAGS_RESERVED | _MAP_FIXED_NOREPLACE, -1)
    except OSError as error:
        if error.errno == errno.EEXIST:
            return False
        raise
    return True


def reserve_again(address: int, length: int) -> None:
    """Put reserved addresses in the place of whatever is mapped there; its content goes with it.

    Raises:
        OSError: The kernel cannot.
    """
    _mmap(address, length, _PROT_NONE, _FLAGS_RESERVED | _MAP_FIXED, -1)


def map_shared(descriptor: int, address: int, length: int) -> None:
    """Map the beginning of a file for reading and writing over a reserved range.

    Raises:
        OSError: The kernel cannot; the range is still reserved.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    _mmap(address, length, protection, mmap.MAP_SHARED | _MAP_FIXED, descriptor)


def unmap(address: int, length: int) -> None:
    """Give a range up.

    Raises:
        OSError: The kernel cannot.
    """
    if _libc.munmap(address, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def array_at(address: int, length: int) -> ctypes.Array[ctypes.c_ubyte]:
    """Return an array that is this memory. It can be given attributes, which live as long."""
    return (ctypes.c_ubyte * length).from_address(address)


def _mmap(address: int, length: int, protection: int, flags: int, descriptor: int) -> None:
    found = _libc.mmap(address, length, protection, flags, descriptor, 0)
    if found == _MAP_FAILED:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    if found != address:
        # A kernel before 4.17 takes the flag that forbids replacing for a mere wish.
        unmap(found, length)
        raise OSError(errno.EEXIST, os.strerror(errno.EEXIST))
