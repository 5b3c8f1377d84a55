"""The storing pipeline: windows of streams in, packs and manifest entries out.

Per window, *analyse*, *hash* and *encode* run on worker threads, whose library calls release the
GIL. What decides between them, *cut*, *plan* and *retire*, runs on one thread and in order, so that
the result does not depend on timing (I5 of `format_spec/SEMANTICS.md`). Where windows of several
streams come in turns, chunks and manifests still do not; in which frames they lie does.

Memory is a set of window buffers and packs: a window that finds no free buffer waits until an older
one is done, in a push by doing its next step.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import xxhash
from blake3 import blake3

from snapstore.chunking.base import Analysis, Cut, Cutter
from snapstore.chunking.grid import GridCutter
from snapstore.chunking.texture import textures
from snapstore.compression import EncodedFrame, encode_frame
from snapstore.errors import OutOfSpace
from snapstore.format import pack as pack_format
from snapstore.format.tables import U64, Rows, id_words
from snapstore.options import Compression
from snapstore.repository.catalog import MISSING, Catalog
from snapstore.repository.frame_plan import FramePlan, plan_frames, plan_raw_frames
from snapstore.repository.hashed_chunks import Answer, join_zeros
from snapstore.repository.layouts import ZERO_FRAME
from snapstore.repository.loaded_pack import LoadedFrame
from snapstore.repository.locality import Locality
from snapstore.repository.rank_builder import Pieces, RankBuilder
from snapstore.repository.windows import WINDOW_BYTES, ByteArray, StreamSource, Window
from snapstore.units import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapstore.repository.buffers import BufferPool
    from snapstore.repository.frames import FrameTable, Numbers
    from snapstore.repository.hashed_chunks import HashedChunks, HashedWindow
    from snapstore.repository.loaded_pack import LoadedRun
    from snapstore.repository.packer import Packer

__all__ = [
    "INGEST_BUFFER_BYTES",
    "Ingest",
    "IngestJob",
    "IngestStream",
    "IngestTotals",
    "window_data",
]

_WAITING_ROWS = 1024
"""Chunks that may have to wait for memory, and with them whatever others hand to the pipeline."""

_LOADED_ROWS = 16 * 1024
"""Chunks that only have to be decided about: that takes 20 ms, and less for each if there are many
at a time."""

_CARRY_BYTES = 1 * MIB
INGEST_BUFFER_BYTES = WINDOW_BYTES + _CARRY_BYTES

_EncodeResult = tuple[EncodedFrame, bytes]


@dataclasses.dataclass(slots=True)
class IngestTotals:
    """What went through so far; bytes are of the streams, before any codec."""

    logical_bytes: int = 0
    zero_bytes: int = 0
    new_bytes: int = 0
    new_chunks: int = 0
    known_bytes: int = 0
    known_chunks: int = 0
    rewritten_bytes: int = 0


@dataclasses.dataclass(slots=True)
class IngestStream:
    """One stream on its way: where it goes, and what one window leaves to the next.

    Attributes:
        cutter: How it is cut.
        builder: Of the rank that it belongs to.
        number: Its number there.
        finish: Called when all of it went through.
        carried: Bytes of a chunk that is not finished.
    """

    cutter: Cutter
    builder: RankBuilder
    number: int
    finish: Callable[[], None] | None = None
    carried: ByteArray = dataclasses.field(default_factory=lambda: np.empty(0, np.uint8))


@dataclasses.dataclass(slots=True)
class IngestJob:
    """One window on its way through the pipeline."""

    stream: IngestStream
    window: Window
    final: bool
    buffer: ByteArray
    """Empty if nothing of the window has to be loaded."""
    analysis: Future[Analysis]
    cut: Cut | None = None
    hashing: Future[Rows] | None = None
    encoding: list[tuple[int, FramePlan, Future[_EncodeResult]]] = dataclasses.field(
        default_factory=list
    )

    @property
    def data(self) -> ByteArray:
        """The window's own bytes; those carried over lie right before them."""
        return self.buffer[_CARRY_BYTES : _CARRY_BYTES + self.window.length]


def window_data(buffer: ByteArray) -> ByteArray:
    """Where in a buffer of `INGEST_BUFFER_BYTES` the bytes of a window go."""
    return buffer[_CARRY_BYTES:]


