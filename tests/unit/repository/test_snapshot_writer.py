"""Snapshots from bytes that arrive: what comes back, what a push finds of it, and how it ends."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from typing_extensions import override

import snapstore
from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend
from snapstore.errors import (
    BackendError,
    Interrupted,
    OutOfSpace,
    RefNotFound,
    TransientBackendError,
    UsageError,
)
from snapstore.format.lease import LeaseState, decode_lease
from snapstore.options import MEMORY_BYTES_MIN, StoreOptions
from snapstore.repository.objects import read_object
from snapstore.repository.store import Store
from snapstore.repository.windows import WINDOW_BYTES
from snapstore.testing.clock import ManualClock
from snapstore.units import KIB, MIB, BytesLike
from tests.support.samples import bf16, nonzero_bytes, pages, text
from tests.unit.repository.parts import CONFIG, memory_stores, open_on

NAME = "team/model/engine:v1"

_memory = memory_stores()


def small_store() -> Store:
    """A store with the smallest budget, which has two windows: one may be filled in place."""
    options = StoreOptions(memory_bytes=MEMORY_BYTES_MIN, threads=2)
    return snapstore.init_store(next(_memory), options)


@pytest.fixture
def store() -> Iterator[Store]:
    with small_store() as opened:
        yield opened


def contents(store: Store, name: str = NAME) -> dict[str, bytes]:
    snapshot = store.snapshot(name)
    found = {}
    for entry in snapshot.walk():
        if entry.type is snapstore.EntryType.FILE:
            with snapshot.open(entry.path) as file:
                found[entry.name] = file.read()
    return found


# -- what comes back ------------------------------------------------------------------------------


SIZES = {
    "empty": 0,
    "one": 1,
    "small": 64 * KIB - 1,
    "large": 64 * KIB,
    "held": 68 * KIB,
    "mebi": MIB,
    "mebi+": MIB + 1,
    "window-": WINDOW_BYTES - 1,
    "window": WINDOW_BYTES,
    "window+": WINDOW_BYTES + 1,
    "windows": 2 * WINDOW_BYTES,
}


@pytest.mark.slow
@pytest.mark.parametrize("data_class", ["pages", "tensors", "generic"])
def test_files_of_all_sizes_come_back(store: Store, tmp_path: Path, data_class: str) -> None:
    """Goal: no size is special, and a push of what is pulled finds the same ranks.

    Method: write a file of each size around which something changes; read, pull, push.
    """
    made = pages(-(-max(SIZES.values()) // 4096), 3, zero_share=0.3).tobytes()
    with store.begin(NAME) as writer:
        for name, size in SIZES.items():
            with writer.open_file("host", f"{name}.x", data_class=data_class) as file:
                file.write(made[:size])
                assert file.size_bytes == size
        written = writer.commit()
    assert contents(store) == {f"{name}.x": made[:size] for name, size in SIZES.items()}
    store.pull(NAME, tmp_path / "pulled")
    pushed = store.push(tmp_path / "pulled", "again:v1", class_overrides=[f"*={data_class}"])
    assert pushed.ingest.new_bytes == 0
    assert pushed.ranks == written.ranks


def test_the_tree_is_what_was_said(store: Store, tmp_path: Path) -> None:
    with store.begin(NAME, labels={"gpu": "H200"}, root_mode=0o750) as writer:
        writer.add_file(1, "rank-1/weights.bin", b"one", mode=0o640, mtime_ns=1_000_000_007)
        writer.add_file(0, b"rank-0/a/\xff.bin", b"zero", uid=3, gid=4)
        writer.add_file("host", "inventory.img", b"host")
        result = writer.commit(kind="criu", requirements={"machine": "x86_64"}, warnings=["odd"])
    assert list(result.ranks) == ["host", 0, 1]
    assert result.warnings == ("odd",)
    root = store.snapshot(NAME).manifest
    assert (root.kind, root.labels, root.requirements) == (
        "criu",
        {"gpu": "H200"},
        {"machine": "x86_64"},
    )
    entries = {entry.path: entry for entry in store.snapshot(NAME).walk()}
    assert sorted(entries) == [
        b"",
        b"inventory.img",
        b"rank-0",
        b"rank-0/a",
        b"rank-0/a/\xff.bin",
        b"rank-1",
        b"rank-1/weights.bin",
    ]
    assert entries[b"rank-1/weights.bin"].rank == 1
    store.pull(NAME, tmp_path / "pulled")
    status = (tmp_path / "pulled" / "rank-1" / "weights.bin").stat()
    assert (status.st_mode & 0o7777, status.st_mtime_ns) == (0o640, 1_000_000_007)
    assert (tmp_path / "pulled").stat().st_mode & 0o7777 == 0o750
    assert (tmp_path / "pulled" / "inventory.img").stat().st_mode & 0o7777 == 0o600
    # One rank can be recreated alone.
    store.pull(NAME, tmp_path / "one", ranks=[1])
    assert (tmp_path / "one" / "rank-1" / "weights.bin").read_bytes() == b"one"
    assert not (tmp_path / "one" / "rank-0" / "a" / "\udcff.bin").exists()


@pytest.mark.slow
def test_zeros_are_one_extent_across_windows(store: Store, tmp_path: Path) -> None:
    """Written in small pieces and through several windows, as if it were one hole."""
    block = nonzero_bytes(64 * KIB, 1).tobytes()
    size = 3 * WINDOW_BYTES
    with store.begin(NAME) as writer:
        for name in ("pages-1.img", "weights.bin", "log"):
            with writer.open_file("host", name) as file:
                file.write(block)
                for _ in range(0, size, MIB):
                    file.write(bytes(MIB))
                file.write(block)
        result = writer.commit()
    extents = store.snapshot(NAME).rank("host").read_extents()
    zeros = extents["length"][extents["chunk_length"] == 0]
    assert zeros.tolist() == [size] * 3
    assert result.ingest.zero_bytes == 3 * size
    store.pull(NAME, tmp_path / "pulled")
    assert store.push(tmp_path / "pulled", "again:v1").ranks == result.ranks


def test_the_compression_can_be_chosen(store: Store) -> None:
    data = text(MIB, 4).tobytes()
    with store.begin(NAME, compression=snapstore.Compression.NONE) as writer:
        writer.add_file("host", "log", data)
        result = writer.commit()
    assert list(result.packed.coded_bytes) == ["raw"]
    assert contents(store) == {"log": data}


def test_a_small_file_again_is_not_stored_again(store: Store) -> None:
    for _ in range(2):
        with store.begin(NAME) as writer:
            writer.add_file("host", "core-1.img", text(5000, 1).tobytes())
            result = writer.commit()
    assert (result.ingest.new_bytes, result.ingest.known_bytes) == (0, 5000)
    assert result.generation == 2


@pytest.mark.slow
def test_more_small_files_than_a_window_holds(tmp_path: Path) -> None:
    """They fill windows in turns, each sorted by path; a push finds every one of them."""
    files = {f"{number:03}": text(60_000, number).tobytes() for number in range(250)}
    with snapstore.init_store(next(_memory)) as store:
        with store.begin(NAME) as writer:
            for name in reversed(files):
                writer.add_file("host", name, files[name])
            result = writer.commit()
        assert result.ingest.new_chunks == len(files)
        assert contents(store) == files
        store.pull(NAME, tmp_path / "pulled")
        assert store.push(tmp_path / "pulled", "again:v1").ingest.new_bytes == 0


# -- views ----------------------------------------------------------------------------------------


def test_views_begin_at_pages_and_advance(store: Store) -> None:
    data = nonzero_bytes(MIB + 4096, 2).tobytes()
    with store.begin(NAME) as writer, writer.open_file("host", "pages-1.img") as file:
        position = 0
        while position < len(data):
            view = file.buffer()
            assert view.nbytes >= 1
            assert np.frombuffer(view, np.uint8).ctypes.data % 4096 == 0
            count = min(view.nbytes, 8192, len(data) - position)
            view[:count] = data[position : position + count]
            file.advance(count)
            position += count
            assert file.size_bytes == position
        with pytest.raises(UsageError, match="cannot advance"):
            file.advance(WINDOW_BYTES)
        file.close()
        file.close()
        with pytest.raises(UsageError, match="is closed"):
            file.buffer()
        with pytest.raises(UsageError, match="is closed"):
            file.advance(0)
        writer.commit()
    assert contents(store) == {"pages-1.img": data}


# -- side by side ---------------------------------------------------------------------------------


@pytest.mark.slow
def test_files_arrive_side_by_side_with_little_memory(store: Store, tmp_path: Path) -> None:
    """Goal: with two windows, thirty files from thirty threads neither wait for each other nor mix.

    Method: each thread writes a piece and waits for all others before the next, so that all files
    are open and none can go on alone; many small files come and go meanwhile.
    """
    count = 30
    barrier = threading.Barrier(count)
    files = {
        f"pages-{number}.img": pages(500 + 40 * number, number, zero_share=0.2).tobytes()
        for number in range(count // 2)
    } | {
        f"rank-0/weights-{number}.bin": bf16(MIB + 9_999 * number, number).tobytes()
        for number in range(count // 2)
    }
    small = {f"core-{number}.img": text(number * 211, number).tobytes() for number in range(300)}

    def fill(name: str, number: int) -> None:
        data = files[name]
        with writer.open_file(0 if "/" in name else "host", name) as file:
            for step in range(10):
                barrier.wait(timeout=60)
                begin, end = len(data) * step // 10, len(data) * (step + 1) // 10
                file.write(data[begin:end])
                for one in itertools.islice(small, number * 10 + step, number * 10 + step + 1):
                    writer.add_file("host", one, small[one])

    with store.begin(NAME) as writer, ThreadPoolExecutor(count) as threads:
        assert writer.files_in_place == 1
        for future in [
            threads.submit(fill, *item) for item in zip(files, range(count), strict=True)
        ]:
            future.result()
        result = writer.commit()
    assert contents(store) == files | small
    store.pull(NAME, tmp_path / "pulled")
    pushed = store.push(tmp_path / "pulled", "again:v1")
    assert pushed.ingest.new_bytes == 0
    # On the host's side small files went in several turns, so that their order is another.
    assert pushed.ranks[0] == result.ranks[0]


@pytest.mark.slow
def test_a_file_that_pauses_holds_nobody_up(store: Store) -> None:
    """Goal: others go on while files wait half full, more of them than there are windows.

    Method: leave several large files open in the middle of a window, in one thread; write another
    from its beginning to its end, then finish those.
    """
    data = pages(5 * 256, 1).tobytes()
    with store.begin(NAME) as writer:
        paused = [writer.open_file("host", f"pages-{number}.img") for number in range(6)]
        for file in paused:
            file.write(data[: 4 * MIB + 5])
        writer.add_file("host", "weights.bin", data * 8)
        for file in paused:
            file.write(data[4 * MIB + 5 :])
            file.close()
        writer.commit()
    found = contents(store)
    assert found.pop("weights.bin") == data * 8
    assert found == {f"pages-{number}.img": data for number in range(6)}


def test_too_many_open_files_are_refused(store: Store) -> None:
    with store.begin(NAME) as writer:
        opened = []
        with pytest.raises(UsageError, match="files are open at once"):  # noqa: PT012
            for number in range(10_000):
                opened.append(writer.open_file("host", str(number)))  # noqa: PERF401
        assert len(opened) >= writer.files_open_max
        for file in opened:
            file.write(b"content")
            file.close()
        # Those that are closed make room.
        writer.add_file("host", "more", b"more")
        writer.commit()
    assert len(contents(store)) == len(opened) + 1


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", ["", "/etc/passwd", "../up", "a/../b", "a//b", "a/", "./a", "nul\0", "x" * 256]
)
def test_paths_that_lead_nowhere_are_refused(store: Store, path: str) -> None:
    with store.begin(NAME) as writer, pytest.raises(UsageError, match="no path of a file"):
        writer.add_file("host", path, b"")


def test_each_path_is_there_once(store: Store) -> None:
    with store.begin(NAME) as writer:
        writer.add_file("host", "a/b", b"first")
        for rank, path in (("host", "a/b"), (0, "a/b"), ("host", "a"), (1, "a/b/c")):
            with pytest.raises(UsageError, match="is there already"):
                writer.add_file(rank, path, b"second")  # type: ignore[arg-type]
        writer.add_file(3, "a/c", b"third")
        writer.commit()
    assert contents(store) == {"a/b": b"first", "a/c": b"third"}


def test_values_that_cannot_be_are_refused(store: Store) -> None:
    with pytest.raises(UsageError, match="mode"), store.begin(NAME, root_mode=0o10000):
        pass
    with pytest.raises(UsageError, match="label"), store.begin(NAME, labels={"": "x"}):
        pass
    with pytest.raises(UsageError, match="exact"):
        store.begin(f"{NAME.partition(':')[0]}@b3:{'0' * 64}")
    with store.begin(NAME) as writer:
        with pytest.raises(UsageError, match="class of data"):
            writer.open_file("host", "a", data_class="small")
        with pytest.raises(UsageError, match="rank"):
            writer.open_file(-1, "a")
        with pytest.raises(UsageError, match="mode"):
            writer.open_file("host", "a", mode=0o10000)
        with pytest.raises(UsageError, match="time"):
            writer.open_file("host", "a", mtime_ns=1 << 63)
        with pytest.raises(UsageError, match="uid"):
            writer.open_file("host", "a", uid=-1)


def test_a_snapshot_that_is_not_complete_is_not_committed(store: Store) -> None:
    with store.begin(NAME) as writer:
        file = writer.open_file("host", "a")
        with pytest.raises(UsageError, match="'a' is still open"):
            writer.commit()
        file.close()
        with pytest.raises(ZeroDivisionError), writer.open_file("host", "b") as file:
            raise ZeroDivisionError
        with pytest.raises(UsageError, match="'b' was not completed"):
            writer.commit()
    with pytest.raises(RefNotFound):
        store.snapshot(NAME)


def test_what_the_format_cannot_say_is_refused_before_the_end(store: Store) -> None:
    with store.begin(NAME) as writer:
        for kind, requirements in (
            ("Not a word", {}),
            ("criu", {"set": {1}}),
            ("criu", {"x": 0.5}),
        ):
            with pytest.raises(UsageError, match="cannot be of kind"):
                writer.commit(kind=kind, requirements=requirements)
        writer.commit(kind="criu")
        with pytest.raises(UsageError, match="was begun already"):
            writer.commit()
        with pytest.raises(UsageError, match="is committed"):
            writer.add_file("host", "late", b"")
    assert contents(store) == {}


# -- how it ends ----------------------------------------------------------------------------------


class StuckBackend(MemoryBackend):
    """Packs are not stored before the test says so; then it may fail them."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.error: BackendError | None = None

    @override
    def put_new(self, kind: ObjectKind, name: str, pieces: list[BytesLike]) -> None:  # type: ignore[override]
        if kind is ObjectKind.PACK:
            assert self.go_on.wait(timeout=60)
            if self.error is not None:
                raise self.error
        super().put_new(kind, name, pieces)


