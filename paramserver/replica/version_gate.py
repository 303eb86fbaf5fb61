"""Readers that see all of a change or nothing of it, without a lock as long as nothing changes under them.

The version is even while nobody writes. A reader notes it, reads, and looks again: the same even number means that what
it read is of one moment. If not, it reads once more under the writer's lock, so no reader is put off for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["VersionGate"]

_T = TypeVar("_T")


class VersionGate:
    """One writer at a time, any number of readers. Thread: any.

    Attributes:
        num_retries: Reads that had to be done again.
    """

    def __init__(self) -> None:
        """Nobody writes."""
        self.num_retries = 0
        self._version = 0
        self._lock = threading.Lock()

    @contextmanager
    def write(self) -> Iterator[None]:
        """Change things; readers see them as they were before, or wait until this ends."""
        with self._lock:
            self._version += 1
            try:
                yield
            finally:
                self._version += 1

    def read(self, look: Callable[[], _T]) -> _T:
        """Return what `look` makes of things that are all of one moment.

        Args:
            look: Called once or twice; it must not change anything. What it raises counts only when nobody wrote.
        """
        version = self._version
        if not version & 1:
            try:
                found = look()
            except Exception:
                if self._version == version:
                    raise
            else:
                if self._version == version:
                    return found
        self.num_retries += 1
        with self._lock:
            return look()