class Ingest:
    """Stores windows of streams; those of one stream in order. Used by one thread.

    A push hands over whole streams with `store`. Where windows arrive from several threads, each
    *prepares* its own, and the one thread *accepts* them and *advances* all.

    A stream's entries are complete when `drain` or a later stream's `drain` has returned.
    """

    def __init__(
        self,
        *,
        frames: FrameTable,
        catalog: Catalog,
        packer: Packer,
        executor: ThreadPoolExecutor,
        buffers: BufferPool,
        compression: Compression,
        progress: Callable[[int], None],
    ) -> None:
        """Prepare; `progress` is told the bytes of each window that is done."""
        self._frames = frames
        self._catalog = catalog
        self._packer = packer
        self._executor = executor
        self._compression = compression
        self._progress = progress
        self._locality = Locality(frames)
        self._buffers = buffers
        self._analysing: collections.deque[IngestJob] = collections.deque()
        self._hashing: collections.deque[IngestJob] = collections.deque()
        self._encoding: collections.deque[IngestJob] = collections.deque()
        self.totals = IngestTotals()

    def store(self, source: StreamSource, builder: RankBuilder, number: int) -> None:
        """Store one stream; returns when all of it was read, not when all of it is stored."""
        stream = IngestStream(source.cutter, builder, number, source.finish)
        held: Window | None = None
        for window in source.windows():
            if held is not None:
                self._submit(stream, held, final=False)
            held = window
        if held is not None:
            self._submit(stream, held, final=True)

    def drain(self) -> None:
        """Finish all windows that are under way."""
        while not self.is_idle:
            self.advance()
        self._buffers.trim()

    @property
    def is_idle(self) -> bool:
        """Whether no window is under way."""
        return not (self._analysing or self._hashing or self._encoding)

    def prepare(
        self, stream: IngestStream, window: Window, buffer: ByteArray, *, final: bool
    ) -> IngestJob:
        """Begin to look at a window, in a buffer of the pool. On any thread."""
        data = buffer[_CARRY_BYTES : _CARRY_BYTES + window.length]
        analysis: Future[Analysis]
        if window.hashed is not None and not window.hashed.spans:
            analysis = Future()
            analysis.set_result(_plain(window.length))
        else:
            analysis = self._executor.submit(_analyse, stream.cutter, window, data)
        return IngestJob(stream, window, final, buffer, analysis)

    def ask(self, chunks: HashedChunks) -> Answer:
        """Find out which chunks that were hashed elsewhere have to be loaded."""
        data = ~chunks.zeros
        words = id_words(np.ascontiguousarray(chunks.ids[data]).view("V32").reshape(-1))
        lengths = chunks.lengths[data]
        places = self._catalog.lookup(words)
        known = (places.frames != MISSING) & (places.lengths == lengths)
        again = self._store_again(known, places.frames, lengths)
        known &= ~again
        first = _first_occurrences(words) == np.arange(len(words))
        return Answer(known, places.frames, places.offsets, ~known & first, again)

    @property
    def stores_hashed(self) -> bool:
        """Whether `store_hashed` can be used: nothing is coded, and there are threads for it."""
        return self._compression is Compression.NONE and self._packer.can_fill

    @property
    def hashed_rows(self) -> int:
        """How many chunks are worth handing to `store_hashed` at a time."""
        return _LOADED_ROWS if self._packer.loads_packs else _WAITING_ROWS

    def store_hashed(
        self, stream: IngestStream, chunks: HashedChunks, run: LoadedRun, base: int
    ) -> list[Future[Any]]:
        """Store chunks that were hashed elsewhere, straight into packs.

        What the store lacks of them is loaded by other threads. No window of the stream may be
        under way.

        Args:
            stream: Which they belong to.
            chunks: What follows in it.
            run: Of the call that stores them; `end_hashed` ends it.
            base: Where in the file the first of them begins.

        Returns:
            Each done when something was loaded; of this and `end_hashed`, when all was.
        """
        answer = self.ask(chunks)
        data = ~chunks.zeros
        ends = np.cumsum(chunks.lengths)
        starts, stops, lengths = (ends - chunks.lengths)[data], ends[data], chunks.lengths[data]
        ids = np.ascontiguousarray(chunks.ids[data]).view("V32").reshape(-1)
        words = id_words(ids)
        frames, offsets = answer.frames.copy(), answer.offsets.copy()
        fresh = np.flatnonzero(answer.needed)
        run.skip(int(chunks.lengths.sum() - lengths[fresh].sum()))
        loading: list[Future[Any]] = []
        if len(fresh):
            planned, frames[fresh], offsets[fresh] = self._plan_loaded(
                base + starts[fresh], base + stops[fresh], ids[fresh]
            )
            loading = self._packer.append_loaded(run, planned)
        self._catalog.add(
            words[fresh],
            frames[fresh],
            offsets[fresh].astype(np.uint32),
            lengths[fresh].astype(np.uint32),
        )
        repeated = np.flatnonzero(~answer.known & ~answer.needed)
        first = _first_occurrences(words)[repeated]
        frames[repeated], offsets[repeated] = frames[first], offsets[first]
        cut = join_zeros(ends - chunks.lengths, ends, chunks.zeros)
        self._count(lengths, fresh)
        self.totals.rewritten_bytes += int(lengths[answer.again & answer.needed].sum())
        self.totals.logical_bytes += int(chunks.lengths.sum())
        self.totals.zero_bytes += int(chunks.lengths[chunks.zeros].sum())
        stream.builder.add_pieces(stream.number, _pieces(cut, ~cut.zero, ids, frames, offsets))
        self._progress(int(chunks.lengths.sum()))
        return loading

    def _plan_loaded(
        self,
        starts: Numbers,
        ends: Numbers,
        ids: Rows,
    ) -> tuple[list[LoadedFrame], Numbers, Numbers]:
        """Reserve frames for new chunks that lie at these places of a file.

        Returns:
            The frames, and of each chunk the number of its frame and where in it it is.
        """
        plan = plan_raw_frames(starts, ends)
        counts = np.diff(plan.firsts, append=len(starts))
        lengths = ends - starts
        before = np.cumsum(lengths) - lengths
        sizes = np.add.reduceat(lengths, plan.firsts)
        first = self._frames.reserve_frames(sizes.astype(np.uint32))
        rows = np.zeros(len(starts), pack_format.CHUNK_DTYPE)
        rows["id"], rows["length"] = ids, lengths
        begins, stops = plan.firsts.tolist(), (plan.firsts + counts).tolist()
        frames = [
            LoadedFrame(number, spans, size, rows[begin:stop])
            for number, (spans, size, begin, stop) in enumerate(
                zip(plan.spans, sizes.tolist(), begins, stops, strict=True), first
            )
        ]
        numbers = np.repeat(np.arange(first, first + len(frames)), counts)
        return frames, numbers, before - np.repeat(before[plan.firsts], counts)

    def end_hashed(self, run: LoadedRun) -> list[Future[Any]]:
        """Let all be loaded that `store_hashed` let wait; see there."""
        return self._packer.end_loaded(run)

    def accept(self, job: IngestJob) -> None:
        """Take a window that was prepared; its buffer goes back to the pool when it is done."""
        self._analysing.append(job)

    def _submit(self, stream: IngestStream, window: Window, *, final: bool) -> None:
        while (buffer := self._buffers.try_acquire()) is None:
            self.advance()
        self.accept(self.prepare(stream, window, buffer, final=final))

    def advance(self, wake: Future[None] | None = None, *, timeout_s: float | None = None) -> None:
        """Do the next step of a window that is ready, the furthest first; wait if none is.

        Args:
            wake: Ends the wait when it is done.
            timeout_s: Ends it as well.
        """
        heads: list[Future[Any]] = [] if wake is None else [wake]
        if self._encoding:
            pending = [step for _, _, step in self._encoding[0].encoding if not step.done()]
            if not pending:
                self._retire(self._encoding.popleft())
                return
            heads.append(pending[-1])
        if self._hashing:
            hashing = self._hashing[0].hashing
            assert hashing is not None, "a window in the second queue is being hashed"
            if hashing.done():
                self._plan(self._hashing.popleft(), hashing.result())
                return
            heads.append(hashing)
        if self._analysing:
            analysis = self._analysing[0].analysis
            if analysis.done():
                self._cut(self._analysing.popleft(), analysis.result())
                return
            heads.append(analysis)
        wait(heads, timeout=timeout_s, return_when=FIRST_COMPLETED)

    def _cut(self, job: IngestJob, analysis: Analysis) -> None:
        stream = job.stream
        if job.window.hashed is not None:
            job.cut = job.window.hashed.cut
            job.hashing = Future()
            job.hashing.set_result(job.window.hashed.ids)
            self._hashing.append(job)
            return
        carried = len(stream.carried)
        job.buffer[_CARRY_BYTES - carried : _CARRY_BYTES] = stream.carried
        if job.window.ends is not None:
            cut = _fixed_cut(job.window.ends)
        else:
            cut = stream.cutter.cut(analysis, carried=carried, final=job.final)
        # Of a short window, what was carried into it may go on with it.
        end = _CARRY_BYTES + job.window.length
        stream.carried = job.buffer[end - cut.carried : end].copy()
        job.cut = cut
        chunks = ~cut.zero
        job.hashing = self._executor.submit(
            _hash_chunks, job.buffer, cut.starts[chunks], cut.ends[chunks]
        )
        self._hashing.append(job)

    def _plan(self, job: IngestJob, ids: Rows) -> None:
        """Decide what is new, give frames to it, and tell the manifest where everything is."""
        cut = job.cut
        assert cut is not None, "cut before planned"
        chunk = ~cut.zero
        starts, ends = cut.starts[chunk], cut.ends[chunk]
        lengths = ends - starts
        words = id_words(ids)
        first = _first_occurrences(words)
        answer = self._answer(job.window.hashed, words, lengths)
        frames, offsets, again = answer.frames, answer.offsets, answer.again
        new = ~answer.known
        self.totals.rewritten_bytes += int(lengths[again].sum())
        fresh = np.flatnonzero(new & (first == np.arange(len(first))))
        # Only of what is new: for known chunks nobody asks.
        pitch_bytes = job.stream.cutter.texture_pitch_bytes
        if self._compression is Compression.NONE and isinstance(job.stream.cutter, GridCutter):
            # Read as a whole and never page by page, so the longest frames are the best.
            found = np.zeros(len(fresh), np.uint8)
        else:
            found = textures(job.data, starts[fresh], ends[fresh], pitch_bytes=pitch_bytes)
        plans = plan_frames(fresh, starts, ends, found)
        self._number_frames(plans, frames, offsets, lengths, job)
        self._catalog.add(
            words[fresh],
            frames[fresh],
            offsets[fresh].astype(np.uint32),
            lengths[fresh].astype(np.uint32),
        )
        repeated = np.flatnonzero(new & (first != np.arange(len(first))))
        frames[repeated], offsets[repeated] = frames[first[repeated]], offsets[first[repeated]]
        self._count(lengths, fresh)
        job.stream.builder.add_pieces(job.stream.number, _pieces(cut, chunk, ids, frames, offsets))
        self._encoding.append(job)

    def _answer(self, hashed: HashedWindow | None, words: U64, lengths: Numbers) -> Answer:
        """Say what is known of the chunks of a window, now that its turn has come."""
        if hashed is None:
            places = self._catalog.lookup(words)
            known = (places.frames != MISSING) & (places.lengths == lengths)
            again = self._store_again(known, places.frames, lengths)
            known &= ~again
            return Answer(known, places.frames, places.offsets, ~known, again)
        # What was known when it was asked for still is; of the rest some may have come since.
        told = hashed.answer
        known, frames, offsets = told.known.copy(), told.frames.copy(), told.offsets.copy()
        # Only what was loaded can be stored again; another of the same may stay where it is.
        again = told.again & told.needed
        open_rows = np.flatnonzero(~known & ~again)
        places = self._catalog.lookup(words[open_rows])
        found = (places.frames != MISSING) & (places.lengths == lengths[open_rows])
        rows = open_rows[found]
        known[rows], frames[rows] = True, places.frames[found]
        offsets[rows] = places.offsets[found]
        absent = np.flatnonzero(~known & ~told.needed)
        if len(absent) and not np.isin(words[absent, 0], words[told.needed, 0]).all():
            raise OutOfSpace(
                "what was stored a moment ago cannot be found: a temporary file was not written",
                next_step="make room where temporary files go, and start over",
            )
        return Answer(known, frames, offsets, told.needed, again)

    def _store_again(
        self, known: npt.NDArray[np.bool_], frames: Numbers, lengths: Numbers
    ) -> npt.NDArray[np.bool_]:
        again = np.zeros(len(known), np.bool_)
        new_bytes = int(lengths[~known].sum())
        again[known] = self._locality.rejected(frames[known], lengths[known], new_bytes)
        return again

    def _number_frames(
        self,
        plans: list[FramePlan],
        frames: Numbers,
        offsets: Numbers,
        lengths: Numbers,
        job: IngestJob,
    ) -> None:
        """Reserve frames, say where each chunk will be, and start encoding."""
        if not plans:
            return
        number = self._frames.reserve_frames(np.array([plan.length for plan in plans], np.uint32))
        for plan in plans:
            frames[plan.rows] = number
            sizes = lengths[plan.rows]
            offsets[plan.rows] = np.cumsum(sizes) - sizes
            future = self._executor.submit(_encode, job.buffer, plan, self._compression)
            job.encoding.append((number, plan, future))
            number += 1

    def _count(self, lengths: Numbers, fresh: npt.NDArray[np.int64]) -> None:
        new_bytes = int(lengths[fresh].sum())
        self.totals.new_bytes += new_bytes
        self.totals.new_chunks += len(fresh)
        self.totals.known_bytes += int(lengths.sum()) - new_bytes
        self.totals.known_chunks += len(lengths) - len(fresh)

    def _retire(self, job: IngestJob) -> None:
        """Hand encoded frames to the packer in order and give the buffer back."""
        cut, hashing = job.cut, job.hashing
        assert cut is not None, "cut before retired"
        assert hashing is not None, "hashed before retired"
        ids = hashing.result()
        lengths = (cut.ends - cut.starts)[~cut.zero]
        copies: list[Future[None]] = []
        for number, plan, encoding in job.encoding:
            frame, checksum = encoding.result()
            chunks = np.zeros(len(plan.rows), pack_format.CHUNK_DTYPE)
            chunks["id"], chunks["length"] = ids[plan.rows], lengths[plan.rows]
            copying = self._packer.append(number, frame, plan.length, checksum, chunks)
            if copying is not None:
                copies.append(copying)
        zero_bytes = int((cut.ends - cut.starts)[cut.zero].sum())
        self.totals.zero_bytes += zero_bytes
        self.totals.logical_bytes += int(lengths.sum()) + zero_bytes
        if len(job.buffer):
            _when_done(copies, functools.partial(self._buffers.release, job.buffer))
        self._progress(job.window.length)
        if job.final and job.stream.finish is not None:
            job.stream.finish()