def test_placements_are_kept_by_rank(store: Store) -> None:
    with store.begin(NAME) as writer:
        writer.add_file(3, "memory", b"x")
        writer.commit(placements={3: {"gpu": 1}, 7: {"gpu": 2}})
    snapshot = store.snapshot(NAME)
    assert snapshot.rank(7).meta.placement == {"gpu": 2}
    assert snapshot.rank(3).meta.placement == {"gpu": 1}
    assert snapshot.rank("host").meta.placement == {}


@pytest.mark.parametrize(
    ("placements", "words"),
    [
        ({-1: {}}, "the rank -1 cannot be"),
        ({"host": {"speed": 0.5}}, "cannot be stored"),
        ({"host": {"key": object()}}, "cannot be stored"),
        ({"host": {"key": "x" * (5 << 20)}}, "more than"),
    ],
)
def test_placements_that_cannot_be_are_refused(
    store: Store, placements: dict[int | Literal["host"], dict[str, object]], words: str
) -> None:
    """Before anything is published, and so that the caller can still say it otherwise."""
    with store.begin(NAME) as writer:
        writer.add_file("host", "memory", b"x")
        with pytest.raises(UsageError, match=words):
            writer.commit(placements=placements)
        writer.commit()


def lease_of(backend: MemoryBackend) -> LeaseState:
    newest = max(info.name for info in backend.list(ObjectKind.LEASE))
    return decode_lease(read_object(backend, ObjectKind.LEASE, newest, limit_bytes=MIB)).state


