"""Where the shards of one server are, as far as this process knows. No I/O.

Whoever starts or restores a shard takes a higher *term*; it is 0 where nobody claims shards. Of two statements about a
shard the one with the higher term is right. At equal terms the shard's own word is better than what others say, and
anything is better than a place where nobody was found.

A reply with a lower term than one that was seen comes from an old copy of the shard, which lacks what the newer one has
acked. `ShardPlaces.check_term` makes it an error after which the caller looks for the shard again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from headrace.paramserver.rpc.address import format_address, is_wildcard, shard_map
from headrace.schemas.errors import UnavailableError
from headrace.schemas.idl import idl

__all__ = ["DOUBTED", "HEARSAY", "OWN_WORD", "STANDBY", "ShardPlace", "ShardPlaces", "StaleTermError"]

DOUBTED, HEARSAY, OWN_WORD = range(3)
"""How sure a place is: nobody was found there, another shard says so, the shard itself says so."""

STANDBY = -1  # ON THE WIRE: never renumber
"""The shard of a hello's reply from a process that owns none; its places are as good as any others'."""

# A made-up term of an unprotected server must not become one that no claim can exceed.
_MAX_TERM = 2**62


class StaleTermError(UnavailableError):
    """An old copy of a shard has replied: a newer one exists, at another address or soon at this one."""


@dataclass(frozen=True, slots=True)
class ShardPlace:
    """A shard's host and port, the term in which it is there, how sure that is, and its node's name, for people."""

    host: str
    port: int
    term: int = 0
    certainty: int = HEARSAY
    node: str | None = None

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        return self.host, self.port

    def is_better_than(self, other: ShardPlace) -> bool:
        """Return whether this statement replaces another one about the same shard."""
        return (self.term, self.certainty) > (other.term, other.certainty)


class ShardPlaces:
    """The place of each shard, by index.

    Thread: the event loop's.

    Attributes:
        server_id: Whose shards these are. What another server says is ignored.
        own: The shard that this process is, whose place nobody else can tell it; None for a client.
        rival: Where the own shard is said to be in a higher term than its own; None if nobody says so.
        shunned: Where none of them is for who asks: a follower's own place, which others take for a shard's. Or None.
        standbys: Shard, host and port of each standby: where else a shard may be once its owner is lost.
    """

    def __init__(
        self,
        server_id: str,
        places: Iterable[ShardPlace],
        *,
        own: int | None = None,
        standbys: Iterable[tuple[int, str, int]] = (),
    ) -> None:
        """Know these places, of all shards in order."""
        self.server_id, self.own, self.standbys = server_id, own, tuple(standbys)
        self.rival: ShardPlace | None = None
        self.shunned: tuple[str, int] | None = None
        self._places = list(places)

    @classmethod
    def of_hello(cls, hello: Any, host: str, port: int) -> ShardPlaces:
        """Return what an `idl.HelloReply` says that came from a host and port.

        Raises:
            ProtocolError: It does not name all shards.
        """
        return cls(hello.server_id, _told(hello, host, port), standbys=_standbys_of(hello))

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[ShardPlace]:
        return iter(list(self._places))

    def __getitem__(self, shard: int) -> ShardPlace:
        return self._places[shard]

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Host and port of each shard."""
        return [place.address for place in self._places]

    def learn(self, hello: Any, host: str, port: int) -> bool:
        """Merge what an `idl.HelloReply` says that came from a host and port; return whether a place has changed.

        Another server's is ignored, as is one of another number of shards: a replica answers as one shard.
        """
        if hello.server_id != self.server_id or len(hello.shards) != len(self):
            return False
        self.standbys = _standbys_of(hello) or self.standbys
        if hello.shard == STANDBY:  # no shard is where it is, so what it says counts for more
            for shard in range(len(self)):
                self.doubt(shard, (host, port))
        return self.merge(enumerate(_told(hello, host, port)))

    def hear(self, shards: Sequence[Any]) -> bool:
        """Merge each `idl.ShardAddress` that a node of the same server tells; return whether a place has changed.

        What cannot be a shard's place is ignored.
        """
        return self.merge(
            (place.shard, ShardPlace(place.host, place.port, place.term or 0, node=place.node))
            for place in shards
            if place.host and not is_wildcard(place.host) and 0 < place.port <= 65535
        )

    def merge(self, told: Iterable[tuple[int, ShardPlace]]) -> bool:
        """Merge statements about shards; return whether a place has changed."""
        has_changed = False
        for shard, place in told:
            if not 0 <= shard < len(self) or not 0 <= place.term <= _MAX_TERM:
                continue
            known = self._places[shard]
            if shard == self.own:
                if place.term > (self.rival or known).term:
                    self.rival = place
            elif place.address != self.shunned and (known.address == self.shunned or place.is_better_than(known)):
                self._places[shard] = place
                has_changed |= (place.address, place.term) != (known.address, known.term)
        return has_changed

    def doubt(self, shard: int, address: tuple[str, int]) -> None:
        """Take any other address of the same term from now on: nobody was found at this one."""
        if self._places[shard].address == address and shard != self.own:
            self._places[shard] = replace(self._places[shard], certainty=DOUBTED)

    def check_term(self, shard: int, term: int, address: str) -> None:
        """Check that a reply in a term comes from the newest copy of a shard that is known.

        Raises:
            StaleTermError: It comes from an older one.
        """
        known = self._places[shard] if 0 <= shard < len(self) else None
        if known is not None and term < known.term:
            raise StaleTermError(
                f"{address} is an old copy of shard {shard}, of term {term}: one of term {known.term} was started at "
                f"{format_address(*known.address)}"
            )

    def to_idl(self) -> list[Any]:
        """Return the `idl.ShardAddress` of each shard; those without a term read as before terms."""
        return [
            idl.ShardAddress(shard=shard, host=place.host, port=place.port, term=place.term or None, node=place.node)
            for shard, place in enumerate(self._places)
        ]


def _standbys_of(hello: Any) -> tuple[tuple[int, str, int], ...]:
    return tuple(
        (place.shard, place.host, place.port)
        for place in getattr(hello, "standbys", None) or ()
        if place.host and not is_wildcard(place.host) and 0 < place.port <= 65535
    )


def _told(hello: Any, host: str, port: int) -> list[ShardPlace]:
    terms = {place.shard: place.term or 0 for place in hello.shards}
    nodes = {place.shard: place.node for place in hello.shards}
    terms[hello.shard] = max(terms.get(hello.shard, 0), getattr(hello, "term", None) or 0)
    return [
        ShardPlace(*address, terms[shard], OWN_WORD if shard == hello.shard else HEARSAY, nodes[shard])
        for shard, address in enumerate(shard_map(hello, host, port))
    ]
