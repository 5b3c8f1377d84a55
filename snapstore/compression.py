"""The codecs of frames (`format_spec/02-packs.md`, section 2): independent, bounded, named.

Encoding picks by `Texture`, a cheap estimate of which bytes of the data repeat; decoding trusts
nothing and writes into the caller's buffer. Codec objects of zstd are not thread-safe, so each
thread has its own; the calls that do the work release the GIL.
"""

from __future__ import annotations

import dataclasses
import enum
import threading
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import zstandard

from snapstore.errors import Malformed
from snapstore.options import Compression
from snapstore.units import KIB, MIB, BytesLike

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["Codec", "EncodedFrame", "decode_frame", "encode_frame"]

ByteArray = npt.NDArray[np.uint8]

_PLANE_COMPRESSED = 1 << 31
_ZSTD_WINDOW_BYTES_MAX = 8 * MIB
_SAMPLE_BYTES = 32 * KIB
_WORTH_IT = 0.96
"""A frame is stored coded only if that saves more than 4 %: decoding costs more than reading."""


class Codec(enum.IntEnum):
    """Stored numbers of the codecs."""

    RAW = 0
    ZSTD = 1
    PLANES = 2


@dataclasses.dataclass(frozen=True, slots=True)
class EncodedFrame:
    """A frame as it will be stored: the codec and the pieces whose concatenation it is."""

    codec: Codec
    pieces: list[BytesLike]
    length: int


class _Compressor(Protocol):
    def compress(self, data: BytesLike) -> bytes: ...


class _ThreadCodecs(threading.local):
    """One set of zstd objects and scratch memory per thread."""

    def __init__(self) -> None:
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX)
        self._compressors: dict[str, _Compressor] = {}
        self.scratch = np.empty(0, np.uint8)

    def compressor(self, name: str) -> _Compressor:
        found = self._compressors.get(name)
        if found is None:
            found = zstandard.ZstdCompressor(compression_params=_PARAMETERS[name]())
            self._compressors[name] = found
        return found

    def scratch_bytes(self, size: int) -> ByteArray:
        if len(self.scratch) < size:
            self.scratch = np.empty(size, np.uint8)
        return self.scratch[:size]


def _entropy_parameters() -> zstandard.ZstdCompressionParameters:
    # Exponent bytes have a skewed distribution and no repeats worth finding. The smallest hash
    # table with the longest minimal match makes zstd skip nearly all of its search and go
    # straight to Huffman coding: 2.7 times as fast as level 1 here, and 2 % smaller.
    return zstandard.ZstdCompressionParameters(
        window_log=19,
        hash_log=6,
        chain_log=6,
        search_log=1,
        min_match=7,
        target_length=0,
        strategy=zstandard.STRATEGY_FAST,
    )


def _level(level: int) -> zstandard.ZstdCompressionParameters:
    return zstandard.ZstdCompressionParameters.from_level(level)


_PARAMETERS: dict[str, Callable[[], zstandard.ZstdCompressionParameters]] = {
    "entropy": _entropy_parameters,
    "fast": lambda: _level(1),
    "auto": lambda: _level(1),
    "max": lambda: _level(12),
}
_local = _ThreadCodecs()


def encode_frame(plain: ByteArray, texture: int, phase: int, effort: Compression) -> EncodedFrame:
    """Encode one frame as its texture suggests, or raw if that does not pay.

    Args:
        plain: The frame's bytes, contiguous; referenced by a raw result, so keep them until used.
        texture: Bit *p* says that bytes at stream offsets congruent to *p* modulo 4 repeat.
        phase: Stream offset of the first byte, modulo 4.
        effort: How hard to try.

    Returns:
        Pieces whose decoding gives `plain` again; never longer than `plain` itself.
    """
    raw = EncodedFrame(Codec.RAW, [plain.data], len(plain))
    if effort is Compression.NONE or texture == 0:
        return raw
    width = _number_width(texture)
    if width == 1 or len(plain) < 4 * KIB or effort is Compression.FAST:
        coded = _encode_zstd(plain, effort)
    else:
        coded = _encode_planes(plain, width, texture, phase, effort)
    return coded if coded.length <= len(plain) * _WORTH_IT else raw


