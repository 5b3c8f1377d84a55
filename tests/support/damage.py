"""Stores to spoil: small real ones, ways to damage them, and lies behind right digests.

`Lab` is a store on a file system together with a tree that was pushed into it. What its `lie_*`
methods write has the digests and names that the format asks for, so that a reader gets past these
checks and has to find the lie itself. `Crash` stops a store's backend at a chosen operation.
"""

import contextlib
import dataclasses
import gc
import hashlib
import json
import os
import random
import stat
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from snapstore.backend.base import Backend, ObjectKind
from snapstore.backend.files import OsFileCalls
from snapstore.backend.layout import key_of
from snapstore.backend.posix import PosixBackend
from snapstore.backend.trace import Operation, TraceHook, TracingBackend, Verb
from snapstore.clock import Clock, SystemClock
from snapstore.format import envelope, limits
from snapstore.format import layout as layout_format
from snapstore.format import pack as pack_format
from snapstore.format.config import decode_config
from snapstore.ids import Digest, RankId, RefName, SnapshotId, parse_snapshot_ref
from snapstore.options import Integrity, StoreOptions
from snapstore.repository.pull import PullResult
from snapstore.repository.push import PushResult
from snapstore.repository.store import Store, init_store, open_store
from snapstore.testing.faults import KillableFiles, Killed
from snapstore.units import KIB, align_up

REPOSITORY = Path(__file__).parents[2]
LONG_AGO_NS = 1_700_000_000_000_000_000
"""Of files to push, so that whatever is written to them later has another time for sure."""

Sections = dict[bytes, bytes]

# -- trees ----------------------------------------------------------------------------------------


def make_tree(folder: Path, rng: random.Random, *, scale: int = 1) -> Path:
    """Make a tree with all kinds of entries, three ranks, zeros, and files small and large."""
    folder.mkdir(parents=True)
    (folder / "empty").write_bytes(b"")
    (folder / "weights").mkdir()
    (folder / "weights/layer.bin").write_bytes(rng.randbytes(scale * 150 * KIB))
    (folder / "weights/odd.bin").write_bytes(rng.randbytes(scale * 70 * KIB + 13))
    pages = [rng.randbytes(4 * KIB) if number % 3 else bytes(4 * KIB) for number in range(60)]
    (folder / "pages-1.img").write_bytes(b"".join(pages) * scale)
    for rank in range(2):
        (folder / f"rank{rank}.bin").write_bytes(rng.randbytes(scale * 100 * KIB))
    for number in range(6):
        (folder / f"note-{number}").write_bytes(rng.randbytes(500 + number) + b"text " * 40)
    with (folder / "sparse.img").open("wb") as file:
        file.truncate(256 * KIB)
    (folder / "link").symlink_to("weights/layer.bin")
    (folder / "second-name").hardlink_to(folder / "note-0")
    age(folder)
    return folder


def age(folder: Path) -> None:
    """Give all of a tree a time long ago."""
    for path in [*folder.rglob("*"), folder]:
        os.utime(path, ns=(LONG_AGO_NS, LONG_AGO_NS), follow_symlinks=False)


def tree_state(folder: Path) -> dict[str, tuple[object, ...]]:
    """Everything about a tree that a pull has to bring back."""
    found: dict[str, tuple[object, ...]] = {}
    inodes: dict[int, str] = {}
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        name = path.relative_to(folder).as_posix()
        content = ""
        if stat.S_ISLNK(status.st_mode):
            content = f"-> {path.readlink()}"
        elif stat.S_ISREG(status.st_mode):
            content = hashlib.sha256(path.read_bytes()).hexdigest()
            content += f" = {inodes.setdefault(status.st_ino, name)}"
        found[name] = (status.st_mode, status.st_uid, status.st_mtime_ns, content)
    return found


# -- damage to files ------------------------------------------------------------------------------


def flip(path: Path, at: float = 0.5) -> None:
    """Turn one bit over, at a fraction of the length."""
    data = bytearray(path.read_bytes())
    data[min(int(len(data) * at), len(data) - 1)] ^= 0x10
    path.write_bytes(data)


def cut(path: Path, keep: float = 0.5) -> None:
    """Cut a file off at a fraction of its length."""
    os.truncate(path, int(path.stat().st_size * keep))


def swap(one: Path, other: Path) -> None:
    """Let two files trade their bytes."""
    first, second = one.read_bytes(), other.read_bytes()
    one.write_bytes(second)
    other.write_bytes(first)


# -- right digests --------------------------------------------------------------------------------


