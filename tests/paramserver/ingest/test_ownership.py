"""Which run may train a table, on one shard."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.paramserver.ingest.ownership import check_owners, claimable
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.store.catalog import Catalog, Owner
from headrace.schemas.errors import FencedError, OwnedError, SpecMismatchError
from headrace.schemas.tables import DType, TableSpec

SPECS = [TableSpec(fqn=fqn, num_rows=10, dim=4, dtype=DType.FLOAT32) for fqn in ("ctr:a", "ctr:b")]


class Shard:
    """A catalog and sessions, whose metadata survives a restart."""

    def __init__(self) -> None:
        self._meta: dict[bytes, bytes] = {}
        self.restart()

    def restart(self) -> None:
        self.catalog, self.sessions = Catalog(self._meta), Sessions(self._meta)

    def hello(self, run: str, epoch: int, *, takes_over: bool = False, specs: list[TableSpec] = SPECS) -> list[str]:
        """Say hello as a trainer; return the tables whose owner has changed."""
        settings: Any = {"takes_over": takes_over, "now_us": 90_000_000}
        names = claimable(self.catalog, self.sessions, specs, run, epoch, **settings)
        self._meta |= self.catalog.add(specs) | self.catalog.claim(names, run, epoch)
        session = self.sessions.open(run, "rank0", epoch, 0, 1)
        self._meta |= self.sessions.settle(session, 1)
        return names

    @property
    def owners(self) -> list[Owner | None]:
        return [self.catalog.owner_of(spec.fqn) for spec in SPECS]


def test_the_first_run_owns_and_its_restarts_go_on() -> None:
    """A table belongs to the run that named it first; each epoch of the run is noted once."""
    shard = Shard()
    assert shard.hello("a", 3) == ["ctr:a", "ctr:b"]
    assert shard.hello("a", 3) == []  # another rank, or a new connection
    assert shard.hello("a", 5) == ["ctr:a", "ctr:b"]
    shard.restart()
    assert shard.owners == [Owner("a", 5)] * 2
    check_owners(shard.catalog, ["ctr:a", "unknown"], "a")


def test_another_run_is_refused_or_takes_over() -> None:
    """The refusal changes nothing; after a takeover the former owner is refused, and says hello no more."""
    shard = Shard()
    shard.hello("a", 1)
    with pytest.raises(OwnedError, match="'ctr:a' belongs to run 'a', which is not connected and has ended no step; "):
        shard.hello("b", 2)
    assert shard.owners == [Owner("a", 1)] * 2
    assert shard.hello("b", 3, takes_over=True, specs=SPECS[:1]) == ["ctr:a"]
    assert shard.owners == [Owner("b", 3), Owner("a", 1)]
    with pytest.raises(FencedError, match="run 'b' has taken it over from run 'a'") as caught:
        check_owners(shard.catalog, ["ctr:b", "ctr:a"], "a")
    assert caught.value.epoch == 3
    with pytest.raises(OwnedError, match="belongs to run 'b'"):
        shard.hello("a", 1)


def test_the_refusal_says_when_the_owner_was_heard_of() -> None:
    """Its connection, and its last step by its own clock, say whether it is still alive."""
    shard = Shard()
    shard.hello("a", 1)
    session = shard.sessions.find("a", "rank0")
    assert session is not None
    session.num_connections, session.step, session.time_us = 1, 40, 60_000_000
    with pytest.raises(OwnedError, match="which is connected and ended step 40 30 s ago"):
        shard.hello("b", 2)
    shard.sessions = Sessions({})
    with pytest.raises(OwnedError, match="whose sessions are forgotten"):
        shard.hello("b", 2)


def test_of_two_takeovers_the_higher_epoch_wins() -> None:
    """A takeover that arrives late, on a shard that has seen a newer one, is fenced."""
    shard = Shard()
    shard.hello("a", 1)
    shard.hello("c", 3, takes_over=True)
    with pytest.raises(FencedError, match="run 'c' has taken it over"):
        shard.hello("b", 2, takes_over=True)
    assert shard.owners == [Owner("c", 3)] * 2


def test_a_run_owns_all_generations_of_a_table() -> None:
    """Another run gets no generation without a takeover, and after one the former owner may write none."""
    first, second = SPECS[0], dataclasses.replace(SPECS[0], fqn="ctr:a#2", dim=8)
    shard = Shard()
    shard.hello("a", 1, specs=[first])
    with pytest.raises(OwnedError, match="'ctr:a#2' belongs to run 'a'"):
        shard.hello("b", 2, specs=[second])
    assert shard.hello("b", 3, specs=[second], takes_over=True) == ["ctr:a#2"]
    shard.restart()
    for name in (first.fqn, second.fqn):
        with pytest.raises(FencedError, match="run 'b' has taken it over from run 'a'"):
            check_owners(shard.catalog, [name], "a")


def test_a_start_of_a_run_trains_one_generation() -> None:
    """Ranks that disagree on a table are refused at shard 0; the next start may train another generation."""
    first, second = SPECS[0], dataclasses.replace(SPECS[0], fqn="ctr:a#2", dim=8)
    shard = Shard()
    shard.hello("a", 1, specs=[first])
    for specs in ([second], [second, first]):
        with pytest.raises(SpecMismatchError, match=r"two generations of table 'ctr:a', .* its ranks, or its models,"):
            shard.hello("a", 1, specs=specs)
    assert shard.hello("a", 2, specs=[second]) == ["ctr:a#2"]
