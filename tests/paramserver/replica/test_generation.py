"""What becomes visible when: whole steps of all shards, tables that appear, freshness; without a server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.paramserver.catalog import Catalog, pack_spec
from headrace.paramserver.follower import Update
from headrace.paramserver.replica.freshness import Histogram
from headrace.paramserver.replica.generation import Generation
from headrace.paramserver.replica.memory_table import MemoryTable
from headrace.paramserver.replica.shard_tail import ShardTail
from headrace.paramserver.sessions import Sessions
from headrace.schemas.errors import CorruptionError
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.tables import DType, TableSpec

SPEC = TableSpec(fqn="t", num_rows=0, dim=1, dtype=DType.FLOAT32)


class Shard:
    """One shard's log of records, written by ranks that each have rows of their own."""

    def __init__(self, *, world_size: int = 1) -> None:
        self.updates: list[Update] = []
        self._client_seqs = [0] * world_size
        for rank in range(world_size):
            self.hello(rank)

    def hello(self, rank: int, *, epoch: int = 1) -> None:
        self._client_seqs[rank] = 0
        header = {
            "run": "run",
            "client": f"rank{rank}",
            "rank": rank,
            "world_size": len(self._client_seqs),
            "tables": [pack_spec(SPEC)],
        }
        self._append(epoch, idl.UpdateKind.HELLO, header, b"")

    def write(self, step: int, value: float, *, rank: int = 0, epoch: int = 1, ends: bool = True) -> None:
        self._client_seqs[rank] += 1
        delta = idl.TableDelta(
            fqn=SPEC.fqn,
            fingerprint=SPEC.fingerprint,
            column_offset=0,
            width=1,
            row_ids=np.array([rank], "<i8").tobytes(),
            weights=np.array([value], "<f4").tobytes(),
            states=[],
        )
        request = idl.SetEmbeddingsRequest(
            run="run",
            client=f"rank{rank}",
            epoch=epoch,
            client_seq=self._client_seqs[rank],
            step=step,
            time_us=step * 1_000_000,
            ends_step=ends,
            is_exact_cut=ends,
            deltas=[delta],
        )
        args = idl.ParameterServer.setEmbeddings_args(request=request)
        body = b"".join(encode_message("setEmbeddings", CALL, 1, args))
        self._append(epoch, idl.UpdateKind.BATCH, {}, body)

    def take(self) -> list[Update]:
        updates, self.updates = self.updates, []
        return updates

    def _append(self, epoch: int, kind: int, header: dict[str, Any], body: bytes) -> None:
        self.seq = getattr(self, "seq", 0) + 1
        self.updates.append(Update(self.seq, epoch, kind, header, memoryview(body)))


class Copy:
    def __init__(self, num_shards: int, *, is_by_step: bool = True) -> None:
        tails = [ShardTail(shard, seq=0, catalog=Catalog({}), sessions=Sessions({})) for shard in range(num_shards)]
        self.now_us = 0
        self.generation = Generation(
            "s", tails, is_by_step=is_by_step, make_table=MemoryTable, clock_us=lambda: self.now_us
        )

    def take(self, shard: int, updates: list[Update]) -> bool:
        return self.generation.take(shard, updates, updates[-1].seq if updates else 0)

    def values(self, *rows: int) -> list[float]:
        return self.generation.tables["t"].gather(np.array(rows))[0].flatten().tolist()


def test_a_step_waits_for_all_shards() -> None:
    """Rows of a step that one shard has not ended stay as they were; then all change at once."""
    copy, shards = Copy(2), [Shard(), Shard()]
    for shard in shards:
        shard.write(1, 1.0)
    assert not copy.take(0, shards[0].take())
    assert copy.generation.visible is None
    assert copy.take(1, shards[1].take()) and copy.generation.visible == (1, 1)
    shards[0].write(2, 2.0)
    shards[0].write(3, 3.0)
    shards[1].write(2, 2.0, ends=False)
    assert not copy.take(0, shards[0].take()) and not copy.take(1, shards[1].take())
    assert copy.values(0) == [1.0]
    shards[1].write(2, 2.5)
    assert copy.take(1, shards[1].take())
    assert (copy.generation.visible, copy.values(0)) == ((1, 2), [2.5])
    shards[1].write(3, 3.0)
    assert copy.take(1, shards[1].take()) and copy.generation.visible == (1, 3)


