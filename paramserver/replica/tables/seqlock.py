"""A lock whose readers see a change wholly or not at all, and take no lock while nothing changes.

The version is even while nobody writes. A reader notes the version, reads, and compares: the same even number means
that all it read belongs to one moment. Otherwise it reads once more under the writer's lock, so no reader starves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

__all__ = ["SeqLock"]

_T = TypeVar("_T")


class SeqLock:
    """Allows one writer at a time and any number of readers. Thread: any."""

    def __init__(self) -> None:
        self.num_retries = 0  # reads that were repeated
        self._version = 0
        self._lock = threading.Lock()

    @contextmanager
    def write(self) -> Iterator[None]:
        """Enter a change; readers see the state before it, or wait until it ends."""
        with self._lock:
            self._version += 1
            try:
                yield
            finally:
                self._version += 1

    def read(self, look: Callable[[], _T]) -> _T:
        """Return the result of `look`, computed from one moment.

        `look` is called once or twice and must not change anything. Its exception counts only if nobody wrote
        meanwhile.
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
