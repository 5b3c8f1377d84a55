"""The stores that the daemon works with: opened once, kept with their caches and indexes."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING

import snapstore
from snapagent.errors import DaemonBusy
from snapstore.errors import UsageError
from snapstore.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from snapagent.config import Settings
    from snapstore import Store

__all__ = ["Stores", "options_of"]


def options_of(settings: Settings, integrity: str | None = None) -> snapstore.StoreOptions:
    """Return how stores are opened.

    Raises:
        UsageError: The settings do not go together.
    """
    return snapstore.StoreOptions(
        memory_bytes=parse_bytes(settings.memory),
        threads=settings.threads,
        cache_bytes=parse_bytes(settings.cache),
        integrity=snapstore.Integrity(integrity or settings.integrity),
        node_cache=settings.node_cache_directory,
    )


class _Open:
    """One store, or the place where it will be."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.store: Store | None = None
        self.users = 0


class Stores:
    """Open stores by URL and integrity. Thread-safe; blocks while one is opened."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._open: dict[tuple[str, str], _Open] = {}

    def url(self, asked: str | None) -> str:
        """Return the URL that a request means.

        Raises:
            UsageError: It names none, and there is no default.
        """
        url = asked or self._settings.store
        if not url:
            raise UsageError(
                "no store given", next_step="name one, or set `store` in the agent's configuration"
            )
        return url

    @property
    def urls(self) -> list[str]:
        """Those that are open."""
        with self._lock:
            return sorted({url for (url, _), one in self._open.items() if one.store is not None})

    @contextlib.contextmanager
    def use(self, url: str, integrity: str | None = None) -> Iterator[Store]:
        """Give a store that stays open at least as long as the block runs.

        Raises:
            LookupFailed: There is no store.
            BackendError: It cannot be reached.
            DaemonBusy: As many others as may be are in use.
        """
        one = self._take((url, integrity or self._settings.integrity))
        try:
            with one.lock:
                if one.store is None:
                    one.store = snapstore.open_store(url, options_of(self._settings, integrity))
            yield one.store
        finally:
            with self._lock:
                one.users -= 1

    def _take(self, key: tuple[str, str]) -> _Open:
        unused: _Open | None = None
        with self._lock:
            one = self._open.pop(key, None)
            if one is None:
                if len(self._open) >= self._settings.stores_open:
                    unused = self._drop()
                one = _Open()
            # The one used last is last, so that the first is dropped.
            self._open[key] = one
            one.users += 1
        if unused is not None and unused.store is not None:
            unused.store.close()
        return one

    def _drop(self) -> _Open:
        for key, one in self._open.items():
            if one.users == 0:
                return self._open.pop(key)
        raise DaemonBusy(
            f"{len(self._open)} stores are in use",
            next_step="wait, or raise stores_open in the agent's configuration",
        )

    def close(self) -> None:
        """Close those that nobody uses."""
        with self._lock:
            unused = [one for one in self._open.values() if one.users == 0]
            self._open.clear()
        for one in unused:
            if one.store is not None:
                one.store.close()