def fill_without_end(writer: snapstore.SnapshotWriter, number: int) -> None:
    rng = np.random.default_rng(number)
    file = writer.open_file("host", f"pages-{number}.img")
    while True:
        file.write(rng.bytes(MIB))


def wait_until_stuck(writer: snapstore.SnapshotWriter) -> None:
    """Return when somebody waits for a buffer, which nobody gives back."""
    changed = writer._session.buffers._changed
    tick = threading.Event()
    while not changed._waiters:  # type: ignore[attr-defined]
        tick.wait(0.002)


@pytest.mark.slow
@pytest.mark.parametrize("producers", [1, 3])
def test_an_abort_wakes_those_who_wait(producers: int) -> None:
    """Goal: `abort` ends every call of a writer soon, also those that wait for buffers.

    Method: let threads write without end to a storage that does not go on, until one of them waits
    for a buffer; abort from another.
    """
    backend = StuckBackend()
    options = StoreOptions(memory_bytes=MEMORY_BYTES_MIN, threads=2)
    with Store(backend, CONFIG, options, ManualClock()) as store, ThreadPoolExecutor() as threads:
        with store.begin(NAME) as writer:
            working = [threads.submit(fill_without_end, writer, one) for one in range(producers)]
            wait_until_stuck(writer)
            writer.abort()
            for future in working:
                assert isinstance(future.exception(timeout=60), Interrupted)
            with pytest.raises(Interrupted, match="aborted"):
                writer.open_file("host", "more")
            with pytest.raises(Interrupted, match="aborted"):
                writer.commit()
            backend.go_on.set()
        with pytest.raises(RefNotFound):
            store.snapshot(NAME)
    assert lease_of(backend) is LeaseState.RELEASED


