"""The codecs of frames: everything comes back, nothing grows, and decoding trusts nothing."""

import itertools
import struct
import threading
import tracemalloc

import numpy as np
import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from snapstore.compression import Codec, EncodedFrame, decode_frame, encode_frame
from snapstore.errors import Malformed
from snapstore.options import Compression
from snapstore.units import KIB, MIB
from tests.support.samples import ByteArray, bf16, constant, fp16, fp32, random_bytes, text

ODD_BYTES, EVEN_BYTES, LAST_OF_FOUR, EVERYWHERE = 0b1010, 0b0101, 0b1000, 0b1111
EFFORTS = list(Compression)
PLANE_COMPRESSED = 1 << 31


def stored_bytes(frame: EncodedFrame) -> bytes:
    data = b"".join(frame.pieces)
    assert len(data) == frame.length
    return data


def decoded(codec: int, data: bytes, length: int) -> bytes:
    out = bytearray(length)
    decode_frame(codec, memoryview(data), memoryview(out))
    return bytes(out)


def round_trip(plain: ByteArray, texture: int, phase: int, effort: Compression) -> EncodedFrame:
    frame = encode_frame(plain, texture, phase, effort)
    assert frame.length <= len(plain)
    assert decoded(frame.codec, stored_bytes(frame), len(plain)) == plain.tobytes()
    return frame


# -- encoding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("phase", range(4))
@pytest.mark.parametrize(
    ("make", "texture"),
    [
        pytest.param(bf16, ODD_BYTES, id="bf16"),
        pytest.param(bf16, EVEN_BYTES, id="bf16-as-if-shifted"),
        pytest.param(fp16, ODD_BYTES, id="fp16"),
        pytest.param(fp32, LAST_OF_FOUR, id="fp32"),
    ],
)
def test_numbers_at_every_phase_and_length(
    make: object, texture: int, phase: int, effort: Compression
) -> None:
    """Heads and tails of all lengths, whatever the phase says and whether it is right or not."""
    assert callable(make)
    numbers: ByteArray = make(5000, 1)
    for start, stop in itertools.product(range(4), range(4)):
        round_trip(numbers[start : len(numbers) - stop], texture, phase, effort)


@pytest.mark.parametrize("texture", range(16))
@pytest.mark.parametrize("effort", EFFORTS)
def test_every_texture(texture: int, effort: Compression) -> None:
    """A texture is a guess: a wrong one may cost space and nothing else."""
    for plain in (bf16(4099, 2), random_bytes(9000, 3), text(9001, 4), np.zeros(7000, np.uint8)):
        for phase in range(4):
            round_trip(plain, texture, phase, effort)


