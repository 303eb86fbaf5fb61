"""Rows at or below their table's floor: they count only where they are present, for the shard and for its followers."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
from expiry_rig import PRESENT, SPEC, Rig, RigCommands, open_rig
from hypothesis import given, settings
from memory_update_log import MemoryUpdateLog
from row_batches import copy_as_after_crash
from text_scripts import Script, scripts

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reading.follower import Update
from headrace.paramserver.replica.copy.shard_tail import ShardTail
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.store.catalog import Catalog

_NUM_ROWS, _NUM_STEPS = 4, 12
_ROWS = list(range(_NUM_ROWS))


class _Follower:
    """A replica of the rig's shard, from its first record on."""

    def __init__(self) -> None:
        tail = ShardTail(0, seq=0, catalog=Catalog({}), sessions=Sessions({}))
        self.table_set = TableSet("s", [tail], is_by_step=False, make_table=MemoryTable)

    def follow(self, log: MemoryUpdateLog) -> None:
        """Take the records that the log has got since."""
        seq = self.table_set.tails[0].seq
        records = log.read(seq + 1) if log.last_seq > seq else ()
        updates = [Update(r.seq, r.epoch, r.header["kind"], r.header, memoryview(r.body)) for r in records]
        self.table_set.take(0, updates, log.last_seq)

    def rows(self) -> dict[int, float]:
        found, missing = self.table_set.table(SPEC.fqn).gather(np.array(_ROWS))
        return {row: float(found[row, 0]) for row in _ROWS if not missing[row]}


async def _raise(rig: Rig, step: int, *, epoch: int = 1) -> None:
    await rig.ingest.raise_floors("headrace", "expiry", 1, {SPEC.fqn: (epoch, step)})


async def _replay(rig: Rig, step: int, rows: Any, value: float = 1.0, *, epoch: int = 1, **more: Any) -> None:
    await rig.write(1, step, rows, value=value, run="replay", client="r", ends_step=False, version_epoch=epoch, **more)


async def _begin(rig: Rig) -> None:
    await rig.hello(1)
    await rig.hello(1, run="replay", client="r", world_size=0)


async def _rows(rig: Rig) -> dict[int, float]:
    read = await rig.applier.read(rig.table.table_id, SPEC, np.array(_ROWS))
    return {row: float(read.weights[row, 0]) for row in _ROWS if read.presence[row] == PRESENT}


@scripts(__file__, "floors")
async def test_floors(script: Script, tmp_path: Path) -> None:
    """A row at or below the floor counts or not, for the shard, a follower of its log and a recovery from it alike."""
    async with RigCommands(tmp_path) as commands:
        await script.run_async(commands)
        follower = _Follower()
        follower.follow(commands.rig.log)
        rows, log = await _rows(commands.rig), commands.rig.log
        assert follower.rows() == rows
    async with open_rig(tmp_path / "anew", log.reopen()) as rig:
        assert await _rows(rig) == rows


async def test_a_trainer_always_counts(tmp_path: Path) -> None:
    """A trainer's rows count whatever the floor is, also a batch that was not acked and is sent again."""
    async with open_rig(tmp_path) as rig:
        await _begin(rig)
        await _raise(rig, 100)
        await rig.write(1, 3, [0], value=3.0)
        rig._client_seqs["run", "rank0", 1] -= 1
        await rig.write(1, 3, [0], value=3.0)  # a duplicate
        assert await _rows(rig) == {0: 3.0}
        assert rig.ingest.sessions.find("run", "rank0").last_client_seq == 1  # type: ignore[union-attr]


async def test_acks_wait_for_a_batch_that_is_judged(tmp_path: Path) -> None:
    """A later batch, of another client, is not acked before the rows of the one before it were judged."""
    async with open_rig(tmp_path) as rig:
        await _begin(rig)
        await _raise(rig, 9)
        rig.log.hold()
        first = asyncio.create_task(_replay(rig, 5, [0], 5.0))
        second = asyncio.create_task(rig.write(1, 10, [1], value=1.0))
        await asyncio.sleep(0)
        rig.log.release()
        done, _ = await asyncio.wait((first, second), return_when=asyncio.FIRST_COMPLETED)
        assert rig.ingest.submitted_seq == rig.ingest.accepted_seq and done == {first, second}
        assert await _rows(rig) == {1: 1.0}