def test_a_step_waits_for_all_ranks() -> None:
    """Two ranks of one run: a step is whole when both have ended it."""
    copy, shard = Copy(1), Shard(world_size=2)
    shard.write(1, 1.0, rank=0)
    shard.write(1, 1.5, rank=1)
    assert copy.take(0, shard.take()) and copy.values(0, 1) == [1.0, 1.5]
    shard.write(2, 2.0, rank=0)
    assert not copy.take(0, shard.take()) and copy.values(0, 1) == [1.0, 1.5]
    shard.write(2, 2.5, rank=1)
    assert copy.take(0, shard.take()) and copy.values(0, 1) == [2.0, 2.5]


def test_a_newer_run_is_waited_for() -> None:
    """After a restarted trainer's hello the next step that is shown is one of its own."""
    copy, shard = Copy(1), Shard()
    shard.write(9, 9.0)
    assert copy.take(0, shard.take()) and copy.generation.visible == (1, 9)
    shard.hello(0, epoch=2)
    shard.write(1, 1.0, epoch=2, ends=False)
    assert not copy.take(0, shard.take()) and copy.values(0) == [9.0]
    shard.write(1, 1.0, epoch=2)
    assert copy.take(0, shard.take()) and copy.generation.visible == (2, 1)


def test_latest_shows_everything_at_once() -> None:
    """Without steps each record is shown when it comes, and the watermark is that of the slowest shard."""
    copy, shards = Copy(2, is_by_step=False), [Shard(), Shard()]
    shards[0].write(5, 5.0)
    assert copy.take(0, shards[0].take()) and copy.values(0) == [5.0]
    assert copy.generation.visible == (1, -1)
    shards[1].write(4, 4.0)
    assert copy.take(1, shards[1].take()) and copy.generation.visible == (1, 4)


def test_freshness_is_measured_and_an_idle_shard_is_not_stale() -> None:
    """An update's delay is from the trainer's clock to being visible; lag is only what is known to wait."""
    copy, shards = Copy(2), [Shard(), Shard()]
    for shard in shards:
        shard.write(1, 1.0)
    copy.now_us = 1_500_000
    copy.take(0, shards[0].take())
    copy.now_us = 3_000_000
    copy.take(1, shards[1].take())
    first, second = copy.generation.freshness()
    assert [f.delay.count for f in (first, second)] == [1, 1]
    assert first.delay.max_s == second.delay.max_s == 2.0
    copy.now_us = 60_000_000
    assert [f.lag_s for f in copy.generation.freshness()] == [0.0, 0.0]
    shards[0].write(2, 2.0)
    copy.take(0, shards[0].take())
    first, second = copy.generation.freshness()
    assert (first.lag_s, first.lag_steps, second.lag_s) == (59.0, 1, 0.0)


def test_a_record_without_rows_leaves_nobody_behind() -> None:
    """A new run's hello waits for its first step and keeps nothing from lookups; rows that wait, or are far, do."""
    copy, shard = Copy(1), Shard()
    shard.write(1, 1.0)
    copy.take(0, shard.take())
    shard.hello(0, epoch=2)
    copy.take(0, shard.take())
    (found,) = copy.generation.freshness()
    assert (found.visible_seq < found.last_seq, found.is_behind, found.lag_s) == (True, False, 0.0)
    copy.generation.tails[0].last_seq += 1  # the shard tells of a record that has not come
    assert copy.generation.freshness()[0].is_behind
    shard.write(2, 2.0, epoch=2, ends=False)
    copy.take(0, shard.take())
    assert copy.generation.freshness()[0].is_behind
    shard.write(2, 2.0, epoch=2)
    copy.take(0, shard.take())
    assert not copy.generation.freshness()[0].is_behind


def test_a_gap_ends_it() -> None:
    """A record that is not the next one is refused, and so is one that cannot be decoded."""
    copy, shard = Copy(1), Shard()
    shard.write(1, 1.0)
    updates = shard.take()
    with pytest.raises(CorruptionError, match="record 2 follows 0"):
        copy.take(0, updates[1:])
    with pytest.raises(CorruptionError, match="record 1 cannot be applied"):
        copy.take(0, [Update(1, 1, idl.UpdateKind.BATCH, {}, memoryview(b"nonsense"))])


def test_percentiles() -> None:
    """A percentile is never below the truth and at most a fifth above it."""
    histogram = Histogram()
    for number in range(1, 1001):
        histogram.add(number / 1000)
    for percent in (1, 50, 90, 99, 100):
        truth = percent / 100
        assert truth <= histogram.percentile(percent) <= truth * 1.2
    assert (histogram.count, histogram.max_s) == (1000, 1.0)
    assert Histogram().percentile(99) == 0.0
