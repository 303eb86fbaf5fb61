"""Shards in memory for schedules of moves: a log, what follows from it, and what a kill or a lost disk leaves of it."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import random
from collections.abc import Callable, Coroutine, Iterable
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from headrace.paramserver.ingest.partitions import ShardPartitions
from headrace.paramserver.log import sessions
from headrace.paramserver.log.interface import KIND_BATCH, KIND_HELLO
from headrace.paramserver.reshard.source_moves import Copied, FollowedRecord, SourceMoves, Tail
from headrace.schemas.errors import (
    FencedError,
    SequenceGapError,
    UnavailableError,
)
from headrace.schemas.move_records import (
    ImportRecord,
    LoadRecord,
    MapRecord,
    Move,
    MoveRecord,
    MoveStep,
    Position,
    decode_move_record,
    step_of,
)
from headrace.schemas.partition_map import PartitionMap
from headrace.schemas.tables import DType, TableSpec
from headrace.schemas.version import NO_FLOOR, Version

__all__ = ["NUM_PARTITIONS", "ROWS", "Entry", "ModelShard", "Row", "Rows", "partition_of"]

NUM_PARTITIONS = 8
_SPEC = TableSpec(fqn="t", num_rows=0, dim=1, dtype=DType.FLOAT32)
ROWS = range(32)
_SESSIONS = sessions.Sessions({})
_PARTITIONS = PartitionMap.first(2, NUM_PARTITIONS).partitions_of_rows(_SPEC.seed, np.arange(len(ROWS)))
_partition_of: list[int] = _PARTITIONS.tolist()
Key = tuple[str, int]
"""Table and row."""


def partition_of(key: Key) -> int:
    """Return the partition of a row."""
    return _partition_of[key[1]]


@dataclass(frozen=True, slots=True)
class Row:
    """A row; a tombstone has no value."""

    version: Version
    value: int | None
    identity: int


@dataclass(slots=True)
class Session(sessions.Session):
    """What a shard keeps of a client; one that came with a move is imported until the client says hello.

    `newest_step` is the newest one of which the client sent rows to this shard.
    """

    ended: Version = (0, -1)
    is_imported: bool = False
    newest_step: int = -1


@dataclass(slots=True)
class Rows:
    """Rows and all that belongs to them, as a function of records: a shard's, or those that are on their way in."""

    rows: dict[Key, Row] = field(default_factory=dict)
    claims: dict[Key, dict[int, Version]] = field(default_factory=dict)
    floors: dict[str, Version] = field(default_factory=dict)
    epochs: dict[str, int] = field(default_factory=dict)
    sessions: dict[str, Session] = field(default_factory=dict)
    scalars: dict[str, tuple[Version, int]] = field(default_factory=dict)

    def cut(self, partitions: Iterable[int]) -> Rows:
        """Return a copy with the rows of some partitions only."""
        wanted = set(partitions)
        return Rows(
            rows={key: row for key, row in self.rows.items() if partition_of(key) in wanted},
            claims={key: dict(claims) for key, claims in self.claims.items() if partition_of(key) in wanted},
            floors=dict(self.floors),
            epochs=dict(self.epochs),
            sessions={
                name: replace(each, last_client_seq=0, ended_client_seq=0, newest_step=-1, is_imported=True)
                for name, each in self.sessions.items()
            },
            scalars=dict(self.scalars),
        )

    def remove(self, partitions: Iterable[int]) -> None:
        """Remove rows and claims of partitions."""
        wanted = set(partitions)
        for of in (self.rows, self.claims):
            for key in [key for key in of if partition_of(key) in wanted]:
                del of[key]  # type: ignore[attr-defined]

    def merge(self, other: Rows) -> None:
        """Take over rows that came with a move, and what came with them."""
        self.rows |= other.rows
        self.claims |= other.claims
        for table, floor in other.floors.items():
            self.floors[table] = max(self.floors.get(table, NO_FLOOR), floor)
        for run, epoch in other.epochs.items():
            self.epochs[run] = max(self.epochs.get(run, 0), epoch)
        for name, session in other.sessions.items():
            if name not in self.sessions or self.sessions[name].epoch < session.epoch:
                self.sessions[name] = copy(session)
        for table, scalar in other.scalars.items():
            self.scalars[table] = max(self.scalars.get(table, scalar), scalar)

    def take(self, header: dict[str, Any], epoch: int, body: Any, *, is_import: bool = False) -> None:
        """Apply a batch or a hello."""
        self.epochs[header["run"]] = max(self.epochs.get(header["run"], 0), epoch)
        session = self.sessions.get(header["client"])
        if session is None or session.epoch < epoch:
            session = Session(header["run"], header["client"], epoch, rank=0, world_size=1, is_imported=is_import)
            self.sessions[header["client"]] = session
        session.is_imported = is_import
        if header["kind"] == KIND_HELLO:
            for table, floor in header.get("floors", {}).items():
                self.floors[table] = max(self.floors.get(table, NO_FLOOR), tuple(floor))
                self._drop_tombstones(table)
            return
        version = (header["version_epoch"], header["step"])
        if is_import:
            session.last_client_seq = 0
        else:
            marks = {name: header[name] for name in ("client_seq", "step", "ends_step", "is_exact_cut")}
            _SESSIONS.advance(session, time_us=0, **marks)
            session.newest_step = max(session.newest_step, header["step"] if body else -1)
        if header["ends_step"] and not is_import:
            session.ended = max(session.ended, version)
        for table, row, value, identity in body:
            self._put((table, row), Row(version, value, identity), header)
        for table in header["scalars"]:
            self.scalars[table] = max(self.scalars.get(table, (version, 0)), (version, header["step"]))

    def _put(self, key: Key, row: Row, header: dict[str, Any]) -> None:
        claims = self.claims.setdefault(key, {})
        claims[row.identity] = max(claims.get(row.identity, row.version), row.version)
        if header["conditional"]:
            present = self.rows.get(key)
            if key[0] in header["below_floor"] and (present is None or present.value is None):
                return
            if present is not None and present.version > row.version:
                return
        self.rows[key] = row

    def _drop_tombstones(self, table: str) -> None:
        floor = self.floors[table]
        for key in [k for k, row in self.rows.items() if k[0] == table and row.value is None and row.version <= floor]:
            del self.rows[key]

    def digest(self) -> bytes:
        """Return a digest of rows with versions, tombstones and claims."""
        text = repr((sorted(self.rows.items()), sorted((k, sorted(c.items())) for k, c in self.claims.items())))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