class HookedBackend(MemoryBackend):
    """Calls something once it has a snapshot's root."""

    def __init__(self) -> None:
        super().__init__()
        self.then: Callable[[], None] = lambda: None

    @override
    def put_new(self, kind: ObjectKind, name: str, pieces: Sequence[BytesLike]) -> None:
        super().put_new(kind, name, pieces)
        if kind is ObjectKind.SNAPSHOT:
            self.then()


def test_an_abort_in_a_commit_leaves_nothing_under_the_name() -> None:
    """Goal: what was given up does not get its name later, when the storage answers after all."""
    backend = HookedBackend()
    with Store(backend, CONFIG, StoreOptions(), ManualClock()) as store:
        with store.begin(NAME) as writer:
            writer.add_file("host", "file", b"something")
            backend.then = writer.abort
            with pytest.raises(Interrupted, match="aborted"):
                writer.commit()
        with pytest.raises(RefNotFound):
            store.snapshot(NAME)


@pytest.mark.slow
def test_a_failure_of_the_storage_wakes_those_who_wait() -> None:
    backend = StuckBackend()
    options = StoreOptions(memory_bytes=MEMORY_BYTES_MIN, threads=2)
    with Store(backend, CONFIG, options, ManualClock()) as store, ThreadPoolExecutor() as threads:
        with store.begin(NAME) as writer:
            working = [threads.submit(fill_without_end, writer, number) for number in range(2)]
            wait_until_stuck(writer)
            backend.error = OutOfSpace("the disk is full")
            backend.go_on.set()
            for future in working:
                assert isinstance(future.exception(timeout=60), OutOfSpace)
            with pytest.raises(OutOfSpace):
                writer.commit()
        with pytest.raises(RefNotFound):
            store.snapshot(NAME)
    assert lease_of(backend) is LeaseState.RELEASED


