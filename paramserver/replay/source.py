"""The source of a replay: the records of a server's update logs that it takes, and the specs of their tables.

Reads only and takes no lock, so the server may be running. Records are checked as they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, KeysView
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.paramserver.log.inspection import Range, find_logs, widen
from headrace.paramserver.log.interface import KIND_BATCH, KIND_HELLO, LogRecord, is_housekeeping
from headrace.paramserver.log.opening import open_source
from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.store.catalog import Catalog, unpack_spec
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.text import describe_near
from headrace.schemas.errors import (
    ConfigError,
    CorruptionError,
    GoneError,
    HeadraceError,
    ProtocolError,
    UnknownTableError,
)
from headrace.schemas.idl import idl
from headrace.schemas.messages import decode_header, decode_struct
from headrace.schemas.table_names import is_among, matches, model_of
from headrace.schemas.tables import TableSpec
from headrace.schemas.version import MAX_EPOCH

__all__ = ["ReplayBatch", "ReplayRange", "ReplaySource", "ReplaySummary", "SourceLog", "TableSummary"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplayRange:
    """The records, and the tables in them, that a replay takes. Bounds are inclusive; None leaves a side open.

    Attributes:
        from_seq: First position in the log; seqs limit the log of one shard only.
        from_step: First step of the trainer.
        since_us: Earliest wall clock of the trainer, microseconds since 1970.
        tables: Names or paths; empty takes all.
        model: Only this model's tables; None takes all.
    """

    from_seq: int | None = None
    to_seq: int | None = None
    from_step: int | None = None
    to_step: int | None = None
    since_us: int | None = None
    until_us: int | None = None
    tables: frozenset[str] = frozenset()
    model: str | None = None

    def __post_init__(self) -> None:
        for first, last, names in (
            (self.from_seq, self.to_seq, "--from-seq is above --to-seq"),
            (self.from_step, self.to_step, "--from-step is above --to-step"),
            (self.since_us, self.until_us, "--since is later than --until"),
        ):
            if first is not None and last is not None and first > last:
                raise ConfigError(f"{names}: the range is empty")

    @property
    def takes_beginning(self) -> bool:
        """Whether the range takes all records up to its end."""
        return self.from_seq is self.from_step is self.since_us is None

    def is_within(self, header: dict[str, Any]) -> bool:
        """Return whether a batch's record is within steps and times."""
        return _is_within(header["step"], self.from_step, self.to_step) and _is_within(
            header["time_us"], self.since_us, self.until_us
        )

    def takes(self, header: dict[str, Any]) -> bool:
        """Return whether a batch's record is within steps and times and has one of the tables."""
        return self.is_within(header) and (
            any(map(self.takes_table, header["tables"])) or not (self.tables or self.model)
        )

    def takes_table(self, fqn: str) -> bool:
        """Return whether a table is wanted."""
        return (self.model in (None, model_of(fqn))) and (not self.tables or is_among(fqn, self.tables))


@dataclass(frozen=True, slots=True)
class ReplayBatch:
    """The part of one record that a replay takes.

    Attributes:
        epoch: With `step`, the version of all rows.
        time_us: The trainer's wall clock, microseconds since 1970.
        deltas: `idl.TableDelta` structs of the tables taken; their columns are views.
        size_bytes: Size of the record's body.
    """

    seq: int
    epoch: int
    step: int
    time_us: int
    deltas: list[Any]
    size_bytes: int


@dataclass(slots=True)
class TableSummary:
    """Counts of one table in a replay. A row counts as often as it was written."""

    num_rows: int = 0
    num_deleted: int = 0
    epochs: Range | None = None
    steps: Range | None = None


@dataclass(slots=True)
class ReplaySummary:
    """Counts of a replay: records of the logs, bytes of their bodies, tables by name, the trainer's wall clocks."""

    num_records: int = 0
    size_bytes: int = 0
    tables: dict[str, TableSummary] = field(default_factory=dict)
    times_us: Range | None = None

    @property
    def num_rows(self) -> int:
        """Rows of all tables, deleted ones included."""
        return sum(table.num_rows + table.num_deleted for table in self.tables.values())

    def add(self, batch: ReplayBatch) -> None:
        """Count a batch."""
        self.num_records += 1
        self.size_bytes += batch.size_bytes
        self.times_us = widen(self.times_us, batch.time_us)
        for delta in batch.deltas:
            table = self.tables.setdefault(delta.fqn, TableSummary())
            table.num_rows += len(delta.row_ids) // 8
            table.num_deleted += len(delta.deleted_row_ids or b"") // 8
            table.epochs = widen(table.epochs, batch.epoch)
            table.steps = widen(table.steps, batch.step)


