"""The door: what connections may cost until they have shown that they may come in.

A connection is a *stranger* until the first bytes of its first call let it in. Strangers have room of their own,
counted in connections and in bytes that they have really sent. Without room a stranger goes: the oldest of the address
that has most. Whoever sends a whole hello comes in within a round trip and is never old, and no address can take the
room of others. An address is one of IPv4, or a network of IPv6 (/64), all of which one machine can have.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable

__all__ = ["Door", "Visit"]


class Visit:
    """One open connection, made by `Door.enter`; `close` is called when it has to go."""

    __slots__ = ("_place", "close", "had_to_go", "is_inside", "num_bytes")

    def __init__(self, place: _Place, close: Callable[[], object]) -> None:
        """Begin as a stranger."""
        self._place = place
        self.close = close
        self.is_inside = self.had_to_go = False
        self.num_bytes = 0  # received and kept


class _Place:
    """The strangers of one address, the oldest first."""

    __slots__ = ("host", "num_bytes", "visits")

    def __init__(self, host: str) -> None:
        self.host = host
        self.num_bytes = 0
        self.visits: dict[Visit, None] = {}


_INSIDE = _Place("")  # of no address: who is inside is not told apart


class Door:
    """Counts strangers and those who are inside. Does no I/O.

    Thread: the loop's.

    Attributes:
        num_inside: Connections that were let in and are open.
        num_strangers: Open connections that were not let in.
        num_bytes: What strangers have sent and the server keeps.
    """

    def __init__(self, *, max_inside: int, max_strangers: int, max_bytes: int) -> None:
        """Start without connections."""
        self._max_inside, self._max_strangers, self._max_bytes = max_inside, max_strangers, max_bytes
        self._places: dict[str, _Place] = {}
        self.num_inside = self.num_strangers = self.num_bytes = 0

    def enter(self, host: str, close: Callable[[], object]) -> tuple[Visit, Visit | None]:
        """Return a visit for a newcomer, and the one that has to go for it, to close."""
        gone = None
        if self.num_strangers >= self._max_strangers:
            gone = self._oldest_of(max(self._places.values(), key=lambda place: len(place.visits)))
            self._send_away(gone)
        key = _place_of(host)
        place = self._places.get(key)
        if place is None:
            place = self._places[key] = _Place(key)
        visit = Visit(place, close)
        place.visits[visit] = None
        self.num_strangers += 1
        return visit, gone

    def charge(self, visit: Visit, num_bytes: int) -> Visit | None:
        """Note that a stranger has sent more; return the one that has to go for it, to close: perhaps itself."""
        self._add_bytes(visit, num_bytes)
        if self.num_bytes <= self._max_bytes:
            return None
        gone = self._oldest_of(max(self._places.values(), key=lambda place: place.num_bytes), with_bytes=True)
        self._send_away(gone)
        return gone

    def release(self, visit: Visit) -> None:
        """Note that nothing of what a stranger has sent is kept any more."""
        self._add_bytes(visit, -visit.num_bytes)

    def let_in(self, visit: Visit) -> bool:
        """Make a stranger one of those inside, whose bytes are counted elsewhere; return whether there was room."""
        if self.num_inside >= self._max_inside:
            return False
        self.leave(visit)
        visit.is_inside, visit._place = True, _INSIDE
        self.num_inside += 1
        return True

    def leave(self, visit: Visit) -> None:
        """Forget a connection that is gone. Idempotent."""
        if visit.is_inside:
            visit.is_inside = False
            self.num_inside -= 1
            return
        place = visit._place
        if visit not in place.visits:
            return
        self.release(visit)
        del place.visits[visit]
        self.num_strangers -= 1
        if not place.visits:
            del self._places[place.host]

    def _send_away(self, visit: Visit) -> None:
        self.leave(visit)
        visit.had_to_go = True

    def _add_bytes(self, visit: Visit, num_bytes: int) -> None:
        if visit not in visit._place.visits:
            return
        visit.num_bytes += num_bytes
        visit._place.num_bytes += num_bytes
        self.num_bytes += num_bytes

    def _oldest_of(self, place: _Place, *, with_bytes: bool = False) -> Visit:
        return next(visit for visit in place.visits if visit.num_bytes or not with_bytes)


def _place_of(host: str) -> str:
    if ":" not in host:
        return host
    return str(ipaddress.ip_network((host.partition("%")[0], 64), strict=False))
