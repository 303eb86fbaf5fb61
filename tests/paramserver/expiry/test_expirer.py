"""Expiry passes on a shard: by hand over RPC, by triggers, one at a time, with a status."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from expiry_rig import SPEC as SPEC_OF_RIG
from expiry_rig import Rig, open_rig
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of
from shard_servers import serve_shards

from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.expiry.expirer import Expirer
from headrace.paramserver.expiry.policy import ExpiryRules
from headrace.paramserver.expiry.scan import RowScanner
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.errors import ConfigError, GoneError, OverloadedError, RequestError, StorageError
from headrace.schemas.idl import idl
from headrace.schemas.tables import ColumnShard, DType, TableSpec

SPEC = TableSpec(fqn="item.weight", num_rows=1000, dim=2, dtype=DType.FLOAT32)


def _request(fqn: str = "", *, wait_ms: int = 60_000, **more: Any) -> Any:
    fields = {"is_dry_run": False} | more
    return idl.ExpireRowsRequest(fqn=fqn, wait_ms=wait_ms, **fields)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    """A shard with ten rows, of which one is new."""
    async with open_rig(tmp_path) as rig:
        await rig.hello(1)
        await rig.write(1, 1, range(10))
        await rig.write(1, 100, [3])
        yield rig


async def test_a_run_is_asked_after_until_it_is_done(rig: Rig) -> None:
    """A call that does not wait begins a pass; others are refused meanwhile; its number finds its result."""
    go_on = asyncio.Event()

    async def sleep(seconds: float) -> None:
        await go_on.wait()

    context = rig.context(rows_per_s=1, piece_rows=3, sleep=sleep)
    async with Expirer(context, ExpiryRules.parse("*: idle_steps=50")) as expirer:
        reply = await expirer.expire_rows(_request(wait_ms=0))
        assert (reply.is_done, reply.tables) == (False, [])
        with pytest.raises(OverloadedError, match="pass is running"):
            await expirer.expire_rows(_request())
        assert expirer.status().is_running
        go_on.set()
        done = await expirer.expire_rows(_request(run_number=reply.run_number))
        assert (done.is_done, done.expired, done.run_number) == (True, 9, reply.run_number)
        with pytest.raises(GoneError, match="restarted"):
            await expirer.expire_rows(_request(run_number=1))


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (_request("nobody.*"), "no table 'nobody.\\*' here"),
        (_request(), "no matching table has an expiry policy"),
        (_request(policy="ttl=1"), "policy 'ttl=1': 'ttl=1' is not a policy"),
        (_request(wait_ms=-1), "out of range"),
    ],
)
async def test_wrong_requests(rig: Rig, request_: Any, says: str) -> None:
    """A wrong request gets an error that names the mistake, and begins no pass."""
    async with Expirer(rig.context(), ExpiryRules()) as expirer:
        with pytest.raises(RequestError, match=says):
            await expirer.expire_rows(request_)
        assert not expirer.is_running


async def test_a_policy_may_come_with_the_call(rig: Rig) -> None:
    """A call's policy replaces the server's for its pass."""
    async with Expirer(rig.context(), ExpiryRules.parse("*: idle_steps=50")) as expirer:
        assert (await expirer.expire_rows(_request(policy="idle_steps=500"))).expired == 0
        assert (await expirer.expire_rows(_request())).expired == 9


async def test_only_the_last_runs_are_kept(rig: Rig) -> None:
    """Reports of older passes are forgotten, and asking for one is an error."""
    async with Expirer(rig.context(), ExpiryRules.parse("*: idle_steps=5000")) as expirer:
        first, second, *_ = [await expirer.expire_rows(_request()) for _ in range(9)]
        with pytest.raises(GoneError):
            await expirer.expire_rows(_request(run_number=first.run_number))
        assert (await expirer.expire_rows(_request(run_number=second.run_number))).is_done


async def test_a_failed_run_says_why_and_the_next_goes_on(rig: Rig) -> None:
    """A pass's error is in its report and counted; the shard and the next pass go on."""
    problems = [ZeroDivisionError("oh")]

    def clock_us() -> int:
        if problems:
            raise problems.pop()
        return 5

    async with Expirer(rig.context(clock_us=clock_us), ExpiryRules.parse("*: idle_steps=50")) as expirer:
        reply = await expirer.expire_rows(_request())
        assert (reply.is_done, reply.error) == (True, "a bug: ZeroDivisionError('oh')")
        assert (await expirer.expire_rows(_request())).expired == 9
        assert (expirer.num_failed, expirer.num_runs, expirer.last_run_us) == (1, 2, 5)