@pytest.mark.parametrize(
    ("make", "texture", "share"),
    [
        pytest.param(bf16, ODD_BYTES, 0.68, id="bf16"),
        pytest.param(fp16, ODD_BYTES, 0.86, id="fp16"),
        pytest.param(fp32, LAST_OF_FOUR, 0.85, id="fp32"),
    ],
)
def test_planes_are_small(make: object, texture: int, share: float) -> None:
    assert callable(make)
    plain: ByteArray = make(1 * MIB // 4, 5)
    for effort in (Compression.AUTO, Compression.MAX):
        frame = round_trip(plain, texture, 0, effort)
        assert frame.codec is Codec.PLANES
        assert frame.length <= share * len(plain)


def test_shifted_numbers_are_as_small() -> None:
    """The phase says where in the stream the frame lies, so that planes hold whole exponents."""
    numbers = bf16(200_000, 6)
    aligned = round_trip(numbers, ODD_BYTES, 0, Compression.AUTO)
    for phase, texture in ((1, EVEN_BYTES), (2, ODD_BYTES), (3, EVEN_BYTES)):
        shifted = round_trip(numbers, texture, phase, Compression.AUTO)
        assert shifted.codec is Codec.PLANES
        assert abs(shifted.length - aligned.length) <= 0.01 * aligned.length


def test_a_frame_that_begins_within_a_number_is_as_small() -> None:
    """With rotation both bytes of a number must go together, so the phase has to be minded."""
    numbers = bf16(200_000, 6)
    aligned = round_trip(numbers, ODD_BYTES, 0, Compression.MAX)
    cut_off = round_trip(numbers[1:], ODD_BYTES, 1, Compression.MAX)
    assert stored_bytes(cut_off)[:4] == bytes([2, 1, 0, 1])
    assert abs(cut_off.length - aligned.length) <= 0.01 * aligned.length


def test_rotation_makes_bfloat16_smaller() -> None:
    plain = bf16(500_000, 7)
    auto = round_trip(plain, ODD_BYTES, 0, Compression.AUTO)
    most = round_trip(plain, ODD_BYTES, 0, Compression.MAX)
    assert stored_bytes(auto)[3] == 0
    assert stored_bytes(most)[3] == 1
    assert most.length < auto.length


@pytest.mark.parametrize("effort", [Compression.AUTO, Compression.FAST, Compression.MAX])
def test_text_is_compressed(effort: Compression) -> None:
    frame = round_trip(text(256 * KIB, 8), EVERYWHERE, 0, effort)
    assert frame.codec is Codec.ZSTD
    assert frame.length < 0.4 * 256 * KIB


@pytest.mark.parametrize("effort", EFFORTS)
def test_noise_is_stored_as_it_is(effort: Compression) -> None:
    for texture in (0, EVERYWHERE, ODD_BYTES, LAST_OF_FOUR):
        plain = random_bytes(100_000, 9)
        frame = round_trip(plain, texture, 0, effort)
        assert (frame.codec, frame.length) == (Codec.RAW, len(plain))
        assert np.shares_memory(np.frombuffer(frame.pieces[0], np.uint8), plain)


def test_what_does_not_repeat_is_not_even_tried() -> None:
    assert round_trip(constant(100_000), 0, 0, Compression.MAX).codec is Codec.RAW
    assert round_trip(constant(100_000), EVERYWHERE, 0, Compression.NONE).codec is Codec.RAW


def test_a_gain_of_less_than_four_per_cent_is_not_worth_decoding() -> None:
    noise = random_bytes(100_000, 10)
    for repeated, codec in ((3_000, Codec.RAW), (6_000, Codec.ZSTD)):
        plain = np.concatenate((np.zeros(repeated, np.uint8), noise))
        assert round_trip(plain, EVERYWHERE, 0, Compression.FAST).codec is codec


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 4095, 4096, 4097])
def test_the_smallest_frames(size: int) -> None:
    for texture in (0, ODD_BYTES, EVEN_BYTES, LAST_OF_FOUR, EVERYWHERE):
        for phase, effort in itertools.product(range(4), EFFORTS):
            round_trip(constant(size), texture, phase, effort)
            round_trip(random_bytes(size, size), texture, phase, effort)


def test_the_largest_frame() -> None:
    for plain, texture in ((constant(4 * MIB), EVERYWHERE), (bf16(2 * MIB, 1), ODD_BYTES)):
        round_trip(plain, texture, 3, Compression.AUTO)


@given(
    data=st.binary(max_size=300),
    repeat=st.integers(1, 60),
    texture=st.integers(0, 15),
    phase=st.integers(0, 3),
    effort=st.sampled_from(EFFORTS),
)
@example(data=b"\0", repeat=60, texture=10, phase=1, effort=Compression.MAX)
def test_anything_comes_back(
    data: bytes, repeat: int, texture: int, phase: int, effort: Compression
) -> None:
    plain = np.frombuffer(data * repeat, np.uint8)
    if len(plain):
        round_trip(plain, texture, phase, effort)


