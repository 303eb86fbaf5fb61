"""Readers see things as they are before a change or after it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace.paramserver.replica.tables.seqlock import SeqLock

WAIT_S = 20.0


class _Seen:
    """Two numbers that are equal except during a write; a look may run something in between."""

    def __init__(self, *between: Any) -> None:
        self.left = self.right = 0
        self.num_looks = 0
        self._between = list(between)

    def look(self) -> tuple[int, int]:
        self.num_looks += 1
        left = self.left
        if self._between:
            self._between.pop(0)()
        return left, self.right


def _set(seqlock: SeqLock, seen: _Seen, number: int) -> None:
    with seqlock.write():
        seen.left = seen.right = number


def test_who_reads_alone_looks_once() -> None:
    """Without a concurrent writer a reader looks once, without the lock."""
    seqlock, seen = SeqLock(), _Seen()
    assert seqlock.read(seen.look) == (0, 0)
    _set(seqlock, seen, 1)
    assert seqlock.read(seen.look) == (1, 1)
    assert (seen.num_looks, seqlock.num_retries) == (2, 0)


def test_what_changed_amid_a_look_is_looked_at_again() -> None:
    """A change during a look is seen whole, at the second look."""
    seqlock = SeqLock()
    seen = _Seen(lambda: _set(seqlock, seen, 1))
    assert seqlock.read(seen.look) == (1, 1)
    assert (seen.num_looks, seqlock.num_retries) == (2, 1)


def test_who_comes_amid_a_change_waits_for_its_end() -> None:
    """A reader that comes during a change waits for its end."""
    seqlock, seen = SeqLock(), _Seen()
    has_come, found = threading.Event(), []

    class Lock:
        def __init__(self) -> None:
            self.lock = threading.Lock()

        def __enter__(self) -> None:
            if threading.current_thread() is reader:
                has_come.set()
            self.lock.acquire()

        def __exit__(self, *_: object) -> None:
            self.lock.release()

    seqlock._lock = Lock()  # type: ignore[assignment]
    reader = threading.Thread(target=lambda: found.append(seqlock.read(seen.look)), daemon=True)
    with seqlock.write():
        seen.left = 1
        reader.start()
        assert has_come.wait(WAIT_S)
        assert seen.num_looks == 0
        seen.right = 1
    reader.join(WAIT_S)
    assert (found, seen.num_looks, seqlock.num_retries) == ([(1, 1)], 1, 1)


def test_a_change_that_fails_lets_readers_in() -> None:
    """A failed change raises for the writer and ends like any other."""
    seqlock, seen = SeqLock(), _Seen()
    with pytest.raises(ZeroDivisionError), seqlock.write():
        raise ZeroDivisionError
    assert seqlock.read(seen.look) == (0, 0)
    assert seqlock.num_retries == 0
    _set(seqlock, seen, 1)
    assert seqlock.read(seen.look) == (1, 1)


def test_an_error_of_a_look_counts_when_nobody_wrote() -> None:
    """An error during a change leads to a second look; otherwise it is the reader's."""
    seqlock = SeqLock()

    def fail(*, writes: bool) -> None:
        if writes:
            _set(seqlock, seen, 1)
        raise KeyError("half")

    seen = _Seen(lambda: fail(writes=True), lambda: None, lambda: fail(writes=False))
    assert seqlock.read(seen.look) == (1, 1)
    assert (seen.num_looks, seqlock.num_retries) == (2, 1)
    with pytest.raises(KeyError):
        seqlock.read(seen.look)
    assert (seen.num_looks, seqlock.num_retries) == (3, 1)
