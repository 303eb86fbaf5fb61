"""Whole runs over a shard's rows: what goes, what stays, and what a run leaves behind however it ends."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from expiry_rig import DELETED, MISSING, PRESENT, SPEC, Rig, open_rig

from headrace.paramserver.expiry import expiry_run
from headrace.paramserver.expiry.expiry_frequency import FrequencyFile
from headrace.paramserver.expiry.expiry_policy import ExpiryPolicy
from headrace.paramserver.expiry.expiry_run import TableRun, check_policy
from headrace.paramserver.expiry.expiry_writer import EXPIRY_CLIENT, EXPIRY_RUN
from headrace.paramserver.ingest.sessions import Session
from headrace.schemas.errors import ConfigError, OverloadedError
from headrace.schemas.tables import ColumnShard

LEFT, RIGHT = ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)


def _session(rig: Rig) -> Session:
    session = rig.ingest.sessions.find(EXPIRY_RUN, EXPIRY_CLIENT)
    assert session is not None
    return session


async def test_idle_rows_go_and_stay_gone(tmp_path: Path) -> None:
    """Idle rows are deleted, a later update brings one back, and what is brought in of their past does not."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, range(10))
        await rig.write(1, 50, [3, 4])
        await rig.write(1, 100)
        report = await rig.expire("idle_steps=60")
        assert (report.scanned, report.live, report.expired, report.spared) == (10, 10, 8, 0)
        assert dict(report.by_policy) == {"idle_steps": 8}
        assert await rig.present(range(10)) == [3, 4]
        assert await rig.presence([0, 99]) == [DELETED, MISSING]
        await rig.hello(1, run="replay", client="log", world_size=0)
        await rig.write(1, 1, range(10), run="replay", client="log", version_epoch=1, ends_step=False)
        assert await rig.present(range(10)) == [3, 4]
        await rig.write(1, 100, [7])
        assert await rig.present(range(10)) == [3, 4, 7]
        again = await rig.expire("idle_steps=60")
        assert (again.scanned, again.live, again.expired) == (10, 3, 0)


async def test_nothing_goes_without_a_step(tmp_path: Path) -> None:
    """While no run has ended a step, nothing expires, and the report says why; rows of the last steps are spared."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, [1], ends_step=False)
        report = await rig.expire("max_rows=0")
        assert (report.expired, "no run has ended a step" in report.note) == (0, True)
        assert rig.ingest.sessions.find(EXPIRY_RUN, EXPIRY_CLIENT) is None
        await rig.write(1, 9, [2])
        await rig.write(1, 10, [3])
        report = await rig.expire("ttl_s=0.5")
        assert (report.expired, report.spared) == (1, 1)
        assert await rig.present([1, 2, 3]) == [2, 3]


async def test_an_update_between_the_scan_and_the_tombstone_wins(tmp_path: Path) -> None:
    """What a trainer writes after a run has begun stays, also within the step that it had ended, or in a new epoch."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, range(6))
        await rig.write(1, 100)
        run = TableRun(rig.context(), rig.table, ExpiryPolicy.parse("idle_steps=10"))
        assert await run.begin()
        assert await run.scan()
        await rig.write(1, 100, [0, 1])
        await rig.write(1, 101, [2])
        await rig.hello(2)
        await rig.write(2, 0, [3], ends_step=False)
        await run.delete(is_last=True)
        assert await rig.present(range(6)) == [0, 1, 2, 3]


async def test_an_update_that_is_not_applied_yet_counts(tmp_path: Path) -> None:
    """A run waits for the store to have every batch of the steps that it judges by."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, [0, 1])
        await rig.applier.wait_applied(rig.ingest.submitted_seq)
        await rig.write(1, 95, [1])
        await rig.write(1, 100)
        await rig.expire("idle_steps=10")
        assert await rig.present([0, 1]) == [1]


async def test_each_row_is_judged_by_its_own_run(tmp_path: Path) -> None:
    """With two runs at once, a slow one's rows are safe from a fast one's steps; those of ended epochs may go."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1, run="slow")
        await rig.write(1, 1, [0], run="slow")
        await rig.hello(2, run="slow")
        await rig.write(2, 1, [1], run="slow")
        await rig.hello(3, run="fast")
        await rig.write(3, 1, [2], run="fast")
        await rig.write(3, 1000, run="fast")
        await rig.write(2, 4, run="slow")
        run = TableRun(rig.context(), rig.table, ExpiryPolicy.parse("idle_steps=2"))
        assert await run.begin()
        assert await run.scan()
        await rig.write(2, 5, [1], run="slow")
        await run.delete(is_last=True)
        assert await rig.present([0, 1, 2]) == [1]


