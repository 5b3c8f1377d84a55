"""Letting several threads hand windows to the pipeline, which one thread of its own drives."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, Future
from typing import TYPE_CHECKING, Any, TypeVar

from snapstore.errors import Interrupted

if TYPE_CHECKING:
    from collections.abc import Callable

    from snapstore.repository.buffers import BufferPool
    from snapstore.repository.hashed_chunks import Answer, HashedChunks
    from snapstore.repository.ingest import Ingest, IngestJob, IngestStream
    from snapstore.repository.loaded_pack import LoadedRun
    from snapstore.repository.memory import MemoryPlan
    from snapstore.repository.windows import ByteArray, Window

__all__ = ["WindowFeed"]

_Answer = TypeVar("_Answer")

_RENEW_S = 60.0
"""How often the lease is looked at while nothing arrives."""


class WindowFeed:
    """Takes windows in any order of streams, and of each stream in order. Thread-safe.

    What goes wrong in the pipeline is raised by the next call of whoever feeds it, and wakes those
    who wait for a buffer.
    """

    def __init__(
        self, ingest: Ingest, buffers: BufferPool, plan: MemoryPlan, *, renew: Callable[[], None]
    ) -> None:
        """Start the thread.

        Args:
            ingest: The pipeline; nobody else uses it until `finish` or `close` has returned.
            buffers: Of the pipeline.
            plan: How many windows may be filled, and how many there may be more for that.
            renew: Called now and then on the thread, also while nothing arrives.
        """
        self._ingest = ingest
        self._buffers = buffers
        self._plan = plan
        self._places = 0
        self._renew = renew
        self._lock = threading.Lock()
        self._inbox: list[IngestJob] = []
        self._questions: list[tuple[Callable[[], None], Future[Any]]] = []
        self._wake: Future[None] = Future()
        self._error: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name="snapstore-ingest", daemon=True)
        self._thread.start()

    def acquire(self) -> ByteArray:
        """Borrow a buffer for a window; blocks until the pipeline gives one back.

        Raises:
            SnapError: The pipeline failed or was stopped.
        """
        try:
            return self._buffers.acquire()
        except Interrupted:
            self.check()
            raise

    def take_place(self) -> bool:
        """Ask for the right to keep one buffer for as long as a file takes to fill it."""
        with self._lock:
            if self._places == self._plan.windows_filled:
                return False
            self._places += 1
            if self._places <= self._plan.windows_spare:
                self._buffers.widen()
            return True

    def leave_place(self) -> None:
        """Give this right back, after the buffer."""
        with self._lock:
            if self._places <= self._plan.windows_spare:
                self._buffers.narrow()
            self._places -= 1

    def give_back(self, buffer: ByteArray) -> None:
        """Return a buffer that was not submitted."""
        self._buffers.release(buffer)

    def submit(
        self, stream: IngestStream, window: Window, buffer: ByteArray, *, final: bool
    ) -> IngestJob:
        """Hand over the next window of a stream, and its buffer with it.

        Raises:
            SnapError: The pipeline failed or was stopped; the buffer is gone all the same.
        """
        with self._lock:
            self._raise_error()
            job = self._ingest.prepare(stream, window, buffer, final=final)
            self._inbox.append(job)
            self._wake_up()
            return job

    def ask(self, chunks: HashedChunks) -> Answer:
        """Ask the pipeline, on its thread, which chunks have to be loaded; waits for the answer.

        Raises:
            SnapError: The pipeline failed or was stopped.
        """
        return self._call(lambda: self._ingest.ask(chunks))

    def _call(self, question: Callable[[], _Answer]) -> _Answer:
        answer: Future[_Answer] = Future()

        def find() -> None:
            answer.set_result(question())

        with self._lock:
            self._raise_error()
            self._questions.append((find, answer))
            self._wake_up()
        try:
            return answer.result()
        except CancelledError:
            self.check()
            raise

    @property
    def stores_hashed(self) -> bool:
        """See `Ingest.stores_hashed`."""
        return self._ingest.stores_hashed

    @property
    def hashed_rows(self) -> int:
        """See `Ingest.hashed_rows`."""
        return self._ingest.hashed_rows

    def store_hashed(
        self, stream: IngestStream, chunks: HashedChunks, run: LoadedRun, base: int
    ) -> list[Future[Any]]:
        """Let the pipeline store chunks, on its thread; see `Ingest.store_hashed`.

        Raises:
            SnapError: The pipeline failed or was stopped.
        """
        return self._call(lambda: self._ingest.store_hashed(stream, chunks, run, base))

    def end_hashed(self, run: LoadedRun) -> list[Future[Any]]:
        """Let the pipeline begin to load what still waits; see `Ingest.end_hashed`.

        Raises:
            SnapError: The pipeline failed or was stopped.
        """
        return self._call(lambda: self._ingest.end_hashed(run))

    def check(self) -> None:
        """Raise what went wrong, if anything did."""
        with self._lock:
            self._raise_error()

    def finish(self) -> None:
        """Wait until all windows went through; nothing may be submitted any more.

        Raises:
            SnapError: The pipeline failed or was stopped.
        """
        with self._lock:
            self._ended = True
            self._wake_up()
        self._thread.join()
        self.check()
        self._buffers.trim()

    def stop(self, error: BaseException) -> None:
        """End the thread soon, and let everybody who feeds it fail with the first such error.

        Does not wait for it.
        """
        with self._lock:
            self._error = self._error or error
            questions, self._questions = self._questions, []
            self._wake_up()
        for _, answer in questions:
            answer.cancel()
        self._buffers.close()

    def close(self) -> None:
        """End the thread if it still runs, and wait for it. Idempotent."""
        self.stop(Interrupted("the snapshot is not written any more"))
        self._thread.join()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _wake_up(self) -> None:
        if not self._wake.done():
            self._wake.set_result(None)

    def _run(self) -> None:
        try:
            while self._step():
                pass
        except BaseException as error:  # noqa: BLE001 - told to whoever feeds, on their threads
            self.stop(error)

    def _step(self) -> bool:
        """Take what has come and do one step of the pipeline; says whether to go on."""
        with self._lock:
            if self._error is not None:
                return False
            jobs, self._inbox = self._inbox, []
            questions, self._questions = self._questions, []
            ended = self._ended
            if self._wake.done() and not ended:
                self._wake = Future()
            wake = self._wake
        for job in jobs:
            self._ingest.accept(job)
        self._answer(questions)
        if self._ingest.is_idle and ended:
            return False
        # When all has been handed over, there is nothing but the pipeline to wait for.
        self._ingest.advance(None if ended else wake, timeout_s=_RENEW_S)
        self._renew()
        return True

    def _answer(self, questions: list[tuple[Callable[[], None], Future[Any]]]) -> None:
        for number, (find, _) in enumerate(questions):
            try:
                find()
            except BaseException as error:
                # Before anybody is woken, who then is to be told why.
                self.stop(error)
                for _, unanswered in questions[number:]:
                    unanswered.cancel()
                raise