async def test_triggers(rig: Rig) -> None:
    """A pass starts when the interval is over or the table seems too large, but not all the time."""
    now_s = 0.0
    await rig.applier.wait_applied(rig.ingest.submitted_seq)

    async def runs(rules: str, *times_s: float, num_shards: int = 1) -> list[int]:
        nonlocal now_s
        now_s = 0.0
        # Not entered: then it would look by itself, too.
        context = rig.context(num_shards=num_shards)
        expirer = Expirer(context, ExpiryRules.parse(rules), clock_s=lambda: now_s)
        found = []
        for time_s in times_s:
            now_s = time_s
            await expirer.check_triggers()
            found.append(expirer.num_runs)
        return found

    assert await runs("*: idle_steps=5000", 1e6) == [0]
    assert await runs("other: idle_steps=50, interval_s=1", 1e6) == [0]
    assert await runs("*: idle_steps=5000, interval_s=100", 99, 100, 150, 200, 301) == [0, 1, 1, 2, 3]
    assert await runs("*: idle_steps=5000, trigger_rows=100", 1e6) == [0]
    # Too many rows, which the policy does not let go: once a while, not at every look.
    assert await runs("*: idle_steps=5000, trigger_rows=5", 10, 60, 61, 119, 120) == [0, 1, 1, 1, 2]
    assert await runs("*: idle_steps=5000, trigger_rows=15", 60) == [0]
    assert await runs("*: idle_steps=5000, trigger_rows=15", 60, num_shards=2) == [1]
    assert await runs("*: idle_steps=5000, trigger_bytes=300", 60) == [1]
    assert await runs("*: idle_steps=5000, trigger_bytes=4KiB", 60) == [0]
    # Once few are left, the estimate, in which removals count, triggers nothing.
    assert await runs("*: idle_steps=50, trigger_rows=5", 60, 1e4, 2e4) == [1, 1, 1]
    assert await rig.present(range(10)) == [3]


