"""Make a new server of what another one has left: its base rows cut into new stores, and the log behind them taken.

    each shard's base ──▶ rows, cut into M stores ── each shard's log behind it, up to its end or a point ──▶ a rename

It is another server, with an id of its own: replicas begin anew, and a trainer says whether it sends all rows
(`on_new_store`). Everything is checked as it is read, before the directory has its name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from headrace.paramserver.archive.recovery import NUM_SKIPPED_EPOCHS
from headrace.paramserver.log.inspection import Range, widen
from headrace.paramserver.log.interface import KIND_BATCH, LogRecord, is_housekeeping
from headrace.paramserver.reshard.new_shards import NewShards, cut_rows
from headrace.paramserver.reshard.remains import OpenShard
from headrace.paramserver.snapshots.contents import StoreReader
from headrace.paramserver.snapshots.new_data_dir import check_target
from headrace.paramserver.store.deltas import Batch
from headrace.paramserver.system.limits import check_room
from headrace.paramserver.system.text import describe_near
from headrace.schemas.errors import CorruptionError, UnknownTableError
from headrace.schemas.table_names import is_among, matches, model_of

__all__ = ["ShardSummary", "TableChoice", "TableCounts", "rebuild", "survey"]

_WORK = "restore"
_RECORDS_BYTES, _MOST_RECORDS = 8 << 20, 256


@dataclass(frozen=True, kw_only=True, slots=True)
class TableChoice:
    """Which tables are taken.

    Attributes:
        patterns: Names, paths or patterns of either; empty for all.
        model: Only this model's; None for all.
    """

    patterns: frozenset[str] = frozenset()
    model: str | None = None

    def takes(self, fqn: str) -> bool:
        """Return whether a table is taken."""
        return self.model in (None, model_of(fqn)) and (not self.patterns or is_among(fqn, self.patterns))

    def check(self, known: set[str]) -> None:
        """Raise `UnknownTableError` if a pattern means none of the known tables of the model, or it has none."""
        of_model = {fqn for fqn in known if self.model in (None, model_of(fqn))}
        if self.model is not None and not of_model:
            raise UnknownTableError(f"--model {self.model!r}: no table of it was left")
        for pattern in sorted(self.patterns):
            if not any(matches(fqn, pattern) for fqn in of_model):
                raise UnknownTableError(f"--table {pattern!r}: no such table; {describe_near(pattern, of_model)}")


@dataclass(slots=True)
class TableCounts:
    """Rows of one table in a shard's base, about, and in its log, where a row counts as often as it comes."""

    num_base_rows: int = 0
    num_rows: int = 0
    num_deleted: int = 0


@dataclass(slots=True)
class ShardSummary:
    """What was taken of one shard.

    Attributes:
        name: Of the shard.
        seq: Last record; 0 for nothing at all.
        epoch, step: All of this step of the newest run is there; the step is −1 without one.
        is_exact: Nothing newer is there.
        tables: By name.
        num_records, size_bytes: Of the log, whatever tables are chosen.
        steps, times_us: The trainers' steps and clocks in the log, microseconds since 1970.
    """

    name: str
    seq: int
    epoch: int = 0
    step: int = -1
    is_exact: bool = False
    tables: dict[str, TableCounts] = field(default_factory=dict)
    num_records: int = 0
    size_bytes: int = 0
    steps: Range | None = None
    times_us: Range | None = None

    @classmethod
    def of_base(cls, shard: OpenShard, choice: TableChoice) -> ShardSummary:
        """Begin with the tables of a shard's base."""
        summary = cls(shard.name, shard.last_seq)
        for table in filter(lambda each: choice.takes(each.spec.fqn), shard.state.catalog):
            assert shard.base is not None
            num_rows = shard.base.num_rows_estimate(table.table_id)
            summary.tables[table.spec.fqn] = TableCounts(num_base_rows=num_rows)
        return summary

    def add(self, record: LogRecord, batch: Batch, choice: TableChoice) -> None:
        """Count a record."""
        if is_housekeeping(record.header):
            return
        for name in record.header.get("dropped", ()):
            self.tables.pop(name, None)
        for delta in filter(lambda each: choice.takes(each.spec.fqn), batch.deltas):
            table = self.tables.setdefault(delta.spec.fqn, TableCounts())
            table.num_rows += delta.row_ids.size
            table.num_deleted += 0 if delta.deleted_row_ids is None else delta.deleted_row_ids.size
        if record.header["kind"] == KIND_BATCH:
            self.num_records += 1
            self.size_bytes += record.body.nbytes
            self.steps, self.times_us = widen(self.steps, batch.step), widen(self.times_us, batch.time_us)

    def end(self, shard: OpenShard) -> None:
        """Note up to which step everything is there."""
        sessions = shard.state.sessions
        self.epoch = sessions.newest_epoch_of(lambda _: True)
        self.step = sessions.watermark_of(self.epoch)
        self.is_exact = sessions.exact_step_of(self.epoch) == self.step and not shard.may_be_newer


