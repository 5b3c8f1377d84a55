"""Which byte positions repeat: numbers are told from text and from noise, whatever the phase."""

import base64

import numpy as np
import pytest

from snapstore.chunking.content import ContentCutter
from snapstore.chunking.pages import PageCutter
from snapstore.chunking.texture import repeat_counts, textures
from snapstore.units import KIB, MIB, PAGE_BYTES
from tests.support.samples import ByteArray, bf16, constant, fp16, fp32, random_bytes, text

CUTTER = ContentCutter(mean_bytes=64 * KIB)

RANDOM, EVERYWHERE = 0b0000, 0b1111
ODD_BYTES, EVEN_BYTES, LAST_OF_FOUR = 0b1010, 0b0101, 0b1000


def masks_of(data: ByteArray) -> list[int]:
    """The texture of every chunk of a stream of one window."""
    analysis = CUTTER.analyse(data)
    cut = CUTTER.cut(analysis, carried=0, final=True)
    pitch_bytes = CUTTER.texture_pitch_bytes
    found: list[int] = textures(data, cut.starts, cut.ends, pitch_bytes=pitch_bytes).tolist()
    return found


@pytest.mark.parametrize(
    ("data", "mask"),
    [
        pytest.param(bf16(MIB, 1), ODD_BYTES, id="bf16"),
        pytest.param(fp16(MIB, 1), ODD_BYTES, id="fp16"),
        pytest.param(fp32(MIB // 2, 1), LAST_OF_FOUR, id="fp32"),
        pytest.param(random_bytes(2 * MIB, 1), RANDOM, id="random"),
        pytest.param(text(2 * MIB, 1), EVERYWHERE, id="text"),
        pytest.param(constant(2 * MIB), EVERYWHERE, id="one-word"),
        pytest.param(np.full(2 * MIB, 0xFF, np.uint8), EVERYWHERE, id="ff"),
    ],
)
def test_kinds_of_data(data: ByteArray, mask: int) -> None:
    """All chunks of one kind of data have its texture, but for the one at the end."""
    found = masks_of(data)
    assert len(found) > 5
    assert set(found[:-1]) == {mask}


@pytest.mark.parametrize("shift", [1, 2, 3])
def test_positions_move_with_the_phase(shift: int) -> None:
    before = random_bytes(shift, 7)
    halves = masks_of(np.concatenate((before, bf16(MIB, 1))))
    assert set(halves[1:-1]) == {EVEN_BYTES if shift % 2 else ODD_BYTES}
    quarters = masks_of(np.concatenate((before, fp32(MIB // 2, 1))))
    assert set(quarters[1:-1]) == {1 << (3 + shift) % 4}


def test_random_numbers_of_eight_bits_are_noise() -> None:
    assert set(masks_of(random_bytes(4 * MIB, 11))[:-1]) == {RANDOM}


def test_letters_of_a_small_alphabet_are_text() -> None:
    """Base64 agrees with itself no more often than a position of float16, but does so evenly."""
    encoded = np.frombuffer(base64.b64encode(random_bytes(2 * MIB, 12).tobytes()), np.uint8)
    assert set(masks_of(encoded)[:-1]) == {EVERYWHERE}
    seven_bits = random_bytes(2 * MIB, 13) & np.uint8(0x7F)
    assert set(masks_of(seven_bits)[:-1]) == {RANDOM}


def test_less_than_a_block_is_worth_a_try() -> None:
    for size in (1, 100, PAGE_BYTES - 1):
        assert masks_of(random_bytes(size, 1)) == [EVERYWHERE]


def test_pages_of_numbers_are_recognised_too() -> None:
    cutter = PageCutter()
    data = bf16(MIB, 2)
    cut = cutter.cut(cutter.analyse(data), carried=0, final=True)
    found = textures(data, cut.starts, cut.ends)
    # A chunk of a page or two tells less than one of 64 KiB.
    assert (found == ODD_BYTES).mean() > 0.95


def test_a_chunk_that_began_before_the_window_is_judged_by_what_is_in_it() -> None:
    data = bf16(MIB // 2, 3)
    found = textures(data, np.array([-70_000]), np.array([40_000]))
    assert found.tolist() == [ODD_BYTES]
    nothing = np.zeros(0, np.uint8)
    assert textures(nothing, np.array([-5]), np.array([0])).tolist() == [EVERYWHERE]


@pytest.mark.parametrize("pitch_bytes", [PAGE_BYTES, 16 * KIB])
def test_a_chunk_has_the_same_texture_among_others_and_alone(pitch_bytes: int) -> None:
    """Only what is new is looked at, so the neighbours must not matter."""
    data = np.concatenate((bf16(MIB // 2, 1), random_bytes(MIB, 2), text(MIB, 3)))
    ends = np.arange(100_000, len(data), 100_000)
    starts = ends - 100_000
    all_found = textures(data, starts, ends, pitch_bytes=pitch_bytes)
    for row in range(len(ends)):
        alone = textures(data, starts[[row]], ends[[row]], pitch_bytes=pitch_bytes)
        assert alone[0] == all_found[row]


def test_counts_are_those_of_the_obvious_program() -> None:
    """Goal: the packed counters neither overflow into each other nor mix positions up.

    Method: blocks of one byte, where every comparison agrees and each counter reaches its
    greatest value, noise and numbers, counted byte by byte.
    """
    blocks = np.concatenate(
        (np.full(PAGE_BYTES, 0xFF, np.uint8), random_bytes(PAGE_BYTES, 1), bf16(PAGE_BYTES // 2, 1))
    )
    counts = np.diff(repeat_counts(blocks), axis=0)
    for number, block in enumerate(blocks.reshape(-1, PAGE_BYTES)):
        expected = [0, 0, 0, 0]
        for left, right in ((0, 512), (1024, 2048), (2560, 3328)):
            for place in range(256):
                expected[place % 4] += int(block[left + place] == block[right + place])
        assert counts[number].tolist() == expected
    assert counts[0].tolist() == [192, 192, 192, 192]