def test_input_at_an_odd_address_and_output_at_an_odd_address() -> None:
    buffer = np.zeros(20_011, np.uint8)
    numbers = bf16(5000, 11)
    for start in range(4):
        plain = buffer[start : start + len(numbers)]
        plain[:] = numbers
        for effort in (Compression.AUTO, Compression.MAX):
            data = stored_bytes(encode_frame(plain, ODD_BYTES, 0, effort))
            out = memoryview(bytearray(len(numbers) + 8))
            for place in range(4):
                target = out[place : place + len(numbers)]
                decode_frame(Codec.PLANES, memoryview(data), target)
                assert target == numbers.data


def test_threads_share_nothing() -> None:
    """Goal: eight threads that encode and decode at once get what one gets.

    Method: each works on data of its own, many times, after a barrier; a codec or a scratch buffer
    that two of them shared would mix their bytes up.
    """
    start = threading.Barrier(8)
    failures: list[int] = []

    def work(seed: int) -> None:
        plain, words = bf16(60_000, seed), text(60_000, seed)
        start.wait()
        for effort in EFFORTS * 3:
            for data, texture in ((plain, ODD_BYTES), (words, EVERYWHERE)):
                frame = encode_frame(data, texture, 0, effort)
                if decoded(frame.codec, stored_bytes(frame), len(data)) != data.tobytes():
                    failures.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


# -- decoding: what other writers may write --------------------------------------------------------


def planes_frame(plain: bytes, width: int, *, head: int = 0, rotate: bool = False) -> bytes:
    """Encode planes as `format_spec/02-packs.md` says, by the most obvious program."""
    count = (len(plain) - head) // width
    tail = len(plain) - head - count * width
    body = plain[head : head + count * width]
    if rotate:
        numbers = struct.unpack(f"<{count}H", body)
        turned = [(number << 1 | number >> 15) & 0xFFFF for number in numbers]
        body = struct.pack(f"<{count}H", *turned)
    planes, lengths = [], []
    for plane in range(width):
        raw = body[plane::width]
        coded = zstandard.ZstdCompressor(level=3).compress(raw)
        is_smaller = len(coded) < len(raw)
        planes.append(coded if is_smaller else raw)
        lengths.append(len(planes[-1]) | (PLANE_COMPRESSED if is_smaller else 0))
    header = bytes([width, head, tail, int(rotate)]) + struct.pack(f"<{width}I", *lengths)
    return header + plain[:head] + b"".join(planes) + plain[len(plain) - tail :]


@pytest.mark.parametrize(("width", "rotate"), [(2, False), (2, True), (4, False)])
def test_planes_are_decoded_as_specified(width: int, rotate: bool) -> None:  # noqa: FBT001
    numbers = bf16(400, 12).tobytes()
    for head, cut in itertools.product(range(width), range(width)):
        plain = numbers[: len(numbers) - cut]
        data = planes_frame(plain, width, head=head, rotate=rotate)
        assert decoded(Codec.PLANES, data, len(plain)) == plain


PINNED = bytes.fromhex(
    # 24 numbers of two bytes: plane 0 as it is, plane 1 one zstd frame; a head and a tail byte.
    "02010101" "18000000" "11000080" "aa"
    "000102030405060708090a0b0c0d0e0f1011121314151617"
    "28b52ffd2018450000107f7f01000ac002" "bb"
)  # fmt: skip


def test_a_pinned_frame_decodes_for_ever() -> None:
    """Goal: no change of ours or of zstd changes what stored frames mean.

    Method: the bytes of one frame are written down here, made once; only decoding is pinned, since
    versions of zstd compress differently. The numbers are 0x7f00 to 0x7f17, turned by one bit.
    """
    numbers = [0x7F00 + number for number in range(24)]
    back = struct.pack("<24H", *((number >> 1 | number << 15) & 0xFFFF for number in numbers))
    assert decoded(Codec.PLANES, PINNED, 50) == b"\xaa" + back + b"\xbb"