def survey(
    shards: Sequence[OpenShard], choice: TableChoice, *, on_log: Callable[[int], None] = lambda _: None
) -> list[ShardSummary]:
    """Read and check the logs that `rebuild` would take, and make nothing; its arguments and errors."""
    summaries = [ShardSummary.of_base(shard, choice) for shard in shards]
    for shard, summary in zip(shards, summaries, strict=True):
        for record in shard.records():
            with _naming(shard):
                summary.add(record, shard.state.batch_of_record(record), choice)
            on_log(record.body.nbytes)
        summary.end(shard)
    _check_choice(shards, choice)
    return summaries


def rebuild(
    shards: Sequence[OpenShard],
    target: Path,
    *,
    num_shards: int,
    choice: TableChoice,
    on_rows: Callable[[int], None] = lambda _: None,
    on_log: Callable[[int], None] = lambda _: None,
) -> list[ShardSummary]:
    """Make the directory of a new server, whole or not at all; return what was taken of each shard.

    Args:
        shards: What is taken.
        target: The directory, missing or empty.
        num_shards: Of the new server.
        choice: Which tables.
        on_rows: Called with the number of base rows just taken.
        on_log: Called with the bytes of records just taken.

    Raises:
        ConfigError: The target is not empty.
        UnknownTableError: A chosen table is not there.
        CorruptionError: Something is damaged; the message names file and offset.
        StorageError: A disk failed or lacks room; nothing was made.

    Thread: any without an event loop; it blocks.
    """
    check_target(target.absolute())
    bases = [shard.base for shard in shards if shard.base is not None]
    size_bytes = sum(path.stat().st_size for base in bases for path in base.path.iterdir())
    check_room(target.absolute().parent, size_bytes, what="the rows of the new server")
    summaries = [ShardSummary.of_base(shard, choice) for shard in shards]
    states = [shard.state for shard in shards]
    if not any(shard.log_bytes for shard in shards):  # else they are known once the logs are read
        _check_choice(shards, choice)
    builder = cut_rows(
        StoreReader(bases),
        states,
        target,
        num_shards=num_shards,
        work=_WORK,
        is_wanted=choice.takes,
        on_rows=on_rows,
    )

    async def take_logs() -> None:
        async with NewShards(
            builder, states, num_shards=num_shards, num_skipped_epochs=NUM_SKIPPED_EPOCHS, is_wanted=choice.takes
        ) as new:
            for number, (shard, summary) in enumerate(zip(shards, summaries, strict=True)):
                some = _some_at_a_time(shard.records())
                while records := await asyncio.to_thread(next, some, None):
                    for record in records:
                        with _naming(shard):
                            summary.add(record, new.take(number, record), choice)
                        on_log(record.body.nbytes)
                    await new.wait_below()
                summary.end(shard)
            _check_choice(shards, choice)
            await new.finish()
            await new.publish([])

    with builder:
        asyncio.run(take_logs())
    return summaries


@contextmanager
def _naming(shard: OpenShard) -> Iterator[None]:
    """Name the shard in an error about a record."""
    try:
        yield
    except CorruptionError as exc:
        raise CorruptionError(f"{shard.name}: {exc}") from exc


def _some_at_a_time(records: Iterator[LogRecord]) -> Iterator[list[LogRecord]]:
    some: list[LogRecord] = []
    size_bytes = 0
    for record in records:
        some.append(record)
        size_bytes += record.body.nbytes
        if size_bytes > _RECORDS_BYTES or len(some) == _MOST_RECORDS:
            yield some
            some, size_bytes = [], 0
    if some:
        yield some


def _check_choice(shards: Sequence[OpenShard], choice: TableChoice) -> None:
    choice.check({table.spec.fqn for shard in shards for table in shard.state.catalog})