def canonical(value: object) -> bytes:
    """Encode plain values as the format wants its documents, whatever they say."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    return text.encode("utf-8", "surrogatepass")


def unseal(data: bytes, magic: bytes) -> Sections:
    """Take an object apart into its decoded sections."""
    header = envelope.parse_whole(data, magic=magic)
    return {
        info.tag: bytes(envelope.read_section(header, data, info.tag, limit_bytes=1 << 40))
        for info in header.sections
    }


def seal(magic: bytes, sections: Sections, *, compress: bool = False) -> envelope.Built:
    """Put sections together under right digests."""
    parts = [envelope.Section(tag, data, compress=compress) for tag, data in sections.items()]
    return envelope.build(magic, parts)


def zstd_zeros(length: int, *, declared: int | None = None, window: int = 0x38) -> bytes:
    """A zstd frame that makes gigabytes of zeros out of 4 bytes for every 128 KiB."""
    declared = length if declared is None else declared
    head = b"\x28\xb5\x2f\xfd\xc0" + bytes([window]) + declared.to_bytes(8, "little")
    block = 128 * KIB
    sizes = [block] * (length // block) + ([length % block] if length % block else [])
    repeat, last = 1 << 1, 1
    heads = [(size << 3) | repeat for size in sizes]
    heads[-1] |= last
    return head + b"".join(one.to_bytes(3, "little") + b"\0" for one in heads)


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """A section as it will be stored, whatever it decodes to."""

    tag: bytes
    data: bytes
    plain_length: int
    encoding: int = envelope.ENCODING_ZSTD


def seal_stored(magic: bytes, sections: Sequence[Stored]) -> bytes:
    """Put stored bytes together under right digests, with any claim about their decoded length."""
    end = limits.ENVELOPE_HEADER_BYTES + limits.DIRECTORY_ENTRY_BYTES * len(sections)
    directory, body = b"", b""
    first = end
    for one in sections:
        offset = align_up(end, limits.ALIGNMENT_SECTION_BYTES)
        body += bytes(offset - end) + one.data
        end = offset + len(one.data)
        place = (one.tag, one.encoding, offset, len(one.data), one.plain_length)
        directory += struct.pack("<4sIQQQ32s", *place, Digest.of(one.data).raw)
    head = struct.pack("<8sHHIQQ", magic, 1, len(sections), 0, end, 0)
    data = head + Digest.of(head + directory).raw + directory + body
    assert len(data) == end >= first
    return data


@contextlib.contextmanager
def rows(sections: Sections, tag: bytes, dtype: np.dtype[np.void]) -> Iterator[np.ndarray]:
    """Let a table of an object be changed in place."""
    table = np.frombuffer(sections[tag], dtype).copy()
    yield table
    sections[tag] = table.tobytes()


class Lab:
    """A store, a tree that was pushed into it as `name`, and what it takes to spoil it."""

    name = "team/model:v1"

    def __init__(self, root: Path, tree: Path, *, options: StoreOptions | None = None) -> None:
        self.root = root
        self.tree = tree
        self.options = options or StoreOptions(threads=2)

    @classmethod
    def make(cls, folder: Path, rng: random.Random) -> "Lab":
        """Make a store with the lab's snapshot and an unrelated one, `other`."""
        lab = cls(folder / "store", make_tree(folder / "tree", rng))
        other = make_tree(folder / "other-tree", rng)
        with init_store(str(lab.root), lab.options) as store:
            store.push(other, "other")
            store.push(lab.tree, lab.name)
        return lab

    def open(self, **changes: Any) -> Store:
        """Open the store; changes are of its options."""
        return open_store(str(self.root), dataclasses.replace(self.options, **changes))

    def push(self, name: str | None = None, tree: Path | None = None) -> PushResult:
        """Push the tree."""
        with self.open() as store:
            return store.push(tree or self.tree, name or self.name)

    def pull(
        self,
        to: Path,
        name: str | None = None,
        *,
        resume: bool = False,
        integrity: Integrity = Integrity.STRONG,
    ) -> PullResult:
        """Pull the snapshot."""
        with self.open(integrity=integrity) as store:
            return store.pull(name or self.name, to, resume=resume)

    # -- objects by kind and name

    def path(self, kind: ObjectKind, name: str) -> Path:
        """Where an object is."""
        return self.root / key_of(kind, name)

    def put(self, kind: ObjectKind, name: str, data: bytes) -> Path:
        """Put bytes where an object of that kind and name belongs."""
        path = self.path(kind, name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    def put_named(self, kind: ObjectKind, data: bytes) -> str:
        """Put bytes under their own digest, which is returned."""
        name = Digest.of(data).hex
        self.put(kind, name, data)
        return name

    def names(self, kind: ObjectKind, prefix: str = "") -> list[str]:
        """Names of all objects of a kind."""
        backend = PosixBackend(self.root)
        found = sorted(info.name for info in backend.list(kind, prefix))
        backend.close()
        return found

    def snapshot_id(self, name: str | None = None) -> SnapshotId:
        """What a name points to."""
        with self.open() as store:
            return store.snapshot(name or self.name).id

    def root_manifest(self, name: str | None = None) -> dict[str, Any]:
        """The root manifest as plain values."""
        path = self.path(ObjectKind.SNAPSHOT, self.snapshot_id(name).hex)
        manifest: dict[str, Any] = json.loads(path.read_bytes())
        return manifest

    def rank_ids(self, name: str | None = None) -> list[RankId]:
        """The rank manifests of a snapshot, the host side first."""
        return [RankId.parse(rank["manifest"]) for rank in self.root_manifest(name)["ranks"]]

    def layout_paths(self, rank: RankId) -> list[Path]:
        """All generations of a layout, oldest first."""
        return [
            self.path(ObjectKind.LAYOUT, name)
            for name in self.names(ObjectKind.LAYOUT, f"{rank.hex}/")
        ]

    def packs_of(self, name: str | None = None) -> list[Path]:
        """The packs that a snapshot needs."""
        found = set()
        with self.open() as store:
            for rank in store.snapshot(name or self.name).ranks():
                found |= {bytes(raw).hex() for raw in rank.layout.packs["id"].tolist()}
        return [self.path(ObjectKind.PACK, pack) for pack in sorted(found)]

    def indexes_of(self, packs: Sequence[Path]) -> list[Path]:
        """The indexes that know some of these packs."""
        ids = [bytes.fromhex(pack.name) for pack in packs]
        paths = [self.path(ObjectKind.INDEX, name) for name in self.names(ObjectKind.INDEX)]
        return [path for path in paths if any(one in path.read_bytes() for one in ids)]

    # -- lies

    def point(self, snapshot: str, name: str | None = None) -> None:
        """Let a name point to what may not even be there."""
        ref = parse_snapshot_ref(name or self.name).ref
        chain = f"{ref.name}/@{ref.tag}"
        number = len(self.names(ObjectKind.REF, f"{chain}/")) + 1
        body = {
            "created": "2026-11-30T05:00:00Z",
            "format": "snapstore/ref",
            "nonce": f"{number:032x}",
            "snapshot": snapshot,
            "version": 1,
        }
        self.put(ObjectKind.REF, f"{chain}/{number:08d}", canonical(body))

    def lie_in_root(self, change: Callable[[dict[str, Any]], object]) -> SnapshotId:
        """Write a changed root manifest and let the name point to it."""
        manifest = self.root_manifest()
        change(manifest)
        data = canonical(manifest)
        snapshot = SnapshotId.of(data)
        self.put(ObjectKind.SNAPSHOT, snapshot.hex, data)
        self.point(snapshot.hex)
        return snapshot

    def lie_in_rank(
        self, change: Callable[[Sections], object], *, position: int = 0, layouts: bool = True
    ) -> RankId:
        """Write a changed rank manifest, with its layout, and a snapshot that has it."""
        old = self.rank_ids()[position]
        sections = unseal(self.path(ObjectKind.RANK, old.hex).read_bytes(), envelope.RANK_MAGIC)
        change(sections)
        built = seal(envelope.RANK_MAGIC, sections)
        rank = RankId(built.root.raw)
        self.put(ObjectKind.RANK, rank.hex, built.to_bytes())
        if layouts:
            newest = self.layout_paths(old)[-1]
            layout = unseal(newest.read_bytes(), envelope.LAYOUT_MAGIC)
            layout[b"META"] = layout[b"META"].replace(old.hex.encode(), rank.hex.encode())
            data = seal(envelope.LAYOUT_MAGIC, layout).to_bytes()
            self.put(ObjectKind.LAYOUT, f"{rank.hex}/00000001", data)

        def replace(manifest: dict[str, Any]) -> None:
            manifest["ranks"][position]["manifest"] = rank.hex

        self.lie_in_root(replace)
        return rank

    def lie_in_layout(
        self, change: Callable[[Sections], object], *, position: int = 0, compress: bool = False
    ) -> Path:
        """Write a changed layout as the newest generation."""
        rank = self.rank_ids()[position]
        generations = self.layout_paths(rank)
        sections = unseal(generations[-1].read_bytes(), envelope.LAYOUT_MAGIC)
        change(sections)
        data = seal(envelope.LAYOUT_MAGIC, sections, compress=compress).to_bytes()
        return self.put(ObjectKind.LAYOUT, f"{rank.hex}/{len(generations) + 1:08d}", data)

    def lie_in_tables(
        self,
        change: Callable[[layout_format.LayoutTables], layout_format.LayoutTables | None],
        *,
        position: int = 0,
    ) -> Path:
        """Write a layout of changed tables, all its rules kept, as the newest generation."""
        rank = self.rank_ids()[position]
        generations = self.layout_paths(rank)
        old = layout_format.parse_layout(generations[-1].read_bytes())
        tables = layout_format.LayoutTables(
            old.meta, old.packs.copy(), old.frames.copy(), old.streams.copy(), old.segments.copy()
        )
        tables = change(tables) or tables
        built = layout_format.build_layout(
            old.meta, tables.packs, tables.frames, tables.streams, tables.segments
        )
        name = f"{rank.hex}/{len(generations) + 1:08d}"
        return self.put(ObjectKind.LAYOUT, name, built.to_bytes())

    def lie_in_frame(
        self, codec: int, stored: bytes, *, plain_length: int | None = None, position: int = 0
    ) -> None:
        """Put stored bytes of the test's own into a pack, and show them as a frame of a layout.

        The frame is the first of the newest layout; its length decoded stays what it was unless
        another is given.
        """
        chunks = np.zeros(1, pack_format.CHUNK_DTYPE)
        chunks["length"] = 1
        frames = np.zeros(1, pack_format.FRAME_DTYPE)
        frames["stored_length"], frames["plain_length"] = len(stored), 1
        frames["chunk_count"], frames["codec"] = 1, pack_format.CODEC_ZSTD
        body = stored.ljust(align_up(len(stored), limits.ALIGNMENT_FRAME_BYTES), b"\0")
        data = body + pack_format.encode_footer(frames, chunks, offset=len(body))
        pack = bytes.fromhex(self.put_named(ObjectKind.PACK, data))

        def change(tables: layout_format.LayoutTables) -> layout_format.LayoutTables:
            packs = np.concatenate((tables.packs, np.zeros(1, layout_format.PACK_DTYPE)))
            packs["id"][-1], packs["length"][-1] = pack, len(data)
            frame = tables.frames[:1]
            frame["offset"], frame["pack"] = 0, len(packs) - 1
            frame["codec"], frame["stored_length"] = codec, len(stored)
            frame["checksum"] = xxhash.xxh3_128_digest(stored)
            if plain_length is not None:
                frame["plain_length"] = plain_length
            return dataclasses.replace(tables, packs=packs)

        self.lie_in_tables(change, position=position)

    def lie_in_index(self, change: Callable[[Sections], object], path: Path) -> Path:
        """Write a changed index beside the old one."""
        sections = unseal(path.read_bytes(), envelope.INDEX_MAGIC)
        change(sections)
        built = seal(envelope.INDEX_MAGIC, sections)
        return self.put(ObjectKind.INDEX, built.root.hex, built.to_bytes())


# -- what must not be left ------------------------------------------------------------------------


def open_descriptors() -> dict[int, str]:
    """What this process has open."""
    found = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - as numbers
        with contextlib.suppress(OSError):
            found[int(name)] = str(Path(f"/proc/self/fd/{name}").readlink())
    # The directory that was just listed is closed by now.
    return {fd: target for fd, target in found.items() if "/fd" not in target}


@contextlib.contextmanager
def nothing_left() -> Iterator[None]:
    """Check that no thread and no descriptor is left by what is done meanwhile."""
    threads = set(threading.enumerate())
    descriptors = open_descriptors()
    yield
    new_threads = set(threading.enumerate()) - threads
    assert not new_threads, new_threads
    if set(open_descriptors().items()) - set(descriptors.items()):
        gc.collect()  # An exception that is being looked at keeps what its frames refer to.
    new = set(open_descriptors().items()) - set(descriptors.items())
    assert not new, new


def killed_at(root: Path, number: int | None, act: Callable[[PosixBackend], object]) -> list[str]:
    """Do something in a store, and die before that many file calls; returns the calls made.

    Args:
        root: Of the store.
        number: Of calls; with none it goes to its end.
        act: Gets the store's backend.
    """
    files = KillableFiles(OsFileCalls())
    if number is not None:
        files.arm(number)
    with nothing_left():
        backend = None
        try:
            backend = PosixBackend(root, files=files)
            act(backend)
        except Killed:
            assert number is not None
        finally:
            files.disarm()
            if backend is not None:
                backend.close()
            files.abandon()
    return [call.call for call in files.calls]


def temporaries(root: Path) -> list[Path]:
    """Unfinished files of writers in a store."""
    return sorted((root / "tmp").iterdir())


def leftovers(target: Path) -> list[str]:
    """What a pull to `target` left beside it."""
    return sorted(
        path.name
        for path in target.parent.iterdir()
        if path.name.startswith(f".{target.name}.snapstore-")
    )


# -- dying ----------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Boundary:
    """A moment between two operations of a backend, the same in every run.

    Operations of several threads come in any order, but those of one verb and kind do not.
    """

    kind: str
    verb: Verb
    ordinal: int
    after: bool


class Crash:
    """Records all boundaries, and dies at one of them (`snapstore.backend.trace.TraceHook`)."""

    def __init__(self, at: Boundary | None = None) -> None:
        self.at = at
        self.boundaries: list[Boundary] = []
        self.dead = False
        self.put_bytes: dict[ObjectKind, list[int]] = {kind: [] for kind in ObjectKind}
        self._lock = threading.Lock()
        self._ordinals: dict[tuple[ObjectKind, Verb], int] = {}
        self._began: dict[int, int] = {}

    def before(self, operation: Operation) -> None:
        """See `TraceHook.before`."""
        with self._lock:
            if self.dead:
                raise Killed("dead already")
            key = operation.kind, operation.verb
            ordinal = self._ordinals[key] = self._ordinals.get(key, -1) + 1
            self._began[operation.number] = ordinal
            self._pass(Boundary(operation.kind.value, operation.verb, ordinal, after=False))
            if operation.verb == "put_new":
                # Counted as soon as it begins: bytes may be on their way when it dies.
                self.put_bytes[operation.kind].append(operation.size_bytes)

    def after(self, operation: Operation, error: BaseException | None) -> None:
        """See `TraceHook.after`."""
        with self._lock:
            ordinal = self._began.get(operation.number)
            if ordinal is None or isinstance(error, Killed):
                return
            self._pass(Boundary(operation.kind.value, operation.verb, ordinal, after=True))

    def _pass(self, boundary: Boundary) -> None:
        self.boundaries.append(boundary)
        if boundary == self.at:
            self.dead = True
            raise Killed(str(boundary))


class Meanwhile:
    """Does something else at one boundary (`snapstore.backend.trace.TraceHook`)."""

    def __init__(self, at: Boundary, act: Callable[[], object]) -> None:
        self._crash = Crash(at)
        self._act = act
        self.has_acted = False

    def before(self, operation: Operation) -> None:
        """See `TraceHook.before`."""
        self._unless(lambda: self._crash.before(operation))

    def after(self, operation: Operation, error: BaseException | None) -> None:
        """See `TraceHook.after`."""
        self._unless(lambda: self._crash.after(operation, error))

    def _unless(self, look: Callable[[], None]) -> None:
        if self.has_acted:
            return
        try:
            look()
        except Killed:
            self.has_acted = True
            self._act()


def open_on(
    backend: Backend, root: Path, options: StoreOptions, *, clock: Clock | None = None
) -> Store:
    """Open a store through a backend of the test's own."""
    config = decode_config((root / "snapstore.json").read_bytes())
    return Store(backend, config, options, clock or SystemClock())


def open_traced(root: Path, options: StoreOptions, hook: TraceHook) -> Store:
    """Open a store whose backend is watched by a hook."""
    backend = TracingBackend(PosixBackend(root), clock=SystemClock(), hook=hook)
    return open_on(backend, root, options)


# -- the program ----------------------------------------------------------------------------------


def program(*arguments: str | Path, memory_bytes: int | None = None) -> list[str]:
    """The command line of the real program, which may be given a limit of address space."""
    start = "from snapstore.cli.main import run; run()"
    if memory_bytes is not None:
        limit = f"resource.setrlimit(resource.RLIMIT_AS, ({memory_bytes}, {memory_bytes}))"
        start = f"import resource; {limit}; {start}"
    return [sys.executable, "-c", start, *map(str, arguments)]


def run_program(
    *arguments: str | Path, memory_bytes: int | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the real program to its end."""
    return subprocess.run(  # noqa: S603
        program(*arguments, memory_bytes=memory_bytes),
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def ref_name(text: str) -> RefName:
    """A name without its exact snapshot."""
    return parse_snapshot_ref(text).ref
