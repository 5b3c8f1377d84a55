"""Hours of several clients on one store in bad weather, and what has to be true all the while.

Clients push, pull and list in simulated time over a store in memory whose operations fail, lose
replies, die, stall and show old listings (`weather`). While one client is in the middle of an
operation others begin and end theirs, so that any two can meet anywhere. The promises are those of
`format_spec/SEMANTICS.md`: what a push has reported is there, nothing else is ever visible, and
what was sent is found again.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import os
import random
import shutil
import stat
import threading
from typing import TYPE_CHECKING

from typing_extensions import override

from snapstore.backend.base import ObjectKind
from snapstore.backend.memory import MemoryBackend, MemoryObjects
from snapstore.backend.retry import RetryingBackend
from snapstore.errors import RefNotFound, SnapError, TransientBackendError
from snapstore.format.config import StoreConfig
from snapstore.options import StoreOptions
from snapstore.repository.store import Store
from snapstore.testing.clock import ManualClock
from snapstore.testing.faults import Killed
from snapstore.testing.weather import Climate, Forecast, StormyBackend
from snapstore.units import KIB

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from snapstore.ids import SnapshotId

__all__ = ["PromiseBroken", "Report", "Simulation"]

_CONFIG = StoreConfig(created="2026-11-30T05:00:00Z", store_id="0" * 32)
_OPTIONS = StoreOptions(threads=1)
_CLIENTS = 4
_NAMES = ("team/a:v1", "team/a:latest", "team/b/c:v1")
_TREES = 8
_FILES = 14
_IDLE_S_MEAN = 20.0
_DEPTH_MAX = 2
_MEANWHILE_SHARE = 0.01
_SETTLE_S = 600.0
"""After which retries of an operation that began before are over, and so is any old listing."""


class PromiseBroken(AssertionError):
    """The store did what it promises never to do."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Done:
    """A push that has reported success."""

    name: str
    tree: int
    snapshot: SnapshotId
    generation: int
    at_s: float


@dataclasses.dataclass(slots=True)
class Report:
    """What happened: how many of what, and bytes of packs that were sent."""

    seed: int | str
    simulated_s: float = 0.0
    events: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    pack_bytes: int = 0

    @override
    def __str__(self) -> str:
        events = ", ".join(f"{count} {what}" for what, count in sorted(self.events.items()))
        hours = self.simulated_s / 3600
        return f"seed {self.seed}: {hours:.1f} h, {events}, {self.pack_bytes} bytes of packs"


