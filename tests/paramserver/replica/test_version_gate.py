"""What a reader makes of things that change while it looks: whole before a change, or whole after it."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from headrace.paramserver.replica.version_gate import VersionGate

WAIT_S = 20.0


class _Seen:
    """Two numbers that are equal but amid a write; looking at them may run something in between."""

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


def _set(gate: VersionGate, seen: _Seen, number: int) -> None:
    with gate.write():
        seen.left = seen.right = number


def test_who_reads_alone_looks_once() -> None:
    """Without a writer, and after one, a reader neither looks twice nor takes the lock."""
    gate, seen = VersionGate(), _Seen()
    assert gate.read(seen.look) == (0, 0)
    _set(gate, seen, 1)
    assert gate.read(seen.look) == (1, 1)
    assert (seen.num_looks, gate.num_retries) == (2, 0)


def test_what_changed_amid_a_look_is_looked_at_again() -> None:
    """A change that begins and ends while a reader looks is seen whole, at the second look."""
    gate = VersionGate()
    seen = _Seen(lambda: _set(gate, seen, 1))
    assert gate.read(seen.look) == (1, 1)
    assert (seen.num_looks, gate.num_retries) == (2, 1)


def test_who_comes_amid_a_change_waits_for_its_end() -> None:
    """A reader does not look at what is half changed, not even to look again."""
    gate, seen = VersionGate(), _Seen()
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

    gate._lock = Lock()  # type: ignore[assignment]
    reader = threading.Thread(target=lambda: found.append(gate.read(seen.look)), daemon=True)
    with gate.write():
        seen.left = 1
        reader.start()
        assert has_come.wait(WAIT_S)
        assert seen.num_looks == 0
        seen.right = 1
    reader.join(WAIT_S)
    assert (found, seen.num_looks, gate.num_retries) == ([(1, 1)], 1, 1)


def test_a_change_that_fails_lets_readers_in() -> None:
    """What a writer raises is its caller's, and ends the change like any other end."""
    gate, seen = VersionGate(), _Seen()
    with pytest.raises(ZeroDivisionError), gate.write():
        raise ZeroDivisionError
    assert gate.read(seen.look) == (0, 0)
    assert gate.num_retries == 0
    _set(gate, seen, 1)
    assert gate.read(seen.look) == (1, 1)


def test_an_error_of_a_look_counts_when_nobody_wrote() -> None:
    """An error may be of things that were half changed: then it is looked again; else it is the reader's."""
    gate = VersionGate()

    def fail(*, writes: bool) -> None:
        if writes:
            _set(gate, seen, 1)
        raise KeyError("half")

    seen = _Seen(lambda: fail(writes=True), lambda: None, lambda: fail(writes=False))
    assert gate.read(seen.look) == (1, 1)
    assert (seen.num_looks, gate.num_retries) == (2, 1)
    with pytest.raises(KeyError):
        gate.read(seen.look)
    assert (seen.num_looks, gate.num_retries) == (3, 1)
