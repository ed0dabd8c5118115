"""A thread's switch that lets the runtime's own ops pass its dispatch mode unseen."""

from __future__ import annotations

import threading


class _Unseen(threading.local):
    """While entered, the ops of this thread are the runtime's own."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *exc: object) -> None:
        self.depth -= 1


unseen = _Unseen()
"""Entered around everything that the runtime does with tensors."""