class Simulation:
    """One world: a store, its clients, their trees, and what they know to be true.

    Args:
        seed: Decides everything that is drawn. How the threads of one push are scheduled is not,
            so two runs of a seed may differ in which of two operations comes first.
        folder: For trees; must exist and be empty.
        hours: Simulated time.
        climate: How bad it is.
    """

    def __init__(
        self, seed: int | str, folder: Path, *, hours: float, climate: Climate | None = None
    ) -> None:
        self.report = Report(seed)
        self._rng = random.Random(f"{seed}/world")
        self._folder = folder
        self._clock = ManualClock()
        self._end_s = hours * 3600
        self._climate = climate or Climate()
        self._forecast = Forecast(seed, self._climate, start_s=0, hours=hours)
        self._objects = MemoryObjects()
        self._calm = Store(self._inner(), _CONFIG, _OPTIONS, self._clock)
        self._lives = collections.Counter[int]()
        self._busy: set[int] = set()
        self._depths = [threading.Lock() for _ in range(_DEPTH_MAX)]
        self._state = threading.Lock()
        self._done: list[_Done] = []
        self._tried: dict[str, set[int]] = collections.defaultdict(set)
        self._seen: dict[SnapshotId, str] = {}
        self._folders = 0
        self._trees = _make_trees(folder / "trees", random.Random(f"{seed}/trees"))
        self._fingerprints = [fingerprint(tree) for tree in self._trees]

    def run(self) -> Report:
        """Live through all of it.

        Raises:
            PromiseBroken: A promise of the store was broken.
        """
        while self._clock.monotonic_s() < self._end_s:
            self._act(self._rng, depth=0)
            self._check_visible()
            self._clock.advance_s(self._rng.expovariate(1 / _IDLE_S_MEAN))
        self._check_everything()
        self.report.simulated_s = self._clock.monotonic_s()
        return self.report

    # -- clients

    def _act(self, rng: random.Random, *, depth: int) -> None:
        """Let a client that is not in the middle of something do something."""
        with self._state:
            idle = [client for client in range(_CLIENTS) if client not in self._busy]
            if not idle:
                return
            client = rng.choice(idle)
            self._busy.add(client)
        action = rng.choices((self._push, self._pull, self._list), (5, 4, 2))[0]
        name = rng.choice(_NAMES)
        try:
            with self._store(client, depth) as (store, backend):
                action(store, backend, name, rng)
        finally:
            with self._state:
                self._busy.discard(client)

    @contextlib.contextmanager
    def _store(self, client: int, depth: int) -> Iterator[tuple[Store, StormyBackend]]:
        """Start a client's program; that it dies or gives up is in the report."""

        def meanwhile(rng: random.Random) -> None:
            # Nobody waits here: the one who is acting may be in the middle of what we would need.
            if depth == _DEPTH_MAX or rng.random() >= _MEANWHILE_SHARE:
                return
            if self._depths[depth].acquire(blocking=False):
                try:
                    self._act(rng, depth=depth + 1)
                finally:
                    self._depths[depth].release()

        with self._state:
            self._lives[client] += 1
            life = f"{client}.{self._lives[client]}"
        backend = StormyBackend(
            self._inner(), life, self._forecast, self._clock, meanwhile=meanwhile
        )
        patient = RetryingBackend(backend, rng=self._forecast.rng(life), clock=self._clock)
        try:
            with Store(patient, _CONFIG, _OPTIONS, self._clock) as store:
                yield store, backend
        except Killed:
            self._count("killed")
        except TransientBackendError:
            self._count("gave up")
        except SnapError as error:
            raise PromiseBroken(f"client {life}: {error.code}: {error}") from error
        finally:
            with self._state:
                self.report.events += backend.events
                self.report.pack_bytes += backend.put_bytes[ObjectKind.PACK]

    def _push(self, store: Store, backend: StormyBackend, name: str, rng: random.Random) -> None:
        tree = rng.randrange(_TREES)
        with self._state:
            self._tried[name].add(tree)
            began_s = self._clock.monotonic_s()
            unsettled = self._unsettled_bytes(tree, began_s)
        try:
            pushed = store.push(self._trees[tree], name)
        finally:
            # Locality may store as much again as is new.
            sent, allowed = backend.put_bytes[ObjectKind.PACK], 2 * unsettled
            attempts = 1 + backend.events["lost reply"] + backend.events["outage"]
            if sent > (allowed + 64 * KIB * bool(allowed)) * attempts:
                raise PromiseBroken(f"{name}: sent {sent} bytes where {allowed} are new")
        self._count("pushes")
        done = _Done(name, tree, pushed.snapshot, pushed.generation, self._clock.monotonic_s())
        with self._state:
            for other in self._done:
                if (other.name, other.generation) == (name, pushed.generation):
                    raise PromiseBroken(f"{name}: generation {pushed.generation} reported twice")
            self._done.append(done)

    def _pull(self, store: Store, _: StormyBackend, name: str, rng: random.Random) -> None:
        newest = self._newest(name)
        with self._new_folder() as target:
            try:
                pulled = store.pull(name, target)
            except RefNotFound:
                if newest is not None:
                    raise
                return
            except BaseException:
                if target.exists():
                    raise PromiseBroken(f"{name}: part of it has the final name") from None
                raise
            self._count("pulls")
            self._check_tree(name, pulled.snapshot, target)
        exact = rng.choice(self._done).snapshot if self._done else None
        if exact is not None:
            store.snapshot(f"any@b3:{exact.hex}")

    def _list(self, store: Store, _: StormyBackend, __: str, ___: random.Random) -> None:
        settled_s = self._clock.monotonic_s() - self._climate.stale_s_max
        with self._state:
            known = {done.name for done in self._done if done.at_s < settled_s}
            newest = {name: self._newest_of(name) for name in _NAMES}
        found = {str(one.name): one for one in store.list("team/")}
        self._count("listings")
        if missing := known - set(found):
            raise PromiseBroken(f"not listed: {missing}")
        for name, one in found.items():
            least = newest[name]
            if least is not None and one.generation < least.generation:
                raise PromiseBroken(f"{name}: listed at {one.generation}, {least} was reported")

    # -- what must be true

    def _check_visible(self) -> None:
        """Check that whatever a name points to is whole, and newer than what was reported."""
        for found in self._calm.list():
            name = str(found.name)
            newest = self._newest(name)
            if newest is not None:
                if found.generation < newest.generation:
                    raise PromiseBroken(f"{name} went back from {newest} to {found.generation}")
                is_other = found.snapshot != newest.snapshot
                if found.generation == newest.generation and is_other:
                    raise PromiseBroken(f"{name} is {found}, {newest} was reported")
            if found.snapshot not in self._seen:
                with self._new_folder() as target:
                    self._pull_calmly(found.snapshot, target)
                    self._check_tree(name, found.snapshot, target)

    def _check_everything(self) -> None:
        """Pull every snapshot that a push has reported, and look whether it is the right tree."""
        self._check_visible()
        for done in {one.snapshot: one for one in self._done}.values():
            with self._new_folder() as target:
                self._pull_calmly(done.snapshot, target)
                if fingerprint(target) != self._fingerprints[done.tree]:
                    raise PromiseBroken(f"{done} is another tree now")

    def _pull_calmly(self, snapshot: SnapshotId, target: Path) -> None:
        """Pull without any weather: what is visible is whole."""
        try:
            self._calm.pull(f"x@b3:{snapshot.hex}", target)
        except SnapError as error:
            raise PromiseBroken(f"snapshot {snapshot.short}: {error.code}: {error}") from error

    def _check_tree(self, name: str, snapshot: SnapshotId, target: Path) -> None:
        """Check that a tree is one that somebody pushed to that name, or the one known to be."""
        found = fingerprint(target)
        with self._state:
            allowed = {self._fingerprints[tree] for tree in self._tried[name]}
            if found not in allowed or self._seen.setdefault(snapshot, found) != found:
                raise PromiseBroken(f"{name}, snapshot {snapshot.short}: a tree nobody has pushed")

    def _newest(self, name: str) -> _Done | None:
        with self._state:
            return self._newest_of(name)

    def _newest_of(self, name: str) -> _Done | None:
        mine = [done for done in self._done if done.name == name]
        return max(mine, key=lambda done: done.generation, default=None)

    def _unsettled_bytes(self, tree: int, now_s: float) -> int:
        """Bytes of the files of a tree that no push has reported long enough ago."""
        settled: set[tuple[int, int]] = set()
        for done in self._done:
            if done.at_s < now_s - _SETTLE_S:
                settled |= _contents(self._trees[done.tree])
        return sum(size for size, _ in _contents(self._trees[tree]) - settled)

    # -- small things

    def _inner(self) -> MemoryBackend:
        return MemoryBackend(self._objects, clock=self._clock)

    def _count(self, what: str) -> None:
        with self._state:
            self.report.events[what] += 1

    @contextlib.contextmanager
    def _new_folder(self) -> Iterator[Path]:
        with self._state:
            self._folders += 1
            place = self._folder / f"pull-{self._folders}"
        place.mkdir()
        try:
            yield place / "tree"
        finally:
            shutil.rmtree(place)