@pytest.mark.parametrize("effort", EFFORTS)
def test_fixed_input_decodes_to_itself(effort: Compression) -> None:
    for seed in range(3):
        plain = np.concatenate((bf16(9000, seed), text(9000, seed), random_bytes(999, seed)))
        for texture in (ODD_BYTES, LAST_OF_FOUR, EVERYWHERE):
            round_trip(plain, texture, seed, effort)


# -- decoding: lies --------------------------------------------------------------------------------


def refused(codec: int, data: bytes, length: int) -> None:
    with pytest.raises(Malformed):
        decoded(codec, data, length)


@pytest.mark.parametrize("codec", [3, 4, 255, 65535, -1])
def test_unknown_codecs_are_refused(codec: int) -> None:
    refused(codec, b"abc", 3)


@pytest.mark.parametrize("wrong", [-1, 1, 100])
def test_wrong_lengths_are_refused(wrong: int) -> None:
    plain = bf16(5000, 13)
    for texture, effort in (
        (0, Compression.NONE),
        (EVERYWHERE, Compression.FAST),
        (ODD_BYTES, Compression.AUTO),
        (ODD_BYTES, Compression.MAX),
        (LAST_OF_FOUR, Compression.AUTO),
    ):
        frame = encode_frame(plain, texture, 0, effort)
        refused(frame.codec, stored_bytes(frame), len(plain) + wrong)


CODED = [
    pytest.param(text(6000, 14), EVERYWHERE, Compression.FAST, id="zstd"),
    pytest.param(bf16(3000, 14), ODD_BYTES, Compression.AUTO, id="halves"),
    pytest.param(bf16(3000, 14), ODD_BYTES, Compression.MAX, id="halves-rotated"),
    pytest.param(fp32(1500, 14), LAST_OF_FOUR, Compression.AUTO, id="floats"),
]


@pytest.mark.parametrize(("plain", "texture", "effort"), CODED)
def test_every_truncation_is_refused(plain: ByteArray, texture: int, effort: Compression) -> None:
    frame = encode_frame(plain, texture, 0, effort)
    data = stored_bytes(frame)
    assert frame.codec is not Codec.RAW
    for length in [*range(40), *range(40, len(data), 97), len(data) - 1]:
        refused(frame.codec, data[:length], len(plain))


@given(st.sampled_from([1, 2]), st.binary(max_size=200), st.integers(0, 300))
@example(2, b"\x02\0\0\0\0\0\0\0\0\0\0\0", 0)
@example(2, b"\x02\1\1\0\0\0\0\0\0\0\0\0\0\0", 2)
@example(2, b"\x04" + b"\0" * 19, 0)
@example(1, b"\x28\xb5\x2f\xfd\x20\x00\x01\x00\x00", 0)
def test_garbage_is_refused_or_decodes(codec: int, data: bytes, length: int) -> None:
    try:
        decoded(codec, data, length)
    except Malformed:
        return
    assert length > 0 or codec == Codec.ZSTD


@pytest.mark.parametrize(("plain", "texture", "effort"), CODED)
@given(data=st.data())
def test_damage_is_refused_or_decodes_to_as_many_bytes(
    plain: ByteArray, texture: int, effort: Compression, data: st.DataObject
) -> None:
    """Goal: no byte of a frame can be changed so that decoding does anything but refuse or finish.

    Method: change up to three bytes of valid frames of every codec. The checksum of the frame,
    which would notice first, is none of this module's business.
    """
    frame = encode_frame(plain, texture, 0, effort)
    damaged = bytearray(stored_bytes(frame))
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.one_of(st.integers(0, 40), st.integers(0, len(damaged) - 1)))
        damaged[place] = data.draw(st.integers(0, 255))
    try:
        decoded(frame.codec, bytes(damaged), len(plain))
    except Malformed:
        return


