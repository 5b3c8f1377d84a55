"""A small process that reads images for a restore: the other end of `readers`.

It has its end of a channel with the agent, and memory that both share. It opens what it is told to
and reads what it is asked for into the buffer, decoded and checked as the agent itself would.
What it cannot do at once it leaves to the agent, which has the patience and tells the reason: so
errors are not reported here. It ends when the channel does.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import snapstore
from snapagent.linux import processes
from snapagent.linux.packets import Channel

if TYPE_CHECKING:
    from snapagent.linux.packets import Packet
    from snapstore import Snapshot, SnapshotFile, Store

__all__ = ["Reader", "Source", "main"]

_MEMORY_BYTES = 192 << 20
"""The least that a store may have. Reading in place needs none of it."""


class Source(NamedTuple):
    """A snapshot, and how the agent reads it.

    Attributes:
        url: Of the store.
        name: Of exactly this snapshot.
        integrity: What is checked.
        node_cache: Directory of the node's cache; empty without.
    """

    url: str
    name: str
    integrity: str
    node_cache: str

    @classmethod
    def of(cls, packet: Packet) -> Source:
        """Take it out of a message."""
        return cls(*(packet.text(field) for field in cls._fields))


class _Opened:
    """A snapshot and those of its files that were asked for."""

    def __init__(self, source: Source) -> None:
        options = snapstore.StoreOptions(
            memory_bytes=_MEMORY_BYTES,
            threads=1,
            cache_bytes=0,
            integrity=snapstore.Integrity(source.integrity),
            node_cache=Path(source.node_cache) if source.node_cache else None,
            patience_s=0,
        )
        self._store: Store = snapstore.open_store(source.url, options)
        try:
            self._snapshot: Snapshot = self._store.snapshot(source.name)
        except BaseException:
            self._store.close()
            raise
        self._files: dict[str, SnapshotFile] = {}

    def file(self, path: str) -> SnapshotFile:
        """Open a file, or return it if that was done."""
        if path not in self._files:
            self._files[path] = self._snapshot.open(os.fsencode(path))
        return self._files[path]

    def close(self) -> None:
        """Close everything."""
        for file in self._files.values():
            file.close()
        self._store.close()


class Reader:
    """What the process does."""

    def __init__(self, channel: Channel, buffer: memoryview) -> None:
        self._channel = channel
        self._buffer = buffer
        self._opened: dict[Source, _Opened] = {}

    def run(self) -> None:
        """Read until nobody asks any more."""
        while (packet := self._channel.receive()) is not None:
            if packet.kind == "read":
                self._channel.send("read" if self._read(packet) else "failed", {})
            elif packet.kind == "open":
                self._open(packet)
            elif packet.kind == "forget":
                opened = self._opened.pop(Source.of(packet), None)
                if opened is not None:
                    opened.close()

    def _file(self, packet: Packet) -> SnapshotFile:
        source = Source.of(packet)
        if source not in self._opened:
            self._opened[source] = _Opened(source)
        return self._opened[source].file(packet.text("path"))

    def _open(self, packet: Packet) -> None:
        """Open a file, with the tables that reading it needs.

        Not into the buffer: somebody else may still copy from that.
        """
        with contextlib.suppress(snapstore.SnapError):
            file = self._file(packet)
            file.read_into(0, bytearray(min(1, file.size_bytes)))

    def _read(self, packet: Packet) -> bool:
        offset, length = packet.number("offset"), packet.number("length")
        try:
            self._file(packet).read_into(offset, self._buffer[:length], streaming=True)
        except snapstore.SnapError:
            return False
        return True


def main(fd: int, buffer_fd: int) -> None:
    """Do it."""
    processes.allow_many_files()
    processes.be_expendable()
    processes.forbid_inspection()
    processes.name_process("snapagent-read", "snapagent: reads memory for restores")
    channel = Channel(socket.socket(fileno=fd))
    buffer = mmap.mmap(buffer_fd, os.fstat(buffer_fd).st_size)
    # The agent is gone, which is as good as the end of the channel.
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        Reader(channel, memoryview(buffer)).run()
