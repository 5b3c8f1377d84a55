"""DLPack capsules of bytes in GPU memory: the other way, beside `__cuda_array_interface__`."""

from __future__ import annotations

import ctypes
from typing import Any, Final

__all__ = ["CUDA_DEVICE", "capsule"]

CUDA_DEVICE: Final = 2
_KIND_UNSIGNED: Final = 1
_NAME: Final = b"dltensor"


class _Tensor(ctypes.Structure):
    """`DLTensor` of one dimension."""

    _fields_ = [  # type: ignore[mutable-override]
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("kind", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """`DLManagedTensor`."""

    _fields_ = [  # type: ignore[mutable-override]
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    ]


_lent: dict[int, tuple[object, ...]] = {}
"""What a consumer has, by the address of its `DLManagedTensor`."""


def _delete(managed: int) -> None:
    _lent.pop(managed, None)


def _destroy(made: int) -> None:
    """Nobody has taken the tensor out of the capsule: else it has another name."""
    if _is_valid(made, _NAME):
        _delete(_pointer(made, _NAME))


_deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_delete)
_destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_destroy)


_new = ctypes.pythonapi.PyCapsule_New
_new.restype = ctypes.py_object
_new.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype = ctypes.c_void_p
_pointer.argtypes = [ctypes.c_void_p, ctypes.c_char_p]


def capsule(owner: object, address: int, length: int, device: int) -> Any:  # noqa: ANN401 - a capsule has no type
    """Return a capsule that says where bytes are; it and what is made of it keep the owner."""
    shape = (ctypes.c_int64 * 1)(length)
    managed = _Managed(
        _Tensor(
            data=address,
            device_type=CUDA_DEVICE,
            device_id=device,
            ndim=1,
            kind=_KIND_UNSIGNED,
            bits=8,
            lanes=1,
            shape=shape,
        ),
        None,
        ctypes.cast(_deleter, ctypes.c_void_p),
    )
    at = ctypes.addressof(managed)
    _lent[at] = (owner, managed, shape)
    return _new(at, _NAME, ctypes.cast(_destructor, ctypes.c_void_p))
