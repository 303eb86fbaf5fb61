"""Deadlines of a server's connection, on a manual clock."""

from __future__ import annotations

from typing import Any

import pytest
from loop_clock import Clock

from headrace.paramserver.rpc import deadlines
from headrace.paramserver.rpc.admission import ServerLimits
from headrace.paramserver.rpc.deadlines import Deadlines


class Watched:
    """Deadlines with the state that they ask for, and a manual clock."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **limits: Any) -> None:
        self.clock = Clock()
        monkeypatch.setattr(deadlines.asyncio, "get_running_loop", lambda: self.clock)
        self.is_waiting = False
        self.is_stranger = False
        self.expired: list[tuple[float, bool]] = []
        self.deadlines = Deadlines(
            ServerLimits(**{"hello_timeout_s": 3.0, "frame_timeout_s": 5.0, "idle_timeout_s": 100.0} | limits),
            is_waiting=lambda: self.is_waiting,
            is_stranger=lambda: self.is_stranger,
            expire=lambda is_late: self.expired.append((self.clock.now_s - 1000.0, is_late)),
        )
        self.deadlines.watch()


def test_an_idle_connection_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle time counts from the last activity."""
    watched = Watched(monkeypatch)
    watched.clock.advance(60)
    watched.deadlines.touch()
    watched.clock.advance(99)
    assert watched.expired == []
    watched.clock.advance(2)
    assert watched.expired == [(160.0, False)]


def test_a_stranger_has_less_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before its hello a connection has only the time for that, even if clients may be idle forever."""
    watched = Watched(monkeypatch, idle_timeout_s=0.0)
    watched.is_stranger = True
    watched.deadlines.watch()
    watched.clock.advance(50)
    assert watched.expired == [(3.0, False)]


def test_idle_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """With an idle time of 0 a client's connection never ends, and no timer runs."""
    watched = Watched(monkeypatch, idle_timeout_s=0.0)
    watched.clock.advance(1e6)
    assert (watched.expired, watched.clock.timers) == ([], [])


def test_a_frame_ends_in_time_however_it_drips(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte is activity, but the frame's time counts from its first one."""
    watched = Watched(monkeypatch)
    for _ in range(60):
        watched.deadlines.touch()
        watched.deadlines.note_input(is_mid_frame=True, num_begun=1, num_moved=0)
        watched.clock.advance(0.1)
    assert watched.expired[0] == (5.0, True)


@pytest.mark.parametrize("is_stranger", [False, True])
def test_a_long_frame_that_moves_on(monkeypatch: pytest.MonkeyPatch, is_stranger: bool) -> None:
    """After hello, each 64 KiB of a long frame restart its deadline; a drip does not."""
    watched = Watched(monkeypatch)
    watched.is_stranger = is_stranger
    for kib in range(0, 64 * 20, 16):
        watched.deadlines.touch()
        watched.deadlines.note_input(is_mid_frame=True, num_begun=1, num_moved=kib << 10)
        watched.clock.advance(1.2)
    assert watched.expired[:1] == ([(5.0, True)] if is_stranger else [])
    for moved in range(100):  # bytes, not KiB
        watched.deadlines.touch()
        watched.deadlines.note_input(is_mid_frame=True, num_begun=1, num_moved=(64 * 20 << 10) + moved)
        watched.clock.advance(0.1)
    assert watched.expired


def test_every_frame_has_its_own_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream of frames, each begun as the last one ends, is not one slow frame."""
    watched = Watched(monkeypatch)
    for number in range(100):
        watched.deadlines.touch()
        watched.deadlines.note_input(is_mid_frame=True, num_begun=number, num_moved=0)
        watched.clock.advance(4)
    assert watched.expired == []


def test_pauses_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """A frame that waits for room has no deadline, and a new one when it goes on."""
    watched = Watched(monkeypatch)
    watched.deadlines.note_input(is_mid_frame=True, num_begun=1, num_moved=0)
    watched.is_waiting = True
    watched.deadlines.note_pause()
    watched.clock.advance(1000)
    assert watched.expired == []
    watched.is_waiting = False
    watched.deadlines.touch()
    watched.deadlines.note_input(is_mid_frame=True, num_begun=1, num_moved=0)
    watched.clock.advance(4.9)
    assert watched.expired == []
    watched.clock.advance(0.2)
    assert watched.expired == [(1005.0, True)]


def test_who_waits_for_us_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """The idle time begins when the last answer is out."""
    watched = Watched(monkeypatch)
    watched.is_waiting = True
    watched.clock.advance(500)
    watched.is_waiting = False
    watched.deadlines.touch()
    watched.deadlines.watch()
    watched.clock.advance(99)
    assert watched.expired == []
    watched.clock.advance(2)
    assert watched.expired == [(600.0, False)]


def test_a_finished_connection_lingers_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that does not close is closed, and not counted as slow."""
    watched = Watched(monkeypatch)
    watched.deadlines.note_input(is_mid_frame=True, num_begun=1, num_moved=0)
    watched.deadlines.note_finish()
    watched.clock.advance(2)
    assert watched.expired == [(1.0, False)]


def test_after_the_end_nothing_fires(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that is gone has no deadline."""
    watched = Watched(monkeypatch)
    watched.deadlines.cancel()
    watched.clock.advance(1e6)
    assert watched.expired == []