def _number_width(texture: int) -> int:
    if texture == 0b1111:
        return 1
    return 2 if texture in {0b0101, 0b1010} else 4


def _encode_zstd(plain: ByteArray, effort: Compression) -> EncodedFrame:
    name = effort.value
    if effort is Compression.AUTO and len(plain) > 2 * _SAMPLE_BYTES:
        middle = len(plain) // 2
        sample = plain[middle : middle + _SAMPLE_BYTES].data
        by_matches = len(_local.compressor(name).compress(sample))
        by_entropy = len(_local.compressor("entropy").compress(sample))
        if by_entropy <= by_matches * 1.02:
            name = "entropy"
    coded = _local.compressor(name).compress(plain.data)
    return EncodedFrame(Codec.ZSTD, [coded], len(coded))


def _encode_planes(
    plain: ByteArray, width: int, texture: int, phase: int, effort: Compression
) -> EncodedFrame:
    # Numbers start at stream offsets that are multiples of their width, except that 16-bit
    # numbers whose even bytes repeat start one byte later: the exponent is the upper byte.
    shift = 1 if width == 2 and texture == 0b0101 else 0
    head = (shift - phase) % width
    count = (len(plain) - head) // width
    tail = len(plain) - head - count * width
    rotate = width == 2 and effort is Compression.MAX
    header = np.zeros(4 + 4 * width, np.uint8)
    header[:4] = (width, head, tail, int(rotate))
    lengths = header[4:].view("<u4")
    pieces: list[BytesLike] = [header.data, plain[:head].data]
    body = plain[head : head + count * width]
    for plane in range(width):
        repeats = texture >> ((phase + head + plane) & 3) & 1
        data = _split_plane(body, width, plane, rotate=rotate)
        coded = _local.compressor("entropy").compress(data.data) if repeats else b""
        if repeats and len(coded) < count * _WORTH_IT:
            pieces.append(coded)
            lengths[plane] = len(coded) | _PLANE_COMPRESSED
        else:
            pieces.append(data.tobytes())
            lengths[plane] = count
    pieces.append(plain[len(plain) - tail :].data)
    return EncodedFrame(Codec.PLANES, pieces, sum(len(piece) for piece in pieces))


def _split_plane(body: ByteArray, width: int, plane: int, *, rotate: bool) -> ByteArray:
    """Gather byte `plane` of every number; valid until the next call on this thread."""
    count = len(body) // width
    out = _local.scratch_bytes(count)
    if body.ctypes.data % width:
        body = body.copy()
    numbers = body.view("<u2" if width == 2 else "<u4")
    if not rotate:
        np.right_shift(numbers, 8 * plane, out=out, casting="unsafe")
    elif plane == 1:
        np.right_shift(numbers, 7, out=out, casting="unsafe")
    else:
        np.bitwise_or(
            np.left_shift(numbers, 1), np.right_shift(numbers, 15), out=out, casting="unsafe"
        )
    return out


def decode_frame(codec: int, stored: memoryview, out: memoryview) -> None:
    """Decode a frame into a buffer of exactly its decoded length.

    Thread-safe; `out` is undefined after an error.

    Raises:
        Malformed: Unknown codec, or bytes that do not decode to exactly that length.
    """
    if codec == Codec.RAW:
        if len(stored) != len(out):
            raise Malformed(f"raw frame of {len(stored)} bytes where {len(out)} were declared")
        # `memoryview[...] = x` would hold the GIL for the whole copy; numpy does not.
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(stored, np.uint8))
    elif codec == Codec.ZSTD:
        _decode_zstd(stored, out)
    elif codec == Codec.PLANES:
        _decode_planes(stored, out)
    else:
        raise Malformed(f"unknown codec {codec}")