def test_a_failure_at_the_end_is_told_by_commit() -> None:
    backend = StuckBackend()
    backend.go_on.set()
    backend.error = TransientBackendError("no answer")
    with open_on(backend, ManualClock()) as store, store.begin(NAME) as writer:
        writer.add_file("host", "a", b"content")
        with pytest.raises(TransientBackendError):
            writer.commit()
    assert lease_of(backend) is LeaseState.RELEASED
    with open_on(backend, ManualClock()) as store, pytest.raises(RefNotFound):
        store.snapshot(NAME)


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_leaving_without_a_commit_publishes_nothing(error: type[BaseException] | None) -> None:
    backend = MemoryBackend()
    before = threading.active_count()

    def leave() -> None:
        with open_on(backend, ManualClock()) as store, store.begin(NAME) as writer:
            writer.add_file("host", "weights.bin", nonzero_bytes(MIB).tobytes())
            writer.open_file("host", "open").write(b"never closed")
            if error is not None:
                raise error

    if error is None:
        leave()
    else:
        with pytest.raises(error):
            leave()
    assert threading.active_count() == before
    assert lease_of(backend) is LeaseState.RELEASED
    assert not list(backend.list(ObjectKind.REF))
    assert not list(backend.list(ObjectKind.SNAPSHOT))