_OTHER_OPS = ["apply", "collect", "collect", "restart", "crash"]
_OPS = st.one_of(
    st.tuples(st.just("train"), st.sets(st.sampled_from(_ROWS), max_size=3), st.booleans(), st.integers(0, 2)),
    st.tuples(st.just("replay"), st.sets(st.sampled_from(_ROWS)), st.booleans(), st.integers(0, _NUM_STEPS)),
    st.tuples(st.just("replay"), st.sets(st.sampled_from(_ROWS)), st.booleans(), st.integers(0, _NUM_STEPS)),
    st.tuples(st.just("raise"), st.just(set()), st.just(False), st.integers(0, _NUM_STEPS)),
    st.tuples(st.sampled_from(_OTHER_OPS), st.just(set()), st.just(False), st.just(0)),
)


class _Model:
    """A table as a dict: what each row is after the same operations, one after the other."""

    def __init__(self) -> None:
        self.floor = -1
        self.rows: dict[int, tuple[int, float | None]] = {}  # step, and value or None for a tombstone

    def write(self, rows: set[int], step: int, value: float | None, *, is_conditional: bool) -> None:
        for row in rows:
            known = self.rows.get(row)
            if is_conditional and known is not None and known[0] > step:
                continue
            is_present = known is not None and known[1] is not None
            if is_conditional and value is not None and step <= self.floor and not is_present:
                continue
            self.rows[row] = step, value

    def collect(self, floor: int) -> None:
        assert floor == self.floor or any(step == floor for step, value in self.rows.values() if value is None)
        self.floor = floor
        self.rows = {row: (step, value) for row, (step, value) in self.rows.items() if value or step > floor}

    def present(self) -> dict[int, float]:
        return {row: value for row, (_, value) in sorted(self.rows.items()) if value is not None}


async def _run(path: Path, ops: list[tuple[str, set[int], bool, int]]) -> None:
    model, follower, log, trained = _Model(), _Follower(), MemoryUpdateLog(), 0
    waiting = list(enumerate(ops, 1))
    while waiting:
        async with open_rig(path, log) as rig:
            await _begin(rig)
            while waiting:
                value, (op, rows, deletes, step) = waiting.pop(0)
                present, deleted = ([], sorted(rows)) if deletes else (sorted(rows), [])
                if op == "train":
                    trained += step
                    await rig.write(1, trained, present, value=value, deleted=deleted)
                    model.write(rows, trained, None if deletes else value, is_conditional=False)
                elif op == "replay":
                    await _replay(rig, step, present, value, deleted=deleted)
                    model.write(rows, step, None if deletes else value, is_conditional=True)
                elif op == "raise":
                    await _raise(rig, step)
                    model.floor = max(model.floor, step)
                elif op == "apply":
                    await rig.applier.wait_applied(rig.ingest.submitted_seq)
                elif op == "collect":
                    await rig.collect()
                    model.collect(rig.table.floor[1])
                    assert rig.stored_rows() == sorted(model.rows)
                else:
                    if op == "crash":  # RocksDB's files as they are: what is in its memtable is lost
                        copy_as_after_crash(path / "store", path / "crashed")
                    break
                follower.follow(rig.log)
                assert await _rows(rig) == follower.rows() == model.present()
            follower.follow(rig.log)
        log = rig.log.reopen()
        if (path / "crashed").exists():
            shutil.rmtree(path / "store")
            (path / "crashed").rename(path / "store")
    async with open_rig(path, log) as rig:
        assert await _rows(rig) == follower.rows() == model.present()
    # The log alone makes the same rows.
    async with open_rig(path / "anew", rig.log.reopen()) as rig:
        assert await _rows(rig) == model.present()


@settings(max_examples=60, deadline=None)
@given(ops=st.lists(_OPS, min_size=1, max_size=14))
def test_shard_follower_and_recovery_agree_with_a_dict(ops: list[tuple[str, set[int], bool, int]]) -> None:
    """Whatever is written, replayed, collected and lost in a crash: shard, replica and recovery have a dict's rows."""
    with tempfile.TemporaryDirectory() as path:
        asyncio.run(_run(Path(path), ops))