def fingerprint(folder: Path) -> str:
    """One digest of everything that a pull has to bring back."""
    digest = hashlib.sha256()
    for path in [folder, *sorted(folder.rglob("*"))]:
        status = path.lstat()
        name = path.relative_to(folder).as_posix()
        digest.update(f"{name}\0{status.st_mode}\0{status.st_mtime_ns}\0".encode())
        if stat.S_ISLNK(status.st_mode):
            digest.update(os.fsencode(path.readlink()))
        elif stat.S_ISREG(status.st_mode):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def _contents(tree: Path) -> set[tuple[int, int]]:
    """What files a tree has, whatever their names: size and content, which its name tells."""
    files = [path for path in tree.rglob("*.bin") if path.is_file()]
    return {(path.stat().st_size, int(path.stem.rpartition("-")[2])) for path in files}


def _make_trees(folder: Path, rng: random.Random) -> list[Path]:
    """Make trees of ranks whose files are drawn from one set, so that they share some."""
    # Smaller ones share a stream with others, and then chunks too.
    contents = [rng.randbytes(rng.randrange(65 * KIB, 160 * KIB)) for _ in range(_FILES)]
    trees = []
    for number in range(_TREES):
        tree = folder / str(number)
        tree.mkdir(parents=True)
        for index in rng.sample(range(_FILES), rng.randint(2, 6)):
            place = tree / rng.choice(("rank-0", "rank-1", "."))
            place.mkdir(exist_ok=True)
            (place / f"file-{index}.bin").write_bytes(contents[index])
        # Whole pages: what is too short to be left out would be new in each tree.
        (tree / "zeros").write_bytes(bytes(256 * KIB))
        (tree / "link").symlink_to("zeros")
        for path in [*tree.rglob("*"), tree]:
            os.utime(path, ns=(10**18, 10**18 + number), follow_symlinks=False)
        trees.append(tree)
    return trees