@dataclass(frozen=True, slots=True)
class Entry:
    """A record of a log."""

    mark: int
    epoch: int
    header: dict[str, Any]
    body: Any


class ModelShard:
    """A shard; a `SourceShard` and a `DestinationShard`. `rng` draws how long disks take, and what a kill leaves.

    Attributes:
        log: Its records; seq n is at n - 1.
        durable_seq: The last durable one.
        term: Rises with each start.
        is_up: Its process runs.
        is_serving: It answers; a shard that was set back asks its peers first.
        on_take: Told of every record that takes its place: shard, seq, record of a move or None.
        num_setbacks: How often it was set back.
        ended: Of each move that was activated here, the steps that have come with its sessions, by client.
    """

    def __init__(self, number: int, first: PartitionMap, rng: random.Random, commit_s: float) -> None:
        self.number, self._first, self._rng, self._commit_s = number, first, rng, commit_s
        self.log: list[Entry] = []
        self.durable_seq = 0
        self.term = self.num_setbacks = 0
        self.is_up = self.is_serving = False
        self.on_take: Callable[[ModelShard, int, Any], None] = lambda *_: None
        self.on_start: Callable[[ModelShard], None] = lambda _: None
        self.aborts: set[str] = set()
        self.copying = contextlib.nullcontext()
        self.tasks: dict[asyncio.Task[Any], None] = {}  # in order: a kill cancels them the same way each time
        self.running: set[str] = set()  # moves that are driven
        self._mark = 0
        self.safe_seq = 0  # the archive has the log up to here
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self.start()

    # Its life.

    def start(self) -> None:
        """Start the process: all state is made of the log."""
        self.term += 1
        self._mark = self._rng.getrandbits(40) + 1
        self.state, self.incoming = Rows(), dict[str, Rows]()
        self.ended = dict[str, dict[str, Version]]()
        self.partitions = ShardPartitions(
            {}, shard=self.number, first=self._first, durable_seq=lambda: self.durable_seq
        )
        self.source = SourceMoves(self)
        self.aborts.clear()
        self.running.clear()
        for seq, entry in enumerate(self.log, 1):
            self._apply(seq, entry)
        self.is_up = True
        self.on_start(self)

    def kill(self) -> None:
        """Kill the process; records that are not durable may or may not be there later."""
        self.is_up = self.is_serving = False
        del self.log[self._rng.randint(self.durable_seq, len(self.log)) :]
        self.durable_seq = len(self.log)
        for task in list(self.tasks):
            task.cancel()
        self.tasks.clear()
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(UnavailableError("killed"))
                future.exception()

    def lose_tail(self) -> None:
        """Put the shard back to what the archive has, or a little more. REQUIRES: killed."""
        del self.log[self._rng.randint(min(self.safe_seq, len(self.log)), len(self.log)) :]
        self.durable_seq = len(self.log)
        self.num_setbacks += 1

    def spawn(self, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run something until it ends or the process is killed."""
        task = asyncio.ensure_future(work)
        self.tasks[task] = None
        task.add_done_callback(lambda done: self.tasks.pop(done, None))
        return task

    # The log.

    def _put(self, epoch: int, header: dict[str, Any], body: Any) -> int:
        entry = Entry(self._mark, epoch, header, body)
        self.log.append(entry)
        seq = len(self.log)
        record = self._apply(seq, entry)
        self.on_take(self, seq, record)
        asyncio.get_running_loop().call_later(self._commit_s * self._rng.uniform(0.2, 1), self._commit, self.term, seq)
        return seq

    def _commit(self, term: int, seq: int) -> None:
        if term != self.term or not self.is_up:
            return
        self.durable_seq = max(self.durable_seq, seq)
        for wanted, future in self._waiting:
            if wanted <= self.durable_seq and not future.done():
                future.set_result(None)
        self._waiting = [each for each in self._waiting if not each[1].done()]

    def position(self, seq: int) -> Position:
        """Return the position of a record."""
        return Position(seq=seq, mark=self.log[seq - 1].mark if seq else None)

    async def durable(self, seq: int) -> Position:
        if self.durable_seq < seq:
            future = asyncio.get_running_loop().create_future()
            self._waiting.append((seq, future))
            await future
        return self.position(seq)

    async def append(
        self, record: MoveRecord | LoadRecord | ImportRecord | MapRecord, *, epoch: int = 0, body: Any = None
    ) -> Position:
        await asyncio.sleep(self._rng.choice((0, 0, 0.01)))  # other records may come first
        self.partitions.check(record)
        return await self.durable(self._put(epoch, record.header(), body))

    def _apply(self, seq: int, entry: Entry) -> Any:
        if step_of(entry.header) is None:
            self.state.take(entry.header, entry.epoch, entry.body)
            return None
        record = decode_move_record(entry.header)
        self.partitions.take(record, seq)
        if isinstance(record, ImportRecord):
            if record.is_shared_state:
                self.incoming[record.move_id].merge(self._shared(entry.body, record.move_id))
            else:
                self.incoming[record.move_id].take(dict(record.record), entry.epoch, entry.body, is_import=True)
        elif isinstance(record, LoadRecord):
            progress = self.partitions.moves.find(record.move_id)
            assert progress is not None
            contents = self._loaded(entry.body, progress.move)
            self.incoming[record.move_id].merge(self._shared(contents, record.move_id))
        elif isinstance(record, MoveRecord):
            self._apply_move(record)
        return record

    def _apply_move(self, record: MoveRecord) -> None:
        move = record.move
        match record.step:
            case MoveStep.COPY:
                self.incoming[move.move_id] = Rows()
            case MoveStep.ACTIVATE:
                # A shard that was set back may have lost that it had purged them once.
                self.state.remove(move.partitions)
                arrived = self.incoming.pop(move.move_id)
                self.ended[move.move_id] = {name: each.ended for name, each in arrived.sessions.items()}
                self.state.merge(arrived)
            case MoveStep.PURGE if move.source == self.number:
                self.state.remove(move.partitions)
            case MoveStep.PURGE:
                self.incoming.pop(move.move_id, None)

    def _loaded(self, contents: Rows, move: Move) -> Rows:
        return contents.cut(move.partitions)

    def _shared(self, contents: Rows, move_id: str) -> Rows:
        """Return what has come with a move, without the steps of its source unless they may be kept."""
        if self.partitions.can_keep_steps(move_id):
            return contents
        sessions = contents.sessions.items()
        return replace(contents, sessions={name: replace(each, ended=(each.epoch, -1)) for name, each in sessions})

    # As the source of a move.

    def hear(self, other: PartitionMap) -> None:
        """Merge a map that another shard has told, and keep it in the log."""
        if (heard := self.partitions.heard(other.encode())) is not None:
            self._put(0, heard.header(), None)

    async def copy(self, move: Move) -> Copied:
        seq, contents = len(self.log), self.state.cut(move.partitions)
        return Copied(position=await self.durable(seq), contents=contents)

    async def follow(self, move: Move, after: Position, up_to_seq: int) -> Tail | None:
        if after.seq > self.durable_seq or self.position(after.seq) != after:
            return None
        if up_to_seq <= after.seq:
            return Tail(records=(), position=after)
        if self.durable_seq == after.seq:
            await self.durable(after.seq + 1)
        end = min(self.durable_seq, up_to_seq, after.seq + 4)
        found = []
        for seq, entry in enumerate(self.log[after.seq : end], after.seq + 1):
            header = entry.header
            if step_of(header) is MoveStep.ACTIVATE:
                # Fences, floors, sessions and scalars came with another move's rows. They only rise, so now is as good.
                shared = self.state.cut(())
                await self.durable(len(self.log))
                found.append(FollowedRecord(position=self.position(seq), epoch=0, header=header, body=shared))
                continue
            rows = entry.body if header["kind"] == KIND_BATCH else ()
            body = tuple(each for each in rows if partition_of(each[:2]) in move.partitions)
            if header["kind"] == KIND_HELLO or (
                header["kind"] == KIND_BATCH and (body or header["scalars"] or header["ends_step"])
            ):
                found.append(FollowedRecord(position=self.position(seq), epoch=entry.epoch, header=header, body=body))
        return Tail(records=tuple(found), position=self.position(end))

    async def digest(self, move: Move) -> tuple[Position, bytes]:
        seq, digest = len(self.log), self.state.cut(move.partitions).digest()
        return await self.durable(seq), digest

    # As the destination of a move.

    async def import_records(self, move: Move, records: Iterable[FollowedRecord]) -> None:
        for each in records:
            record = ImportRecord(move_id=move.move_id, source=move.source, position=each.position, record=each.header)
            self.partitions.check(record)
            self._put(each.epoch, record.header(), each.body)
        await self.durable(len(self.log))

    async def load(self, move: Move, copied: Copied) -> None:
        halves = move.partitions[::2], move.partitions[1::2]
        for number, half in enumerate(halves, 1):
            record = LoadRecord(move_id=move.move_id, number=number, is_last=half is halves[-1])
            await asyncio.sleep(self._rng.uniform(0, 0.1))
            self.partitions.check(record)
            self._put(0, record.header(), copied.contents.cut(half))
        await self.durable(len(self.log))

    async def digest_incoming(self, move: Move, like: bytes) -> bytes:
        """As `DestinationShard.digest`."""
        return self.incoming[move.move_id].digest()

    async def wait_safe(self, move: Move) -> None:
        seq = self.durable_seq
        await asyncio.sleep(self._rng.uniform(0, 0.2))
        self.safe_seq = max(self.safe_seq, seq)  # another move may have waited for more

    def is_aborted(self, move: Move) -> bool:
        return move.move_id in self.aborts

    # Its clients.

    def served(self) -> list[int]:
        """Return the partitions that the shard reads and writes."""
        mask = self.partitions.served(_SPEC, np.arange(len(ROWS)), is_write=True)
        if mask is None:
            return self._first.partitions_of(self.number).tolist()
        return np.unique(_PARTITIONS[mask]).tolist()

    def check_rows(self, rows: Iterable[int], *, is_write: bool = False) -> None:
        """Check that the shard may answer for rows, or takes them."""
        self.partitions.check_rows(_SPEC, np.array(sorted(rows), np.int64), is_write=is_write)

    async def hello(self, run: str, client: str, epoch: int, floors: dict[str, Version] | None = None) -> Session:
        """Open a session; return it as far as it is durable."""
        self._fence(run, epoch)
        session = self.state.sessions.get(client)
        if floors or session is None or session.epoch != epoch or session.is_imported:
            header = {"kind": KIND_HELLO, "run": run, "client": client}
            self._put(epoch, header | ({"floors": floors} if floors else {}), None)
        told = copy(self.state.sessions[client])
        await self.durable(len(self.log))
        return told

    def _fence(self, run: str, epoch: int) -> None:
        if epoch < (current := self.state.epochs.get(run, 0)):
            raise FencedError(f"epoch {epoch} is fenced", epoch=current)

    async def write(self, header: dict[str, Any], epoch: int, body: Any) -> int:
        """Take a batch; return its seq."""
        self._fence(header["run"], epoch)
        session = self.state.sessions.get(header["client"])
        if session is None or session.epoch != epoch or session.is_imported:
            raise UnavailableError("say hello first")
        expected = session.last_client_seq + 1
        if header["client_seq"] > expected:
            raise SequenceGapError("a gap", expected_seq=expected)
        if header["client_seq"] < expected:
            await self.durable(len(self.log))
            return len(self.log)
        self.check_rows({row for _, row, *_ in body}, is_write=True)
        version = (header["version_epoch"], header["step"])
        below = [each[0] for each in body if version <= self.state.floors.get(each[0], NO_FLOOR)]
        header = header | {"scalars": sorted({each[0] for each in body})}
        is_judged = header["conditional"] and not header["trains"]  # a trainer's rows always count
        header = header | {"below_floor": sorted(set(below)) if is_judged else []}
        seq = self._put(epoch, header, body)
        await self.durable(seq)
        return seq

    async def read(self, key: Key) -> Row | None:
        """Return a row."""
        self.check_rows({key[1]})
        row = self.state.rows.get(key)
        await self.durable(len(self.log))
        return row