@pytest.mark.parametrize(
    "header",
    [
        pytest.param(bytes([0, 0, 0, 0]), id="width 0"),
        pytest.param(bytes([1, 0, 0, 0]), id="width 1"),
        pytest.param(bytes([3, 0, 0, 0]), id="width 3"),
        pytest.param(bytes([8, 0, 0, 0]), id="width 8"),
        pytest.param(bytes([2, 2, 0, 0]), id="head as wide as a number"),
        pytest.param(bytes([2, 0, 2, 0]), id="tail as wide as a number"),
        pytest.param(bytes([2, 0, 0, 2]), id="transform 2"),
        pytest.param(bytes([4, 0, 0, 1]), id="transform of wide numbers"),
    ],
)
def test_headers_of_planes_are_checked(header: bytes) -> None:
    good = planes_frame(bytes(range(64)), 4 if header[0] == 4 else 2)
    refused(Codec.PLANES, header + good[4:], 64)


@pytest.mark.parametrize(("head", "tail"), [(2, 0), (0, 2), (2, 2), (62, 0)])
def test_heads_and_tails_as_long_as_a_number_are_refused(head: int, tail: int) -> None:
    """All lengths fit together here; only the form is not the one that the format has."""
    count = (64 - head - tail) // 2
    header = bytes([2, head, tail, 0]) + struct.pack("<2I", count, count)
    refused(Codec.PLANES, header + bytes(64), 64)
    good = bytes([2, 0, 0, 0]) + struct.pack("<2I", 32, 32)
    assert decoded(Codec.PLANES, good + bytes(64), 64) == bytes(64)


def test_planes_that_lie_about_their_lengths_are_refused() -> None:
    """Goal: no plane reaches into another, and none claims more than there is.

    Method: take a valid frame of two raw planes and change the two lengths, so that their sum is
    right or wrong, with and without the bit that says zstd.
    """
    plain = random_bytes(64, 16).tobytes()
    good = bytearray(planes_frame(plain, 2))
    assert struct.unpack_from("<2I", good, 4) == (32, 32)
    for low, high in [
        (31, 33),
        (33, 31),
        (0, 64),
        (64, 0),
        (32, 31),
        (32, 2**31 - 1),
        (32 | PLANE_COMPRESSED, 32),
        (32, 32 | PLANE_COMPRESSED),
        (2**32 - 1, 33),
    ]:
        bad = bytearray(good)
        struct.pack_into("<2I", bad, 4, low, high)
        refused(Codec.PLANES, bytes(bad), 64)


def test_planes_without_a_number_are_refused() -> None:
    refused(Codec.PLANES, bytes([2, 1, 1, 0]) + bytes(8) + b"ab", 2)
    refused(Codec.PLANES, bytes([2, 1, 0, 0]) + bytes(8) + b"a", 1)


def test_a_frame_that_declares_nothing_is_refused() -> None:
    plain = bytes(5000)
    quiet = zstandard.ZstdCompressor(write_content_size=False).compress(plain)
    refused(Codec.ZSTD, quiet, len(plain))
    header = bytes([2, 0, 0, 0]) + struct.pack("<2I", len(quiet) | PLANE_COMPRESSED, 5000)
    refused(Codec.PLANES, header + quiet + plain, 10_000)


@pytest.mark.parametrize(
    "behind",
    [
        pytest.param(b"x", id="a byte"),
        pytest.param(b"junk behind the frame", id="junk"),
        pytest.param(zstandard.ZstdCompressor().compress(b"more"), id="another frame"),
    ],
)
def test_nothing_that_decodes_may_follow_a_frame(behind: bytes) -> None:
    plain = text(5000, 19).tobytes()
    coded = zstandard.ZstdCompressor().compress(plain)
    refused(Codec.ZSTD, coded + behind, len(plain))
    lengths = struct.pack("<2I", len(coded + behind) | PLANE_COMPRESSED, 5000)
    refused(Codec.PLANES, bytes([2, 0, 0, 0]) + lengths + coded + behind + plain, 10_000)