def _decode_zstd(stored: memoryview, out: memoryview) -> None:
    try:
        declared = zstandard.frame_content_size(stored)
        if declared != len(out):
            raise Malformed(f"zstd frame declares {declared} bytes where {len(out)} were expected")
        with _local.decompressor.stream_reader(stored, closefd=False) as reader:
            filled = 0
            while filled < len(out):
                got = reader.readinto(out[filled:])
                if not got:
                    raise Malformed(f"zstd frame ends after {filled} of {len(out)} bytes")
                filled += got
            if reader.read(1):
                raise Malformed(f"zstd frame goes on after {len(out)} bytes")
    except zstandard.ZstdError as error:
        raise Malformed(f"zstd frame does not decode: {error}") from error


def _decode_planes(stored: memoryview, out: memoryview) -> None:
    width, head, tail, transform, lengths = _parse_planes_header(stored)
    count, rest = divmod(len(out) - head - tail, width)
    if count < 1 or rest or (transform and width != 2):
        raise Malformed(f"planes of width {width} cannot make {len(out)} bytes")
    position = 4 + 4 * width
    expected = position + head + tail + sum(length & ~_PLANE_COMPRESSED for length in lengths)
    if expected != len(stored):
        raise Malformed(f"planes frame has {len(stored)} bytes, its header says {expected}")
    out[:head] = stored[position : position + head]
    position += head
    body = np.frombuffer(out, np.uint8)[head : head + count * width]
    planes = []
    scratch = _local.scratch_bytes(count * width)
    for plane, word in enumerate(lengths):
        length = word & ~_PLANE_COMPRESSED
        data = stored[position : position + length]
        position += length
        if word & _PLANE_COMPRESSED:
            target = scratch[plane * count : (plane + 1) * count]
            _decode_zstd(data, target.data)
            planes.append(target)
        elif length == count:
            planes.append(np.frombuffer(data, np.uint8))
        else:
            raise Malformed(f"plane {plane} has {length} bytes where {count} were expected")
    _merge_planes(planes, body, width, rotate=bool(transform))
    out[len(out) - tail :] = stored[position:]


def _parse_planes_header(stored: memoryview) -> tuple[int, int, int, int, list[int]]:
    if len(stored) < 4 or stored[0] not in {2, 4} or len(stored) < 4 + 4 * stored[0]:
        raise Malformed("planes frame without a valid header")
    width, head, tail, transform = stored[:4]
    if head >= width or tail >= width or transform > 1:
        raise Malformed(f"planes header with head {head}, tail {tail}, transform {transform}")
    lengths = np.frombuffer(stored[4 : 4 + 4 * width], "<u4").tolist()
    return width, head, tail, transform, lengths


def _merge_planes(planes: list[ByteArray], body: ByteArray, width: int, *, rotate: bool) -> None:
    dtype = np.dtype("<u2" if width == 2 else "<u4")
    aligned = body.ctypes.data % width == 0
    numbers = body.view(dtype) if aligned else np.empty(len(planes[0]), dtype)
    top = width - 1
    if rotate:
        np.left_shift(planes[1], 7, out=numbers, dtype=dtype)
        low = planes[0].astype(dtype)
        np.bitwise_or(numbers, low >> 1, out=numbers)
        np.bitwise_or(numbers, low << 15, out=numbers)
    else:
        np.left_shift(planes[top], 8 * top, out=numbers, dtype=dtype)
        for plane in range(1, top):
            np.bitwise_or(
                numbers, np.left_shift(planes[plane], 8 * plane, dtype=dtype), out=numbers
            )
        np.bitwise_or(numbers, planes[0], out=numbers)
    if not aligned:
        np.copyto(body, numbers.view(np.uint8))