class SourceLog:
    """One shard's log at `path`, limited to the range of the replay: `first_seq` to `last_seq`."""

    def __init__(self, path: Path, wanted: ReplayRange) -> None:
        """Open a log for reading. Raises as `ReplaySource`."""
        self.path = path
        self._source = open_source(path, to_seq=wanted.to_seq)
        self.log_id = self._source.log_id
        self._begin, end = self._source.first_seq, self._source.last_seq
        self.first_seq = self._begin if wanted.from_seq is None else wanted.from_seq
        self.last_seq = end if wanted.to_seq is None else min(end, wanted.to_seq)
        if self.first_seq < self._begin:
            raise GoneError(
                f"{path}: --from-seq {self.first_seq}: the log begins at seq {self._begin}; earlier records have been "
                "removed"
            )

    @property
    def nonces(self) -> list[int]:
        """The nonces of the range, each once. They differ between logs that share only their beginning."""
        # A log that grows has more segments of the same nonce; an archived one has many.
        return list(dict.fromkeys(self._source.nonces(self.first_seq, self.last_seq)))

    def read(self) -> Iterator[LogRecord]:
        """Yield the records of the range, checked."""
        return self._source.read(self.first_seq, self.last_seq)

    def read_before(self) -> Iterator[LogRecord]:
        """Yield the records before the range, checked."""
        return self._source.read(self._begin, self.first_seq - 1)


class _Fillings:
    """Tells which tables one log makes complete, as the shard did that wrote it."""

    def __init__(self) -> None:
        self.begun: set[str] = set()  # by name; those that were dropped since are not there
        self.whole: set[str] = set()
        self.updated_only: set[str] = set()  # of `begun`; the trainer sends no other rows
        self._sessions = Sessions({})
        self._filling: dict[str, tuple[int, int]] = {}  # epoch, and the step after which the rows are there

    def take(self, record: LogRecord, is_kept: Callable[[str], bool]) -> None:
        header = record.header
        if is_housekeeping(header):
            return
        if header["kind"] == KIND_HELLO:
            if record.epoch >= self._sessions.epoch_of(header["run"]):
                place = header["rank"], header["world_size"]
                self._sessions.open(header["run"], header["client"], record.epoch, *place)
            fills = {name: (record.epoch, step) for name, step in header.get("fills", {}).items() if is_kept(name)}
            self._filling |= fills
            self.begun |= fills.keys()
            self.whole -= fills.keys()
            self.updated_only -= fills.keys()
            for name in filter(is_kept, header.get("updated_only", ())):
                self._filling.pop(name, None)
                self.begun.add(name)
                self.whole.discard(name)
                self.updated_only.add(name)
            self._end(filter(is_kept, header.get("complete", ())))
        elif header["kind"] == KIND_BATCH and header["ends_step"]:
            session = self._sessions.find(header["run"], header["client"])
            if session is None or session.epoch != record.epoch:
                return  # its hello was removed from the log
            step, time_us = header["step"], header["time_us"]
            seq = header["client_seq"]
            self._sessions.advance(
                session, client_seq=seq, step=step, time_us=time_us, ends_step=True, is_exact_cut=False
            )
            ended = ((name, self._sessions.watermark_of(of[0]) > of[1]) for name, of in self._filling.items())
            self._end([name for name, is_whole in ended if is_whole])

    def _end(self, names: Iterable[str]) -> None:
        for name in names:
            self._filling.pop(name, None)
            self.updated_only.discard(name)
            self.whole.add(name)


