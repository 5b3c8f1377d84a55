import contextlib
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapstore.errors import FormatError, Malformed
from snapstore.source import criu_memory
from snapstore.source.criu_memory import MAGIC_MM, Vmas, VmaStatus, parse_mm
from tests.unit.source import builders
from tests.unit.source.builders import image, message, vma

ANON = VmaStatus.REGULAR | VmaStatus.ANON_PRIVATE
VSYSCALL = 0xFFFF_FFFF_FF60_0000
GUARDED = [
    vma(0x1000, 0x3000, ANON, 0, (9, 1 << 12)),
    vma(0x3000, 0x4000, VmaStatus.REGULAR | VmaStatus.FILE_SHARED, 5, (10, 2)),
    vma(VSYSCALL, VSYSCALL + 0x1000, VmaStatus.VSYSCALL),
    vma(0x1000, 0x2000, VmaStatus.GUARD),
]
UNUSUAL = message((7, ANON), (99, b"new"), (2, 0x6000), (1, 0x5000))


def rows(vmas: Vmas) -> list[tuple[int, int, int, int]]:
    columns = (vmas.starts, vmas.ends, vmas.object_ids, vmas.statuses)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_mappings_in_columns():
    vmas = parse_mm(builders.mm(1, vmas=GUARDED)).vmas
    assert rows(vmas) == [
        (0x1000, 0x3000, 0, ANON),
        (0x3000, 0x4000, 5, VmaStatus.REGULAR | VmaStatus.FILE_SHARED),
        (VSYSCALL, VSYSCALL + 0x1000, 0, VmaStatus.VSYSCALL),
        (0x1000, 0x2000, 0, VmaStatus.GUARD),
    ]
    assert (vmas.protections.tolist(), vmas.flags.tolist()) == ([3] * 4, [2] * 4)
    assert rows(vmas.having(VmaStatus.FILE)) == rows(vmas)[1:2]
    assert rows(vmas.mapped()) == rows(vmas)[:3]
    assert vmas.having(VmaStatus.REGULAR).size_bytes() == 0x3000


def test_one_unusual_mapping_changes_nothing_about_the_others():
    usual = parse_mm(builders.mm(1, vmas=GUARDED[:2])).vmas
    mixed = parse_mm(builders.mm(1, vmas=[*GUARDED[:2], UNUSUAL])).vmas
    assert rows(mixed) == [*rows(usual), (0x5000, 0x6000, 0, ANON)]


def test_a_process_without_mappings():
    assert len(parse_mm(builders.mm(1, vmas=[])).vmas) == 0


@pytest.mark.parametrize(
    "bad",
    [
        vma(0x5001, 0x6000, ANON),
        vma(0x5000, 0x6001, ANON),
        vma(0x5000, 0x5000, ANON),
        vma(0x6000, 0x5000, ANON),
        vma(0x3000, 0x5000, ANON),
        vma(0x5000, 0x6000, 1 << 32),
        message((1, 0x5000), (2, 0x6000), (5, 1 << 32), (7, ANON)),
        message((1, 0x5000), (2, 0x6000)),
        message((1, 0x5000), (7, ANON)),
        message((1, 0x5000), (2, b"x"), (7, ANON)),
        b"\x08" + b"\xff" * 9 + b"\x02" + message((2, 0x6000), (7, ANON)),
    ],
)
def test_a_mapping_that_cannot_be_is_refused(bad: bytes):
    with pytest.raises(Malformed, match=r"mm\.img"):
        parse_mm(builders.mm(1, vmas=[*GUARDED[:2], bad]))
    # Likewise where the mappings are read one by one.
    with pytest.raises(Malformed, match=r"mm\.img"):
        parse_mm(builders.mm(1, vmas=[message((99, 1), (1, 0), (2, 0x1000), (7, ANON)), bad, bad]))


def test_without_an_executable_it_is_refused():
    with pytest.raises(Malformed, match="executable"):
        parse_mm(image(MAGIC_MM, message((1, 1))))


@given(st.lists(st.lists(st.tuples(st.integers(1, 11), st.integers(0, 2**64 - 1)), max_size=12)))
def test_both_ways_of_reading_say_the_same(entries: list[list[tuple[int, int]]]):
    """Goal: the shape of the messages decides how fast they are read, never what they say.

    Method: read mappings of any fields, then once more with an unknown field added to the first.
    """
    sane = [message((1, 0x1000), (2, 0x2000), (7, ANON)), *(message(*one) for one in entries)]
    marked = [sane[0] + message((99, 1)), *sane[1:]]
    outcomes = []
    for vmas in (sane, marked):
        try:
            outcomes.append(rows(parse_mm(builders.mm(1, vmas=vmas)).vmas))
        except FormatError as error:
            outcomes.append(type(error))
    assert outcomes[0] == outcomes[1]


@given(st.binary(max_size=300))
def test_any_bytes_after_good_mappings_never_do_more_than_refuse(tail: bytes):
    with contextlib.suppress(FormatError):
        mapped = parse_mm(builders.mm(1, vmas=[*GUARDED[:2], tail])).vmas.mapped()
        assert (mapped.starts[1:] >= mapped.ends[:-1]).all()


def test_sixty_thousand_mappings_take_no_second():
    """The kernel's usual limit; read one by one, they would take longer than a restore may."""
    vmas = [vma(row << 13, (row << 13) + 0x1000, ANON) for row in range(1, 60_001)]
    data = builders.mm(1, vmas=vmas)
    started = time.perf_counter()
    found = parse_mm(data).vmas
    assert time.perf_counter() - started < 2
    assert np.array_equal(found.ends - found.starts, np.full(60_000, 0x1000, np.uint64))
    assert criu_memory.VMAS_MAX > 60_000