async def test_triggers_are_watched(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard checks its triggers again and again, also after an error of its store."""
    await rig.applier.wait_applied(rig.ingest.submitted_seq)  # the estimate counts what RocksDB has
    estimate, errors = rig.store.num_rows_estimate, [StorageError("the disk is on fire")]

    def estimate_late(table_id: int) -> int:
        if errors:
            raise errors.pop()
        return estimate(table_id)

    monkeypatch.setattr(rig.store, "num_rows_estimate", estimate_late)
    ticks, has_looked, now_s = asyncio.Semaphore(2), asyncio.Event(), 0.0

    async def sleep(seconds: float) -> None:
        if ticks.locked():
            has_looked.set()
        await ticks.acquire()

    rules = ExpiryRules.parse("*: idle_steps=50, trigger_rows=5")
    async with Expirer(rig.context(), rules, clock_s=lambda: now_s, sleep=sleep) as expirer:
        now_s = 60.0
        await has_looked.wait()
        assert await rig.present(range(10)) == [3]
    assert expirer.num_rows_expired == 9


async def test_sweeps_come_round(rig: Rig) -> None:
    """Rows of overlapping columns are settled after a pass, and twice a day without one."""
    whole, left, right = SPEC_OF_RIG.whole, ColumnShard(offset=0, width=1), ColumnShard(offset=1, width=3)
    await rig.hello(2)
    for shard in (left, right):
        await rig.write(2, 1, [], deleted=[0], shard=shard)
    await rig.applier.wait_applied(rig.ingest.submitted_seq)
    now_s = 0.0
    rules = ExpiryRules.parse("*: idle_steps=5000")
    async with Expirer(rig.context(), rules, clock_s=lambda: now_s) as expirer:
        for at_s, rows in ((43_199.0, list(range(10))), (43_200.0, list(range(1, 10)))):
            now_s = at_s
            await expirer.check_triggers()
            assert rig.stored_rows(whole) == rows
        await rig.write(2, 2, [1], shard=left)
        await rig.write(2, 2, [1], shard=right)
        await expirer.expire_rows(_request())
    assert rig.stored_rows(whole) == list(range(2, 10))
    assert await rig.present(range(10)) == list(range(1, 10))


async def test_closing_cuts_a_run_off(rig: Rig) -> None:
    """Closing the shard ends a running pass and answers those who wait for it."""
    context = rig.context(rows_per_s=1, piece_rows=3, sleep=rig.sleep_forever)
    async with Expirer(context, ExpiryRules.parse("*: idle_steps=50")) as expirer:
        asking = asyncio.create_task(expirer.expire_rows(_request()))
        await rig.is_waiting.wait()
    reply = await asking
    assert reply.is_done
    assert "cut off" in reply.error


async def test_closing_waits_for_what_a_run_does_in_a_thread(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing waits for the pass's thread, because the store is closed next."""
    begun, may_end = threading.Event(), threading.Event()

    def next_piece(_: RowScanner) -> None:
        begun.set()
        assert may_end.wait(60)

    monkeypatch.setattr(RowScanner, "next_piece", next_piece)
    expirer = Expirer(rig.context(), ExpiryRules.parse("*: idle_steps=50"))
    await expirer.expire_rows(_request(wait_ms=0))
    assert await asyncio.to_thread(begun.wait, 60)
    closing = asyncio.create_task(expirer.__aexit__(None, None, None))
    for _ in range(5):
        await asyncio.sleep(0)
    assert not closing.done()
    may_end.set()
    await closing
    assert not expirer.is_running


def test_settings_are_rules(tmp_path: Path) -> None:
    """In a file, rules may be mappings from patterns to policies; a wrong one is named."""
    with pytest.raises(ConfigError, match="expiry: user: idle_steps is 0"):
        ServerConfig(data=Path("/d"), expiry="user: idle_steps=0")
    file = tmp_path / "server.yaml"
    file.write_text("expiry:\n  user.*:\n    ttl_s: 30d\n    interval_s: 1h\n  '*':\n    max_rows: 1000000\n")
    config = ServerConfig.load(flags={"data": "/d"}, environ={}, file=file)
    assert config.expiry == "user.*: ttl_s=30d, interval_s=1h; *: max_rows=1000000"
    file.write_text("expiry: [1]\n")
    with pytest.raises(ConfigError, match=r"server.yaml:1: expiry: '\[1\]' is not rules"):
        ServerConfig.load(flags={"data": "/d"}, environ={}, file=file)


async def test_dense_tensors_never_expire(tmp_path: Path) -> None:
    """Patterns pass over them, the server's and a call's; a call for one of them alone is refused."""
    dense = TableSpec.of_tensor("fc.weight", (3, 2), DType.FLOAT32)
    async with (
        serve_shards(tmp_path, 1, expiry="*: idle_steps=50") as ports,
        await ParamServerClient.connect("127.0.0.1", ports[0]) as client,
    ):
        await client.hello(hello_of_writer(SPEC, dense, role=idl.Role.ADMIN))
        deltas = delta_of(SPEC, [1], 1.0), delta_of(dense, [0], 1.0)
        await client.set_embeddings(request_of(*deltas, client_seq=1, step=1, time_us=1))
        await client.set_embeddings(request_of(delta_of(SPEC, [2], 1.0), client_seq=2, step=100, time_us=100))
        for pattern in ("", "*"):
            reply = await client.expire_rows(_request(pattern, is_dry_run=not pattern))
            assert ([table.fqn for table in reply.tables], reply.expired, reply.error) == ([SPEC.fqn], 1, None)
        with pytest.raises(RequestError, match=r"'fc\.\*' is a dense tensor, whose rows never expire"):
            await client.expire_rows(_request("fc.*"))
        wanted = idl.GetEmbeddingsRequest(
            fqn=dense.fqn, row_ids=np.array([0], "<i8"), with_states=False, with_versions=False
        )
        assert bytes((await client.get_embeddings(wanted)).presence) == bytes([1])
