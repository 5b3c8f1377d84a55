"""How workloads of these programs are asked: one word on a connection, one answer, again and again.

Only the standard library, since all that a workload loads is captured with it.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FAILED", "serve"]

FAILED = "failed:"
"""Begins an answer that is none."""
_WORD_BYTES_MAX = 4096


def serve(control: str, answer: Callable[[str], str]) -> None:
    """Answer at a Unix socket for ever; errors are told to who asked.

    Args:
        control: Where; must not exist.
        answer: What to say to a word.
    """
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(control)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection:
                word = connection.recv(_WORD_BYTES_MAX).decode()
                if not word:
                    continue
                try:
                    said = answer(word)
                except Exception as error:  # noqa: BLE001 - told to who asked
                    said = f"{FAILED} {type(error).__name__}: {error}"
                connection.sendall(said.encode())