def test_a_frame_that_lies_about_its_size_is_refused() -> None:
    """A header that declares less or more than its blocks make, with single-segment and without."""
    for size in (100, 5000, 70_000):
        good = bytearray(
            zstandard.ZstdCompressor(level=1).compress(random_bytes(size, 1).tobytes())
        )
        width = {100: 1, 5000: 2, 70_000: 4}[size]
        declared = zstandard.frame_content_size(bytes(good))
        assert declared == size
        for other in (size - 1, size + 1):
            stored = other - 256 if width == 2 else other
            bad = bytes(good[:5]) + stored.to_bytes(width, "little") + bytes(good[5 + width :])
            assert zstandard.frame_content_size(bad) == other
            refused(Codec.ZSTD, bad, other)
            refused(Codec.ZSTD, bad, size)


@pytest.mark.parametrize("codec", [Codec.ZSTD, Codec.PLANES])
def test_a_bomb_takes_no_memory(codec: Codec) -> None:
    """Goal: what a frame claims to decode to is never allocated beyond what the caller gave.

    Method: 256 MiB of zeros in 8 KiB of zstd, as a frame and as a plane, decoded into 4 MiB. It
    must be refused, and Python's own allocations must not grow.
    """
    size = 256 * MIB
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(size))
    if codec is Codec.PLANES:
        lengths = struct.pack("<2I", len(bomb) | PLANE_COMPRESSED, 2 * MIB)
        bomb = bytes([2, 0, 0, 0]) + lengths + bomb + bytes(2 * MIB)
    out = memoryview(bytearray(4 * MIB))
    decode_frame(Codec.RAW, memoryview(bytes(4 * MIB)), out)
    tracemalloc.start()
    try:
        with pytest.raises(Malformed):
            decode_frame(codec, memoryview(bomb), out)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 16 * MIB


@pytest.mark.parametrize("window_log", [16, 23, 27, 31])
def test_a_frame_with_a_large_window_is_decoded_in_place(window_log: int) -> None:
    """Goal: a frame may ask for a history of gigabytes; whole frames need none, others get none.

    Method: a frame made by hand: magic, a header with a window and a size of four bytes, and one
    raw block that is the last. It decodes into the output itself; cut short it is refused.
    """
    plain = random_bytes(64 * KIB, 17).tobytes()
    header = bytes([0b1000_0000, (window_log - 10) << 3]) + len(plain).to_bytes(4, "little")
    block = (len(plain) << 3 | 1).to_bytes(3, "little")
    data = b"\x28\xb5\x2f\xfd" + header + block + plain
    frame = zstandard.get_frame_parameters(data)
    assert (frame.window_size, frame.content_size) == (1 << window_log, len(plain))
    assert decoded(Codec.ZSTD, data, len(plain)) == plain
    refused(Codec.ZSTD, data[:-1], len(plain))
    refused(Codec.ZSTD, data[:100], len(plain))


def test_dictionaries_are_refused() -> None:
    words: list[bytes | bytearray | memoryview] = [
        text(200, seed).tobytes() for seed in range(2000)
    ]
    dictionary = zstandard.train_dictionary(4096, words)
    data = zstandard.ZstdCompressor(dict_data=dictionary).compress(words[0])
    refused(Codec.ZSTD, data, len(words[0]))


def test_an_error_leaves_the_next_frame_whole() -> None:
    """Decoders are reused: one that stopped in the middle must not spoil what follows."""
    plain = text(50_000, 18)
    frame = encode_frame(plain, EVERYWHERE, 0, Compression.FAST)
    data = stored_bytes(frame)
    for length in (10, 100, len(data) - 1):
        refused(frame.codec, data[:length], len(plain))
        assert decoded(frame.codec, data, len(plain)) == plain.tobytes()