class ReplaySource:
    """The logs of a replay.

    Thread: any; everything blocks.

    Attributes:
        logs: In the order of their shards.
        wanted: Which records and tables.
        specs: Specs of the tables found, by name, without those that the range drops; complete after `summarize`.
    """

    def __init__(self, path: Path, wanted: ReplayRange, *, tables: Iterable[TableSpec] = ()) -> None:
        """Find the logs at or below a path: the directory of a server, of a shard or of a log.

        `tables` are those that the server has had, of which the logs may have no record and no store beside them.

        Raises:
            ConfigError: There is no log, or there are several and the range is one of seqs.
            GoneError: `from_seq` has been removed.
            StorageError: A file cannot be read.
            CorruptionError: A segment is damaged or missing.
        """
        paths = find_logs(path)
        if len(paths) > 1 and (wanted.from_seq is not None or wanted.to_seq is not None):
            raise ConfigError(
                f"--from-seq and --to-seq count in one shard's log, and {path} holds {len(paths)}: name one of them, "
                f"such as {paths[0]}"
            )
        self.wanted = wanted
        self.logs = [SourceLog(log, wanted) for log in paths]
        self.specs: dict[str, TableSpec] = {}
        self._said_in: dict[str, int] = {}  # the epoch whose word on a table's uses counts
        self._had = tuple(tables)
        # By log and name, the seq of the last drop in the range: rows from before it belong to nothing.
        self._drops: dict[Path, dict[str, int]] = {log.path: {} for log in self.logs}
        self._fillings: dict[Path, _Fillings] = {}

    @property
    def incomplete(self) -> set[str]:
        """Tables of `filled` of which the range may lack rows; known after `summarize`."""
        return self.filled - self._all_taken(lambda each: each.whole)

    @property
    def updated_only(self) -> set[str]:
        """Tables of `incomplete` that lack only rows that the trainer does not send; known after `summarize`."""
        return self.incomplete & self._all_taken(lambda each: each.whole | each.updated_only)

    @property
    def filled(self) -> set[str]:
        """Tables that lack rows somewhere in the range; known after `summarize`."""
        begun = set[str]().union(*(each.begun for each in self._fillings.values()))
        return begun & self.specs.keys()

    def _all_taken(self, names_of: Callable[[_Fillings], set[str]]) -> set[str]:
        """Return those of the tables of `filled` that all logs name, if the range has all their rows."""
        if not self.wanted.takes_beginning:
            return set()
        return self.filled.intersection(*map(names_of, self._fillings.values()))

    def summarize(self, *, on_progress: Callable[[int], None] = lambda _: None) -> ReplaySummary:
        """Read and check the whole range once, and collect the tables' specs.

        `on_progress` is called with the number of bytes read since the last call.

        Raises:
            ConfigError: The range has no rows.
            UnknownTableError: A requested table is not in the logs.
            CorruptionError: A record is damaged, with file and offset, or is not a shard's.
        """
        summary = self._summarize(on_progress)
        if any(self._drops.values()):  # known only now, and rows from before them belong to nothing
            self.specs.clear()
            self._said_in.clear()
            summary = self._summarize(lambda _: None)
        self._complete_specs(summary.tables.keys())
        if unknown := self._unknown():
            near = describe_near(unknown[0], self.specs)
            raise UnknownTableError(f"--table {unknown[0]!r}: no such table in the log; {near}")
        if not summary.num_records:
            seqs = ", ".join(f"{log.path}: seq {log.first_seq} to {log.last_seq}" for log in self.logs)
            raise ConfigError(f"nothing to replay: no record with rows is in that range ({seqs})")
        if lost := sorted(summary.tables.keys() - self.specs.keys()):
            raise CorruptionError(f"the spec of table {lost[0]!r} is neither in the log nor in the store beside it")
        return summary

    def _summarize(self, on_progress: Callable[[int], None]) -> ReplaySummary:
        summary = ReplaySummary()
        for log in self.logs:
            notes = self._fillings[log.path] = _Fillings()
            for batch in self._read(log, on_progress, notes):
                summary.add(batch)
        return summary

    def batches(self, log: SourceLog, *, on_progress: Callable[[int], None] = lambda _: None) -> Iterator[ReplayBatch]:
        """Yield the batches of one log in the range, in order. Raises as `summarize`."""
        return self._read(log, on_progress)

    def _read(
        self, log: SourceLog, on_progress: Callable[[int], None], notes: _Fillings | None = None
    ) -> Iterator[ReplayBatch]:
        for record in log.read():
            on_progress(record.body.nbytes)
            if notes is not None:
                self._note_filling(notes, log, record)
            batch = self._batch_of(log, record)
            if batch is not None:
                yield batch

    def _batch_of(self, log: SourceLog, record: LogRecord) -> ReplayBatch | None:
        header = record.header
        if is_housekeeping(header):
            return None
        try:
            if header["kind"] == KIND_HELLO:
                self._note_drops(log, record.seq, header)
                self._add_specs(header, log, record)
                return None
            if header["kind"] != KIND_BATCH:
                raise ValueError(f"of kind {header['kind']!r}, which this version does not know")
            tables = [name for name in header["tables"] if self._is_kept(log, record.seq, name)]
            if not self.wanted.takes(header | {"tables": tables}):
                return None
            offset = decode_header(record.body).body_offset
            request = decode_struct(idl.ParameterServer.setEmbeddings_args, record.body, offset).request
        except (ProtocolError, ValueError, TypeError, KeyError) as exc:
            raise CorruptionError(f"{log.path}: record {record.seq} is not a batch of a shard: {exc}") from exc
        deltas = [delta for delta in request.deltas if delta.fqn in tables and self.wanted.takes_table(delta.fqn)]
        if not any(len(delta.row_ids) or delta.deleted_row_ids for delta in deltas):
            return None  # the end of a step, without rows
        return ReplayBatch(record.seq, request.epoch, request.step, request.time_us, deltas, record.body.nbytes)

    def _note_filling(self, notes: _Fillings, log: SourceLog, record: LogRecord) -> None:
        if record.header.get("kind") == KIND_BATCH and not self.wanted.is_within(record.header):
            return
        try:
            notes.take(record, lambda name: self._is_kept(log, record.seq, name))
        except (HeadraceError, ValueError, TypeError, KeyError) as exc:
            raise CorruptionError(f"{log.path}: record {record.seq} is not a record of a shard: {exc}") from exc

    def _note_drops(self, log: SourceLog, seq: int, header: dict[str, Any]) -> None:
        """Note what a hello drops."""
        drops = self._drops[log.path]
        for name in header.get("dropped", ()):
            drops[name] = max(seq, drops.get(name, 0))

    def _is_kept(self, log: SourceLog, seq: int, name: str) -> bool:
        """Return whether the range does not drop the table that has a name at a position."""
        return seq >= self._drops[log.path].get(name, 0)

    def _add_specs(self, header: dict[str, Any], log: SourceLog, record: LogRecord) -> None:
        for spec in map(unpack_spec, header["tables"]):
            if self._is_kept(log, record.seq, spec.fqn):
                self._add_spec(spec, record.epoch)

    def _add_spec(self, spec: TableSpec, epoch: int = MAX_EPOCH) -> None:
        """Note what a hello of an epoch says of a table, or what is known besides the range; of uses the newest."""
        known = self.specs.setdefault(spec.fqn, spec)
        is_newest = spec.fqn not in self._said_in or self._said_in[spec.fqn] <= epoch < MAX_EPOCH
        if is_newest:
            self._said_in[spec.fqn] = epoch
        table = spec if spec.is_growth_of(known) else known
        self.specs[spec.fqn] = table.described(spec.uses if is_newest else known.uses)

    def _unknown(self) -> list[str]:
        """Return the wanted names and patterns that mean no table found."""
        wanted = sorted(self.wanted.tables)
        return [pattern for pattern in wanted if not any(matches(name, pattern) for name in self.specs)]

    def _complete_specs(self, needed: KeysView[str]) -> None:
        """Find tables that were registered before the range, in the store's catalog or in earlier records."""

        def is_complete() -> bool:
            return needed <= self.specs.keys() and not self._unknown()

        if is_complete():
            return
        for spec in self._had:
            self._add_spec(spec)
        for log in self.logs:
            if is_complete():
                return
            # Retention removes a record only after the store has it, so the store knows its tables.
            if (log.path.parent / "store" / "CURRENT").is_file():
                store = RowStore.open_read_only(log.path.parent / "store")
                try:
                    for table in Catalog(store.read_meta()):
                        self._add_spec(table.spec)
                finally:
                    store.close()
            if is_complete():
                return
            for record in log.read_before():
                if record.header.get("kind") == KIND_HELLO:
                    self._add_specs(record.header, log, record)


def _is_within(value: int, first: int | None, last: int | None) -> bool:
    return (first is None or value >= first) and (last is None or value <= last)