@pytest.mark.parametrize("piece_rows", [1, 9])
async def test_rows_of_an_ended_epoch_go_whatever_their_steps(tmp_path: Path, piece_rows: int) -> None:
    """Their tombstones are above the newest of them, wherever it was found."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 10, [5])
        await rig.write(1, 50, [0])
        await rig.write(1, 60, [7])
        await rig.hello(2)
        await rig.write(2, 100)
        assert (await rig.expire("idle_steps=45", piece_rows=piece_rows)).expired == 2
        assert await rig.present([0, 5, 7]) == [7]


async def test_a_rank_that_lags_holds_rows_back(tmp_path: Path) -> None:
    """The slowest rank's steps count."""
    async with open_rig(tmp_path) as rig:
        for rank in (0, 1):
            await rig.hello(1, client=f"rank{rank}", rank=rank, world_size=2)
        await rig.write(1, 1, [0], client="rank0")
        await rig.write(1, 100, client="rank0")
        assert (await rig.expire("idle_steps=10")).note
        await rig.write(1, 5, client="rank1")
        assert (await rig.expire("idle_steps=10")).expired == 0
        await rig.write(1, 12, client="rank1")
        assert (await rig.expire("idle_steps=10")).expired == 1


@pytest.mark.parametrize("policy", ["idle_steps=10", "max_rows=1"])
async def test_column_shards_go_whole(tmp_path: Path, policy: str) -> None:
    """A row's newest record decides, and the tombstone is in every column shard that has the row."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        for shard in (LEFT, RIGHT):
            await rig.write(1, 1, range(5), shard=shard)
        await rig.write(1, 95, [2], shard=RIGHT)
        await rig.write(1, 100)
        report = await rig.expire(policy, piece_rows=2)
        assert report.expired == 4
        assert await rig.present(range(5)) == [2]
        await rig.hello(1, run="replay", client="log", world_size=0)
        for shard in (LEFT, RIGHT):
            await rig.write(1, 1, range(5), run="replay", client="log", version_epoch=1, shard=shard, ends_step=False)
        assert await rig.present(range(5)) == [2]


async def test_the_budget_keeps_the_newest(tmp_path: Path) -> None:
    """Beyond the budget the least recently updated go, ties by row id; what other policies take counts first."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, range(20))
        await rig.write(1, 2, range(5, 10))
        await rig.write(1, 50, [0, 1])
        await rig.write(1, 100)
        report = await rig.expire("max_rows=10", piece_rows=3)
        assert dict(report.by_policy) == {"max_rows": 10}
        assert await rig.present(range(20)) == [0, 1, 5, 6, 7, 8, 9, 17, 18, 19]
        report = await rig.expire("max_rows=6, idle_steps=98", piece_rows=3)
        assert dict(report.by_policy) == {"idle_steps": 3, "max_rows": 1}
        assert await rig.present(range(20)) == [0, 1, 6, 7, 8, 9]
        assert (await rig.expire("max_rows=6")).expired == 0
        # Each of two shards keeps its half, rounded up: together they keep no fewer than they are told to.
        assert (await rig.expire("max_rows=5", num_shards=2)).expired == 3


async def test_the_budget_spares_what_may_be_written_yet(tmp_path: Path) -> None:
    """Rows of the last steps count towards the budget and stay."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, [0, 1])
        await rig.write(1, 100, [2, 3])
        report = await rig.expire("max_rows=1", is_dry_run=True)
        assert (report.expired, report.spared) == (2, 1)
        both = await rig.expire("max_rows=1, min_l2_norm=1e9", is_dry_run=True)
        assert (both.expired, both.spared) == (2, 2)  # one of the two is over the budget, too
        assert (await rig.expire("max_rows=1, idle_steps=1")).spared == 1
        assert await rig.present(range(4)) == [2, 3]
        assert (await rig.expire("max_rows=2")).spared == 0
        assert (await rig.expire("max_rows=0")).spared == 2


async def test_norms_and_frequencies(tmp_path: Path) -> None:
    """Rows of small weights go; rows that change at every run stay, and one that has stopped goes after a few."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, [0], value=0.1)
        await rig.write(1, 1, [1, 2])
        await rig.write(1, 10)
        assert (await rig.expire("min_l2_norm=1.0")).expired == 1
        assert await rig.present([0, 1, 2]) == [1, 2]
        policy, left = "min_frequency=0.3, decay=0.5", []
        for step in (20, 30, 40):
            await rig.write(1, step, [1])
            await rig.write(1, step + 3)
            dry = await rig.expire(policy, is_dry_run=True)
            left.append((dry.expired, (await rig.expire(policy)).expired))
        assert left == [(0, 0), (0, 0), (1, 1)]
        assert await rig.present([0, 1, 2]) == [1]