def test_packs_that_were_sent_are_found(store: Store) -> None:
    """What a writer that is given up has sent is not sent again."""
    data = nonzero_bytes(40 * MIB, 8).tobytes()
    with store.begin("lost:v1") as writer:
        writer.add_file("host", "weights.bin", data)
    with store.begin(NAME) as writer:
        writer.add_file("host", "weights.bin", data)
        result = writer.commit()
    assert result.ingest.known_bytes >= 12 * MIB


def test_the_lease_is_renewed_while_files_arrive() -> None:
    clock, backend = ManualClock(), MemoryBackend()
    with open_on(backend, clock) as store, store.begin(NAME) as writer:
        writer.add_file("host", "a", bytes(MIB))
        clock.advance_s(1300)
        writer.add_file("host", "b", bytes(MIB))
        writer.commit()
    states = [
        decode_lease(read_object(backend, ObjectKind.LEASE, info.name, limit_bytes=MIB)).state
        for info in sorted(backend.list(ObjectKind.LEASE), key=lambda info: info.name)
    ]
    assert states == [LeaseState.ACQUIRED, LeaseState.RENEWED, LeaseState.COMMITTED]


def test_progress_is_told(store: Store) -> None:
    told: list[snapstore.Progress] = []
    with store.begin(NAME, progress=told.append) as writer:
        writer.add_file("host", "a", bytes(3 * MIB))
        writer.commit()
    assert told[0] == snapstore.Progress("store", 0, 0)
    assert told[-1] == snapstore.Progress("commit", 3 * MIB, 0)


def test_an_error_of_the_progress_callback_ends_it(store: Store) -> None:
    def refuse(progress: snapstore.Progress) -> None:
        if progress.done_bytes:
            raise Interrupted("enough")

    with store.begin(NAME, progress=refuse) as writer:
        writer.add_file("host", "a", bytes(3 * MIB))
        with pytest.raises(Interrupted, match="enough"):
            writer.commit()
    with pytest.raises(RefNotFound):
        store.snapshot(NAME)
