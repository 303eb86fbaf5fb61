"""Outstanding flushes and those who wait for them; `test_sender.py` delivers them."""

from __future__ import annotations

import dataclasses
import threading

import pytest
import torch
from trainer_tables import Submitted, Trained

from headrace.schemas.errors import FencedError, HeadraceError, StorageError
from headrace.streamer.delivery.outstanding import OutstandingFlushes
from headrace.streamer.flush.layout import Flush


def flushes_of(*num_rows: int) -> list[Flush]:
    """Return flushes of so many rows each, at steps from 1 on."""
    table = Trained()
    submitted = Submitted([table])
    for step, number in enumerate(num_rows, 1):
        table.mark(range(number))
        submitted.flusher.on_step(step)
        submitted.release()
    return submitted.flushes


class Waiter(threading.Thread):
    """Waits until nothing is outstanding, and knows whether it was woken.

    Attributes:
        was_woken: What each of its waits has returned.
        result: What the wait ended with.
    """

    def __init__(self, outstanding: OutstandingFlushes) -> None:
        super().__init__()
        self._outstanding = outstanding
        self._wait = outstanding._changed.wait
        outstanding._changed.wait = self._noted  # type: ignore[method-assign]
        self._waits = threading.Event()
        self.was_woken: list[bool] = []
        self.result: object = None
        self.start()
        # Whoever changes something after this gets the lock only when the wait has begun.
        assert self._waits.wait(60.0)

    def _noted(self, timeout: float | None = None) -> bool:
        self._waits.set()
        self.was_woken.append(self._wait(timeout))
        return self.was_woken[-1]

    def run(self) -> None:
        try:
            self.result = self._outstanding.wait_durable(60.0)
        except HeadraceError as exc:
            self.result = exc


def test_what_is_durable_is_counted_and_not_waited_for() -> None:
    """Flushes and bytes rise with each submission and fall as they become durable, which ends the wait."""
    outstanding = OutstandingFlushes()
    flushes = flushes_of(3, 5)
    entries = [outstanding.add(flush) for flush in flushes]
    assert all(outstanding.take(entry) for entry in entries)
    assert outstanding.wait_durable(0.0) == (2, flushes[0].size_bytes + flushes[1].size_bytes)
    outstanding.note_durable(outstanding.entry_of(flushes[0]))
    assert outstanding.wait_durable(0.0) == (1, flushes[1].size_bytes)
    waiter = Waiter(outstanding)
    outstanding.note_durable(entries[1])
    waiter.join()
    assert (waiter.result, waiter.was_woken) == ((0, 0), [True])
    figures = outstanding.figures()
    assert (figures["num_flushes"], figures["num_rows_sent"], figures["acked_step"]) == (2, 8, 2)
    assert (figures["num_inflight_flushes"], figures["inflight_bytes"], len(outstanding)) == (0, 0, 0)
    assert 0 <= figures["lag_p50_s"] <= figures["lag_p99_s"] < 60


def test_only_what_is_not_taken_can_be_withdrawn() -> None:
    """A flush that is taken stays; one that is not taken, or was never added, can be withdrawn."""
    outstanding = OutstandingFlushes()
    one, two = flushes_of(3, 5)
    taken, withdrawn = (outstanding.add(flush) for flush in (one, two))
    assert outstanding.take(taken)
    assert not outstanding.withdraw(one)
    assert outstanding.withdraw(two)
    assert not outstanding.take(withdrawn)
    assert outstanding.withdraw(two)
    assert outstanding.wait_durable(0.0) == (1, one.size_bytes)


def test_the_end_of_delivery_wakes_who_waits() -> None:
    """A failure ends a wait at once, and the first one is kept."""
    outstanding = OutstandingFlushes()
    (flush,) = flushes_of(3)
    outstanding.add(flush)
    waiter = Waiter(outstanding)
    assert outstanding.fail(FencedError("taken over", epoch=2)) == []
    waiter.join()
    assert isinstance(waiter.result, FencedError)
    assert waiter.was_woken == [True]
    assert outstanding.fail(StorageError("later")) == []
    assert isinstance(outstanding.error, FencedError)
    with pytest.raises(HeadraceError, match="taken over"):
        outstanding.wait_durable(0.0)


def test_a_flush_from_a_device_counts_as_what_it_turns_out_to_be() -> None:
    """A flush from a device counts with its own bytes once it is whole, and not at all if it fails."""

    class Way:
        def complete(self, flush: Flush) -> Flush | None: ...

        def abandon(self) -> None: ...

    outstanding = OutstandingFlushes()
    one, two = flushes_of(3, 5)
    way = Way()
    partial = dataclasses.replace(one, tables=(), pending=way)
    entry = outstanding.add(partial)
    assert outstanding.fail(HeadraceError("ended")) == [way]
    outstanding = OutstandingFlushes()
    entry = outstanding.add(partial)
    nothing = outstanding.add(dataclasses.replace(two, tables=(), pending=way))
    outstanding.complete(entry, one)
    assert outstanding.entry_of(one) is entry
    assert outstanding.wait_durable(0.0)[0] == 2
    outstanding.complete(nothing, None)
    assert outstanding.wait_durable(0.0) == (1, one.size_bytes)


def test_deletions_that_are_on_their_way_are_known() -> None:
    """Global row ids of deletions are returned until they are durable."""
    table = Trained(row_offset=100)
    submitted = Submitted([table])
    table.tapped.evict(torch.tensor([1, 2]))
    submitted.flusher.on_step(1)
    outstanding = OutstandingFlushes()
    entry = outstanding.add(submitted.flushes[0])
    assert outstanding.deletions() == {"t.weight": [101, 102]}
    outstanding.note_durable(entry)
    assert outstanding.deletions() == {}