async def test_a_dry_run_changes_nothing(tmp_path: Path) -> None:
    """It says by policy what would go, and writes neither log nor files."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, range(4))
        await rig.write(1, 50, [0])
        await rig.write(1, 100)
        before = rig.log.last_seq
        report = await rig.expire("idle_steps=60, max_rows=0, min_frequency=0.1", is_dry_run=True)
        assert (report.expired, dict(report.by_policy)) == (4, {"idle_steps": 3, "min_frequency": 0, "max_rows": 1})
        assert rig.log.last_seq == before
        assert not (tmp_path / "expiry").exists()
        assert await rig.present(range(4)) == [0, 1, 2, 3]


async def test_batches_are_bounded_and_numbered_over_restarts(tmp_path: Path) -> None:
    """Tombstones come in batches of bounded size, each accepted once; after a restart their numbers go on."""
    rows = range(20_000)
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, rows)
        await rig.write(1, 100)
        assert (await rig.expire("idle_steps=10", piece_rows=5000)).expired == 20_000
        assert _session(rig).last_client_seq == 4
        bodies = [len(record.body) for record in rig.log.read(1) if record.header.get("client") == EXPIRY_CLIENT]
        assert max(bodies) < 8192 * 8 + 1024
        await rig.write(1, 200, rows)
        await rig.write(1, 300)
        log = rig.log
    async with open_rig(tmp_path, log.reopen()) as rig:
        await rig.expire("idle_steps=10")
        assert _session(rig).last_client_seq == 4 + 3
        assert await rig.present(rows) == []
        assert _session(rig).is_trainer is False


async def test_a_lost_store_ends_in_the_same_rows(tmp_path: Path) -> None:
    """Tombstones are records of the log: a store that is made anew from it is the same."""
    async with open_rig(tmp_path / "a") as rig:
        await rig.hello(1)
        await rig.write(1, 1, range(10))
        await rig.write(1, 100, [4])
        await rig.expire("idle_steps=10")
        await rig.write(1, 101, [5])
        presence, log = await rig.presence(range(10)), rig.log
    async with open_rig(tmp_path / "b", log.reopen()) as rig:
        assert await rig.presence(range(10)) == presence
    assert presence.count(PRESENT) == 2


async def test_a_run_waits_where_the_shard_has_no_room(tmp_path: Path) -> None:
    """A batch that is refused as overloaded is sent again, a while later; nothing is lost or doubled."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, range(10))
        await rig.write(1, 100)
        write, refusals = rig.ingest.write, [OverloadedError("full", retry_after_s=2.5)]

        async def refusing(*args: Any) -> Any:
            if refusals:
                raise refusals.pop()
            return await write(*args)

        rig.ingest.write = refusing  # type: ignore[method-assign]
        assert (await rig.expire("idle_steps=10")).expired == 10
        assert rig.slept_s == [2.5]
        assert await rig.present(range(10)) == []


async def test_the_rate_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between pieces a run waits as long as its rate wants."""
    monkeypatch.setattr(expiry_run, "time", SimpleNamespace(monotonic=lambda: 100.0))  # the work takes no time
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, range(100))
        await rig.write(1, 100)
        await rig.expire("idle_steps=1000", rows_per_s=5, piece_rows=10)
        assert rig.slept_s == [2.0 * number for number in range(1, 11)]


async def test_a_cancelled_run_is_as_if_it_had_ended_there(tmp_path: Path) -> None:
    """Cancelled between pieces, it leaves whole batches, keeps no file, and the next run does the rest."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, range(100))
        await rig.write(1, 100)
        is_waiting = asyncio.Event()

        async def sleep(seconds: float) -> None:
            is_waiting.set()
            await asyncio.Event().wait()

        context = rig.context(rows_per_s=1, piece_rows=10, sleep=sleep)
        run = asyncio.create_task(
            TableRun(context, rig.table, ExpiryPolicy.parse("idle_steps=10, min_frequency=0.1")).run()
        )
        await is_waiting.wait()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert list((tmp_path / "expiry").iterdir()) == []
        assert (await rig.expire("idle_steps=10")).expired == 100


@pytest.mark.parametrize("policy", ["min_frequency=0.1", "max_rows=5, min_frequency=0.1"], ids=["run", "cut"])
async def test_cancelled_while_it_opens_its_file_it_leaves_none_open(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is cancelled while a slow disk opens its file of frequencies ends when that is open, and closes it."""
    opening, may_open = threading.Event(), threading.Event()
    opened: list[FrequencyFile] = []
    closed: list[FrequencyFile] = []

    class SlowFile(FrequencyFile):
        def __init__(self, *args: Any, **settings: Any) -> None:
            opening.set()
            assert may_open.wait(60)
            super().__init__(*args, **settings)
            opened.append(self)

        def close(self) -> None:
            closed.append(self)
            super().close()

    monkeypatch.setattr("headrace.paramserver.expiry.expiry_run.FrequencyFile", SlowFile)
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, range(10))
        await rig.write(1, 100)
        run = asyncio.create_task(rig.expire(policy))
        assert await asyncio.to_thread(opening.wait, 60)
        run.cancel()
        may_open.set()
        with pytest.raises(asyncio.CancelledError):
            await run
        assert len(opened) == 1 and closed == opened
        assert list((tmp_path / "expiry").glob("*")) == []


async def test_norms_of_integers_are_refused(tmp_path: Path) -> None:
    """A policy that a table cannot have is refused before anything is looked at."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        table = rig.table
        table.spec = SPEC.__class__(fqn="q", num_rows=0, dim=4, dtype=SPEC.dtype.__class__.UINT8)
        with pytest.raises(ConfigError, match="min_l2_norm of weights of type UINT8"):
            check_policy(table, ExpiryPolicy.parse("min_l2_norm=1"))