def _when_done(copies: list[Future[None]], then: Callable[[], None]) -> None:
    """Call something once all of these are done, on whichever thread that is then."""
    left = iter(copies)

    def go_on(_: Future[None] | None = None) -> None:
        following = next(left, None)
        if following is None:
            then()
        else:
            following.add_done_callback(go_on)

    go_on()


def _analyse(cutter: Cutter, window: Window, data: ByteArray) -> Analysis:
    """Fill a window and look for cuts; on a worker."""
    if window.hashed is not None:
        window.hashed.fill(data)
        return _plain(len(data))
    if window.load is None:
        return _hole(window.length)
    window.load(data)
    if window.ends is not None:
        return _plain(len(data))
    return cutter.analyse(data, window.before)


def _plain(length: int) -> Analysis:
    """What is known of bytes that nobody has looked at."""
    return Analysis(
        length=length,
        zero_runs=np.empty((0, 2), np.int64),
        ends=np.empty(0, np.int64),
        strong=np.empty(0, np.bool_),
    )


def _hole(length: int) -> Analysis:
    runs = np.array([[0, length]] if length else np.empty((0, 2)), np.int64)
    return dataclasses.replace(_plain(length), zero_runs=runs)


def _fixed_cut(ends: Numbers) -> Cut:
    starts = np.concatenate((np.zeros(1, np.int64), ends[:-1]))
    return Cut(starts, ends, np.zeros(len(ends), np.bool_), 0)


