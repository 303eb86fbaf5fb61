"""The door: what connections may cost until they have shown that they may come in.

A connection is a *stranger* until the first bytes of its first call let it in. Until a stranger sends something, it
costs a file descriptor. Then it waits for a turn: few have one at once, addresses alternate, and each goes in order of
arrival. A turn that brings nobody in ends after a while, if others wait. When there are too many strangers, one goes of
the address that has most: the one that has been silent for longest, or else the last that came. So clients that all
come at once wait for each other, and no address takes the turns of others. An address is one of IPv4, or a network of
IPv6 (/64), all of which one machine can have.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

from headrace.paramserver.rpc.frames import ignore

__all__ = ["TURN_S", "Door", "Visit"]

TURN_S = 2.0
"""What a turn has at least: with less, clients on slow links that come at once close each other's connections."""


class Visit:
    """One open connection, made by `Door.enter`.

    Attributes:
        begin: Called by the server when its turn begins.
        close: Called when it has to go.
        forget: Called when it is no stranger any more.
        had_to_go: It did not go by itself.
        is_inside: It was let in.
    """

    __slots__ = ("_group", "_place", "_since_s", "begin", "close", "forget", "had_to_go", "is_inside")

    def __init__(self, place: _Place) -> None:
        """Begin as a stranger."""
        self.begin: Callable[[], object] = ignore
        self.close: Callable[[], object] = ignore
        self.forget: Callable[[], object] = ignore
        self.is_inside = self.had_to_go = False
        self._place, self._group, self._since_s = place, place.silent, 0.0


class _Place:
    """The strangers of one address that have no turn, in order of arrival."""

    __slots__ = ("host", "silent", "waiting")

    def __init__(self, host: str) -> None:
        self.host = host
        self.silent: dict[Visit, None] = {}
        self.waiting: dict[Visit, None] = {}

    @property
    def num_visits(self) -> int:
        return len(self.silent) + len(self.waiting)


class Door:
    """Counts strangers and those who are inside, and says whose turn it is. Does no I/O.

    Thread: the loop's.

    Attributes:
        num_inside: Connections that were let in and are open.
        num_strangers: Open connections that were not let in.
    """

    def __init__(self, *, max_inside: int, max_strangers: int, max_turns: int, call_next: Callable[[], None]) -> None:
        """Start without connections; `call_next` is called when `next_turn` may have somebody."""
        assert max_turns < max_strangers, "one of those without a turn has to go for a newcomer"
        self._max_inside, self._max_strangers, self._max_turns = max_inside, max_strangers, max_turns
        self._call_next = call_next
        self._places: dict[str, _Place] = {}
        self._waiting: dict[_Place, None] = {}  # where somebody waits, in their order
        self._turns: dict[Visit, None] = {}
        self.num_inside = self.num_strangers = 0

    def enter(self, host: str) -> tuple[Visit, Visit | None]:
        """Return a visit for a newcomer, and the one that has to go for it, to close."""
        gone = None
        if self.num_strangers >= self._max_strangers:
            most = max(self._places.values(), key=lambda place: place.num_visits)
            gone = next(iter(most.silent) if most.silent else reversed(most.waiting))
            self._send_away(gone)
        key = _place_of(host)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(key)
        visit = Visit(place)
        place.silent[visit] = None
        self.num_strangers += 1
        return visit, gone

    def wait(self, visit: Visit) -> None:
        """Let a stranger that has sent something wait for its turn."""
        place = visit._place
        del place.silent[visit]
        place.waiting[visit] = None
        visit._group = place.waiting
        self._waiting[place] = None
        self._call_next()

    def next_turn(self, now_s: float) -> tuple[Visit | None, Visit | None]:
        """Return whose turn begins, and the one whose turn is over and that has to go for it, to close."""
        gone = None
        if not self._waiting:
            return None, None
        if len(self._turns) >= self._max_turns:
            gone = next(iter(self._turns))
            if now_s < gone._since_s + TURN_S:
                return None, None
            self._send_away(gone)
        place = next(iter(self._waiting))
        visit = next(iter(place.waiting))
        self._leave_group(visit)
        if place.waiting:  # behind other addresses
            del self._waiting[place]
            self._waiting[place] = None
        visit._group, visit._since_s = self._turns, now_s
        self._turns[visit] = None
        return visit, gone

    def let_in(self, visit: Visit) -> bool:
        """Make a stranger one of those inside; return whether there was room."""
        if self.num_inside >= self._max_inside:
            return False
        self.leave(visit)
        visit.is_inside = True
        self.num_inside += 1
        return True

    def leave(self, visit: Visit) -> None:
        """Forget a connection that is gone. Idempotent."""
        if visit.is_inside:
            visit.is_inside = False
            self.num_inside -= 1
        elif visit in visit._group:
            self._leave_group(visit)
            self.num_strangers -= 1
            visit.forget()
            if self._waiting:
                self._call_next()

    def close(self) -> list[Visit]:
        """Forget the strangers that have no turn; return them, to close."""
        visits = [visit for place in self._places.values() for visit in (*place.silent, *place.waiting)]
        for visit in visits:
            self._send_away(visit)
        return visits

    def _send_away(self, visit: Visit) -> None:
        self.leave(visit)
        visit.had_to_go = True

    def _leave_group(self, visit: Visit) -> None:
        del visit._group[visit]
        place = visit._place
        if not place.waiting:
            self._waiting.pop(place, None)
        if not place.num_visits:
            self._places.pop(place.host, None)


def _place_of(host: str) -> str:
    if ":" not in host:
        return host
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
