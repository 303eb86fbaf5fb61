"""Log leases of a copy that loads; shards and time are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.paramserver.replica.api.config import ReplicaConfig
from headrace.paramserver.replica.copy.log_lease import CopyLease, LogLeaseKeeper
from headrace.schemas.errors import GoneError
from headrace.schemas.idl import idl

WAIT_S = 20.0


class Shards:
    """Two fake shards that note lease requests; the log of one may go."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int, str, str, int]] = []
        self.first_seqs = [1, 1]
        self.away: set[int] = set()
        self.links = cast("Any", [self._link(shard) for shard in range(2)])
        self.slept_s: list[float] = []
        self._sleepers: list[asyncio.Future[None]] = []
        self._has_moved = asyncio.Event()

    def _link(self, shard: int) -> Any:
        async def fetch(request: Any) -> Any:
            self.asked.append((shard, request.from_seq, request.follower, request.copy_id, request.lease_ms))
            self._has_moved.set()
            if shard in self.away:
                await asyncio.get_running_loop().create_future()
            if request.from_seq < self.first_seqs[shard]:
                raise GoneError(f"the log begins at seq {self.first_seqs[shard]}")
            return idl.FetchUpdatesReply(records=[], first_seq=1, last_seq=7)

        return SimpleNamespace(hello=SimpleNamespace(server_id="s"), fetch_updates=fetch, address="nowhere")

    async def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)
        self._sleepers.append(asyncio.get_running_loop().create_future())
        self._has_moved.set()
        await self._sleepers[-1]

    async def pass_time(self, num_asleep: int = 2) -> None:
        """Return when so many leases, which wait for it now or soon, have been asked for once more."""
        await self._until(lambda: len(self._sleepers) == num_asleep)
        num_asked = len(self.asked) + num_asleep
        sleepers, self._sleepers = self._sleepers, []
        for sleeper in sleepers:
            sleeper.set_result(None)
        await self._until(lambda: len(self.asked) == num_asked)

    async def _until(self, is_so: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not is_so():
                self._has_moved.clear()
                await self._has_moved.wait()


async def test_leases_are_asked_for_first_and_renewed_in_time() -> None:
    """Each shard is asked before loading, and three times per lease until the end."""
    shards, lease = Shards(), CopyLease.of(ReplicaConfig(name="replica", lease_s=90.0))
    expected = [(0, 5, "replica", lease.copy_id, 90_000), (1, 8, "replica", lease.copy_id, 90_000)]
    async with LogLeaseKeeper(shards.links, [5, 8], lease, sleep=shards.sleep) as keeper:
        assert shards.asked == expected
        for _ in range(2):
            await shards.pass_time()
        keeper.check()
    assert shards.asked == 3 * expected and set(shards.slept_s) == {30.0}
    assert [task.get_name() for task in asyncio.all_tasks() if "log-lease" in task.get_name()] == []


async def test_a_log_that_has_gone_is_told() -> None:
    """A lost log is an error at the start, or at the next check."""
    shards, lease = Shards(), CopyLease.of(ReplicaConfig(name="replica"))
    async with LogLeaseKeeper(shards.links, [5, 8], lease, sleep=shards.sleep) as keeper:
        shards.first_seqs[1] = 9
        keeper.check()
        await shards.pass_time()
        await asyncio.wait(keeper._tasks, timeout=WAIT_S, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(GoneError, match="begins at seq 9"):
            keeper.check()
    with pytest.raises(GoneError):
        async with LogLeaseKeeper(shards.links, [5, 8], lease, sleep=shards.sleep):
            pytest.fail("there is nothing to load for")


async def test_a_shard_that_is_away_keeps_no_other_lease_from_being_renewed() -> None:
    """While one shard is away, the leases of the others are renewed."""
    shards, lease = Shards(), CopyLease.of(ReplicaConfig(name="replica"))
    async with LogLeaseKeeper(shards.links, [5, 8], lease, sleep=shards.sleep):
        shards.away = {0}
        await shards.pass_time()
        del shards.asked[:]
        for _ in range(3):
            await shards.pass_time(num_asleep=1)
    assert [shard for shard, *_ in shards.asked] == [1, 1, 1]


def test_each_copy_has_a_lease_of_its_own() -> None:
    """Leases of copies differ, also with one name; without a name a lease is short."""
    config = ReplicaConfig(name="replica", lease_s=900.0)
    leases = [CopyLease.of(config) for _ in range(3)]
    assert len({lease.copy_id for lease in leases}) == 3
    assert {(lease.name, lease.lease_s, lease.is_lasting) for lease in leases} == {("replica", 900.0, True)}
    unnamed = CopyLease.of(ReplicaConfig(lease_s=900.0))
    assert (unnamed.lease_s, unnamed.is_lasting) == (60.0, False)
    assert CopyLease.of(ReplicaConfig(lease_s=9.0)).lease_s == 9.0
