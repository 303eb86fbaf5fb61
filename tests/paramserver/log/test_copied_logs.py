"""A log of another log's records: what it promises besides the suite of all logs (`test_interface.py`)."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
from faulty_file_ops import FaultyFileOps
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from log_files import body_of, fill, opened_log

from headrace.paramserver.log.files import FileUpdateLog
from headrace.paramserver.log.inspection import inspect_log
from headrace.paramserver.log.interface import UpdateLogConfig
from headrace.paramserver.log.segment_reader import LogReader
from headrace.schemas.errors import GoneError

SMALL = UpdateLogConfig(segment_bytes=4096, allocate_bytes=4096, tail_bytes=8192)


def _facts(records: Any) -> list[tuple[int, int, dict[str, Any], bytes]]:
    return [(record.seq, record.epoch, record.header, bytes(record.body)) for record in records]


async def test_copy_equals_its_source(path: Path, tmp_path: Path) -> None:
    """A copy that begins in the middle has the source's records and nonces, over restarts of either."""
    copied = 41
    for _ in range(3):
        async with opened_log(tmp_path / "source", SMALL) as source:
            await fill(source, 100)
            copy = FileUpdateLog.open(path, begin_seq=copied, config=SMALL)
            assert (copy.first_seq, copy.last_seq) == (41, copied - 1)
            for record in source.read(copied):
                mark = source.nonce_of(record.seq)
                appended = copy.append(epoch=record.epoch, header=record.header, body=[record.body], source_mark=mark)
                await appended.durable
            assert _facts(copy.read(41)) == _facts(source.read(41))
            marks = [copy.nonce_of(seq) for seq in range(41, source.last_seq + 1)]
            assert marks == [source.nonce_of(seq) for seq in range(41, source.last_seq + 1)]
            assert len(set(marks)) > 2
            assert copy.nonce_of(40) is None and copy.nonce_of(source.last_seq + 1) is None
            with pytest.raises(GoneError, match="begins at seq 41"):
                copy.read(40)
            copied = source.last_seq + 1
            await copy.close()
    assert (LogReader(path).first_seq, LogReader(path).last_seq) == (41, 300)
    assert not inspect_log(path).damage


class _CopyMachine(RuleBasedStateMachine):
    """A copy against a list of (mark, body), with restarts, kills and power cuts."""

    @initialize(begin_seq=st.integers(1, 2**40))
    def begin(self, begin_seq: int) -> None:
        self.folder = tempfile.TemporaryDirectory()
        self.path = Path(self.folder.name) / "log"
        self.loop = asyncio.new_event_loop()
        self.ops = FaultyFileOps()
        self.begin_seq = self.first_seq = begin_seq
        self.records: list[tuple[int, bytes]] = []
        self.mark = 1
        self.open()

    def open(self) -> None:
        # A new copy is told where it begins; one with records knows.
        begin_seq = 1 if self.records else self.begin_seq
        self.copy = FileUpdateLog.open(self.path, begin_seq=begin_seq, config=SMALL, ops=self.ops)

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    @property
    def next_seq(self) -> int:
        return self.begin_seq + len(self.records)

    async def _append(self, sizes: list[int], *, waits: bool = True) -> list[tuple[int, bytes]]:
        added, appends = [], []
        for seq, size_bytes in enumerate(sizes, self.next_seq):
            added.append((self.mark, body_of(seq, size_bytes)))
            append = self.copy.append(epoch=1, header={"step": 1}, body=[added[-1][1]], source_mark=self.mark)
            appends.append(append.durable)
        if waits:
            await asyncio.gather(*appends)
        else:
            await asyncio.gather(*appends, return_exceptions=True)
        return added

    @rule(sizes=st.lists(st.sampled_from([0, 10, 300, 5000]), min_size=1, max_size=8))
    def append(self, sizes: list[int]) -> None:
        self.records += self.run(self._append(sizes))

    @rule()
    def restart_source(self) -> None:
        self.mark += 1

    @rule()
    def restart(self) -> None:
        self.run(self.copy.close())
        self.open()

    @rule(
        sizes=st.lists(st.sampled_from([0, 300, 5000]), min_size=1, max_size=6),
        num_calls=st.integers(0, 25),
        seed=st.integers(0, 2**32) | st.none(),
    )
    def crash(self, sizes: list[int], num_calls: int, seed: int | None) -> None:
        """Die within so many calls of the file system while records are appended; then perhaps lose power."""
        self.ops.calls_left = num_calls
        added = self.run(self._append(sizes, waits=False))
        durable = self.copy.last_seq
        self.ops.is_dead = True
        self.run(self.copy.close())
        self.ops.is_dead, self.ops.calls_left = False, None
        if seed is not None:
            self.ops.power_cut(random.Random(seed))
        self.open()
        last_seq = self.copy.last_seq
        assert durable <= last_seq < self.next_seq + len(added)
        self.records += added[: last_seq + 1 - self.next_seq]

    @precondition(lambda self: self.records)
    @rule(data=st.data())
    def trim(self, data: st.DataObject) -> None:
        floor = data.draw(st.integers(self.begin_seq, self.next_seq))
        first_seq = self.copy.trim(floor)
        assert self.first_seq <= first_seq <= max(self.first_seq, floor)
        self.first_seq = first_seq

    @invariant()
    def agrees_with_the_list(self) -> None:
        if not hasattr(self, "copy"):
            return
        assert self.copy.last_seq == self.next_seq - 1
        if not self.records:
            return
        assert self.copy.first_seq == self.first_seq
        kept = self.records[self.first_seq - self.begin_seq :]
        assert [bytes(record.body) for record in self.copy.read(self.first_seq)] == [body for _, body in kept]
        seqs = range(self.first_seq, self.next_seq)
        assert [self.copy.nonce_of(seq) for seq in seqs] == [mark for mark, _ in kept]

    def teardown(self) -> None:
        if hasattr(self, "copy"):
            self.run(self.copy.close())
            self.loop.close()
            self.folder.cleanup()


TestCopyMachine = _CopyMachine.TestCase
TestCopyMachine.settings = settings(max_examples=25, stateful_step_count=20, deadline=None)