def _hash_chunks(buffer: ByteArray, starts: Numbers, ends: Numbers) -> Rows:
    """Name the chunks of a window; on a worker."""
    view = buffer.data
    digests = b"".join(
        [
            blake3(view[start:end]).digest()
            for start, end in zip(
                (starts + _CARRY_BYTES).tolist(), (ends + _CARRY_BYTES).tolist(), strict=True
            )
        ]
    )
    return np.frombuffer(digests, "V32")


def _encode(buffer: ByteArray, plan: FramePlan, compression: Compression) -> _EncodeResult:
    """Gather and encode a frame and compute its checksum; on a worker."""
    parts = [buffer[_CARRY_BYTES + start : _CARRY_BYTES + end] for start, end in plan.spans]
    plain = parts[0] if len(parts) == 1 else np.concatenate(parts)
    frame = encode_frame(plain, plan.texture, plan.phase, compression)
    hasher = xxhash.xxh3_128()
    for piece in frame.pieces:
        hasher.update(piece)
    return frame, hasher.digest()


def _first_occurrences(words: U64) -> npt.NDArray[np.int64]:
    """For each chunk of a window the number of the first one with the same id."""
    order = np.argsort(words[:, 0], kind="stable")
    ordered = words[order]
    begins = np.ones(len(order), np.bool_)
    begins[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    group = np.maximum.accumulate(np.where(begins, np.arange(len(order)), 0))
    first = np.empty(len(order), np.int64)
    first[order] = order[group]
    return first


def _pieces(
    cut: Cut, chunk: npt.NDArray[np.bool_], ids: Rows, frames: Numbers, offsets: Numbers
) -> Pieces:
    count = len(cut.starts)
    all_ids = np.zeros(count, "V32")
    all_frames = np.full(count, ZERO_FRAME, np.int64)
    all_offsets = np.zeros(count, np.int64)
    all_ids[chunk], all_frames[chunk], all_offsets[chunk] = ids, frames, offsets
    return Pieces(cut.ends - cut.starts, all_ids, all_frames, all_offsets)
