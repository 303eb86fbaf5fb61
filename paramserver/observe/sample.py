"""The figures of a shard at one moment. Metrics, the status page and `headrace status` all show these.

A client gets a `ShardSample` from a status reply. The supervisor gets one with `ShardDetail` over a socket pair, which
its shard process inherits like the listening socket. Only these two have an end of it, so it needs no port, file name
or token. The supervisor writes one byte; the shard replies with a length and that much JSON, or with length 0 if it has
no sample. One request at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from dataclasses import dataclass
from typing import Any, Self

from headrace.paramserver.reading.dense_parts import dense_sets, part_bytes
from headrace.paramserver.store.catalog import pack_spec, unpack_spec
from headrace.paramserver.system.event_loop import background_task
from headrace.paramserver.system.log_lines import fact
from headrace.schemas.errors import HeadraceError, ProtocolError, UnavailableError
from headrace.schemas.idl import idl, spec_from_idl
from headrace.schemas.table_lacks import merged_lack, what_lacks
from headrace.schemas.tables import TableSpec

__all__ = [
    "CacheSample",
    "DenseSample",
    "ExpirySample",
    "FollowerSample",
    "HistogramSample",
    "LogSample",
    "SampleReceiver",
    "ShardDetail",
    "ShardSample",
    "ShardState",
    "SnapshotSample",
    "StandbySample",
    "TableSample",
    "WriterSample",
    "all_followers",
    "merge_dense",
    "merge_tables",
    "merge_writers",
    "receive_samples",
    "send_samples",
]

# Of servers that do not tell how long a part waits until it is closed, and how long storing one may then take.
_ARCHIVE_SEGMENT_S, _ARCHIVE_UPLOAD_S = 10.0, 50.0

_log = logging.getLogger(__name__)

_ASK = b"?"
_LENGTH = struct.Struct("<I")
_MAX_SAMPLE_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class TableSample:
    """A table or dense tensor, the approximate number of its rows on a shard, and the run that owns it; empty if none.

    `owner_epoch` is that of the ownership, 0 without one; an owner that has ended writes no more. The owner of a table
    that `is_backfilled` is a backfill. `lacks` is as of `what_lacks`. Names are users': escape them for display.
    """

    spec: TableSpec
    num_rows_estimate: int
    owner: str = ""
    owner_epoch: int = 0
    lacks: str = ""
    has_owner_ended: bool = False
    is_backfilled: bool = False

    @classmethod
    def of_table(cls, spec: TableSpec, num_rows_estimate: int, owner: Any, filling: Any) -> Self:
        """Return the sample of a table, given its owner and what it lacks, of the catalog or of the wire, or None."""
        lacks = what_lacks(filling)
        if owner is None:
            return cls(spec, num_rows_estimate, lacks=lacks)
        kind = {"has_owner_ended": bool(owner.has_ended), "is_backfilled": bool(owner.is_backfill)}
        return cls(spec, num_rows_estimate, owner.run, owner.epoch, lacks, **kind)

    @property
    def states(self) -> str:
        """The states, such as `momentum1 float32[1], exp_avg float32[dim]`; `none` without any."""
        states = (f"{s.name} {s.dtype.name.lower()}[{s.width or 'dim'}]" for s in self.spec.states)
        return ", ".join(states) or "none"

    @property
    def dtype(self) -> str:
        """The weights' type, such as `float32`."""
        return self.spec.dtype.name.lower()


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseSample:
    """The dense part of a model: its current tensors, the size of their weights, and the run that owns them."""

    model: str
    num_tensors: int
    size_bytes: int
    owner: str


@dataclass(frozen=True, kw_only=True, slots=True)
class WriterSample:
    """A client that writes. An old shard reports no `rank` and `world_size`; `step` is -1 before the first.

    `cost_percent`, `is_cost_bound`, `age_s`, `num_unstreamed` and `has_ended` are those of the IDL's `ClientStatus`.
    """

    run: str
    client: str
    epoch: int
    step: int
    is_connected: bool
    rank: int | None = None
    world_size: int | None = None
    cost_percent: float | None = None
    is_cost_bound: bool | None = None
    age_s: float | None = None
    num_unstreamed: int | None = None
    has_ended: bool | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowerSample:
    """A replica, follower or standby; fields are those of the IDL's `FollowerStatus`."""

    name: str
    address: str
    records_behind: int
    age_s: float | None = None


_WRITER_FIELDS = tuple(field.name for field in dataclasses.fields(WriterSample))


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpirySample:
    """Expiry since the process started: the IDL's `ExpiryStatus`."""

    is_running: bool = False
    scanned: int = 0
    num_runs: int = 0
    num_rows_scanned: int = 0
    num_rows_expired: int = 0
    num_failed: int = 0
    last_run_us: int = 0

    @classmethod
    def of_status(cls, status: Any) -> Self:
        """Return the sample of an `idl.ExpiryStatus`."""
        return cls(**{name: value for name, value in vars(status).items() if value is not None})


@dataclass(frozen=True, kw_only=True, slots=True)
class HistogramSample:
    """Durations, counted in buckets with ascending upper bounds and in one more bucket for longer durations."""

    bounds_s: tuple[float, ...]
    counts: tuple[int, ...]
    sum_s: float

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the histogram that `dataclasses.asdict` made the values of."""
        return cls(bounds_s=tuple(values["bounds_s"]), counts=tuple(values["counts"]), sum_s=values["sum_s"])


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheSample:
    """RocksDB's block cache; `hits` and `misses` count since the store was opened."""

    capacity_bytes: int
    used_bytes: int
    hits: int
    misses: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ArchiveSample:
    """How far the archive of a shard's log is; fields are those of the IDL's `ArchiveStatus`."""

    archived_seq: int
    behind_bytes: int = 0
    behind_s: float = 0.0
    num_failures: int = 0
    num_lost: int = 0
    error: str | None = None
    segment_s: float | None = None

    @property
    def is_late(self) -> bool:
        """Whether records wait for longer than a part that is closed on time takes to be stored."""
        return self.behind_s > (self.segment_s or _ARCHIVE_SEGMENT_S) + _ARCHIVE_UPLOAD_S

    @classmethod
    def of_status(cls, status: Any) -> Self:
        """Return the sample of an `idl.ArchiveStatus`."""
        return cls(**{field.name: getattr(status, field.name) for field in dataclasses.fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowingSample:
    """How far a follower is behind its source; fields are those of the IDL's `FollowingStatus`."""

    source: str
    source_seq: int
    lag_ms: int
    knowledge_age_ms: int
    failure: str | None = None
    num_restarts: int = 0

    @property
    def behind_s(self) -> float:
        """For how long it has lacked a record, or has not heard of any, seconds."""
        return max(self.lag_ms, self.knowledge_age_ms) / 1000

    @classmethod
    def of_status(cls, status: Any) -> Self:
        """Return the sample of an `idl.FollowingStatus`."""
        return cls(**{field.name: getattr(status, field.name) for field in dataclasses.fields(cls)})


@dataclass(frozen=True, kw_only=True, slots=True)
class StandbySample:
    """A standby as its owner sees it; fields are those of the IDL's `StandbyStatus`."""

    address: str
    applied_seq: int
    failure: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class LogSample:
    """A shard's replicated log; fields are those of the IDL's `LogStatus`."""

    is_owner: bool
    owner: str
    leader: str | None
    peer_lag: int | None
    peers_away: int | None
    outstanding_bytes: int
    stalled_s: float
    refusals: dict[str, int]
    num_voids: int
    num_elections: int
    stream_bytes: int | None
    stream_max_bytes: int | None
    is_full: bool
    standbys: tuple[StandbySample, ...] = ()

    @classmethod
    def of_status(cls, status: Any) -> Self:
        """Return the sample of an `idl.LogStatus`."""
        refusals = {refused.reason: refused.count for refused in status.refusals}
        standbys = [vars(standby) for standby in status.standbys]
        return cls.from_json({**vars(status), "refusals": refusals, "standbys": standbys})

    def to_idl(self) -> Any:
        """Return the `idl.LogStatus`."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        standbys = [idl.StandbyStatus(**dataclasses.asdict(standby)) for standby in self.standbys]
        refusals = [idl.LogRefusals(reason=reason, count=count) for reason, count in sorted(self.refusals.items())]
        return idl.LogStatus(**{**values, "refusals": refusals, "standbys": standbys})

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the sample that `dataclasses.asdict` made the values of."""
        return cls(**{**values, "standbys": tuple(StandbySample(**standby) for standby in values["standbys"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotSample:
    """The newest published snapshot; `created_us` is microseconds since 1970."""

    name: str
    step: int
    created_us: int
    size_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardDetail:
    """Figures that only the supervisor gets; `families.py` explains each. Counts are since the process started.

    `apply_lag_s` is exact to a quarter of a second, and `apply_delay` counts each quarter with new records once.
    """

    apply_lag_s: float
    apply_delay: HistogramSample
    fsync: HistogramSample
    refused: dict[str, int]
    num_requests: int
    num_failed: int
    inflight_requests: int
    log_first_seq: int
    log_size_bytes: int
    log_pending_bytes: int
    backlog_bytes: int
    num_log_records: int
    log_written_bytes: int
    store_bytes: int
    compaction_bytes: int
    cache: CacheSample
    memory_bytes: int
    cpu_s: float
    num_open_files: int
    disk_free_bytes: int
    disk_bytes: int
    disk_reserve_bytes: int
    num_followers: int
    num_holds_broken: int
    snapshot: SnapshotSample | None

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Self:
        """Return the detail that `dataclasses.asdict` made the values of."""
        parts = {
            "apply_delay": HistogramSample.from_json(values["apply_delay"]),
            "fsync": HistogramSample.from_json(values["fsync"]),
            "cache": CacheSample(**values["cache"]),
            "snapshot": values["snapshot"] and SnapshotSample(**values["snapshot"]),
        }
        return cls(**{**values, **parts})


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardSample:
    """A shard at one moment. Fields are those of the IDL's `StatusReply`, in seconds where that has milliseconds.

    A client gets no `detail`, and only it gets the `upload`, an `idl.UploadStatus`, of a server with an object store.
    Only a replica has the `replica`, an `idl.ReplicaStatus`.
    """

    server_id: str
    shard: int
    num_shards: int
    version: str
    pid: int
    uptime_s: float
    log_seq: int
    applied_seq: int
    inflight_bytes: int
    num_connections: int
    num_refused: int
    num_disk_failures: int  # of these
    num_rows_written: int
    worst_loop_pause_s: float
    tables: tuple[TableSample, ...]
    writers: tuple[WriterSample, ...]
    followers: tuple[FollowerSample, ...] = ()
    term: int = 0  # in which the shard runs; 0 for none
    refused_ago_s: float | None = None  # since the last refusal
    updates_refusal: str | None = None  # why updates are refused at present; None while they are taken
    expiry: ExpirySample | None = None
    archive: ArchiveSample | None = None
    log: LogSample | None = None
    detail: ShardDetail | None = None
    replica: Any = None
    upload: Any = None
    following: FollowingSample | None = None

    @classmethod
    def of_reply(cls, reply: Any) -> Self:
        """Return the sample in an `idl.StatusReply`."""
        return cls(
            **{name: getattr(reply, name) for name in _PLAIN_FIELDS if name not in ("worst_loop_pause_s", "term")},
            term=reply.term or 0,
            refused_ago_s=None if reply.refused_ago_ms is None else reply.refused_ago_ms / 1000,
            updates_refusal=reply.updates_refusal,
            worst_loop_pause_s=(reply.worst_loop_pause_ms or 0.0) / 1000,
            tables=tuple(
                TableSample.of_table(spec_from_idl(table.spec), table.num_rows_estimate, table.owner, table.filling)
                for table in reply.tables
            ),
            writers=tuple(WriterSample(**{name: getattr(c, name) for name in _WRITER_FIELDS}) for c in reply.clients),
            followers=tuple(FollowerSample(**vars(follower)) for follower in reply.followers or ()),
            expiry=None if reply.expiry is None else ExpirySample.of_status(reply.expiry),
            archive=None if reply.archive is None else ArchiveSample.of_status(reply.archive),
            log=None if reply.log is None else LogSample.of_status(reply.log),
            replica=reply.replica,
            upload=reply.upload,
            following=None if reply.following is None else FollowingSample.of_status(reply.following),
        )

    def plain_json(self) -> dict[str, Any]:
        """Return all but tables, writers, followers and replica in a form for `json`."""
        return {
            **{name: getattr(self, name) for name in _PLAIN_FIELDS},
            "refused_ago_s": self.refused_ago_s,
            "updates_refusal": self.updates_refusal,
            "expiry": self.expiry and dataclasses.asdict(self.expiry),
            "archive": self.archive and dataclasses.asdict(self.archive),
            "log": self.log and dataclasses.asdict(self.log),
            "following": self.following and dataclasses.asdict(self.following),
            "detail": self.detail and dataclasses.asdict(self.detail),
        }

    def to_json(self) -> dict[str, Any]:
        """Return a server's sample in a form for `json`; see `from_json`."""
        # `asdict` takes eight times as long for a writer, and there may be thousands.
        writers = [[getattr(writer, name) for name in _WRITER_FIELDS] for writer in self.writers]
        tables = [(pack_spec(table.spec), *(getattr(table, name) for name in _OF_TABLE)) for table in self.tables]
        followers = [dataclasses.asdict(follower) for follower in self.followers]
        return {**self.plain_json(), "tables": tables, "writers": writers, "followers": followers}

    @classmethod
    def from_json(cls, values: Any) -> Self:
        """Return the sample that `to_json` made the values of.

        Raises:
            ProtocolError: The values are of another version.
        """
        try:
            parts = {
                "tables": tuple(TableSample(unpack_spec(spec), *of_table) for spec, *of_table in values["tables"]),
                "writers": tuple(
                    WriterSample(**dict(zip(_WRITER_FIELDS, writer, strict=True))) for writer in values["writers"]
                ),
                "followers": tuple(FollowerSample(**follower) for follower in values["followers"]),
                "expiry": values["expiry"] and ExpirySample(**values["expiry"]),
                "archive": values["archive"] and ArchiveSample(**values["archive"]),
                "log": values["log"] and LogSample.from_json(values["log"]),
                "following": values["following"] and FollowingSample(**values["following"]),
                "detail": values["detail"] and ShardDetail.from_json(values["detail"]),
            }
            return cls(**{**values, **parts})
        except (KeyError, TypeError, ValueError) as exc:
            raise ProtocolError(f"not a sample of a shard of this version: {exc!r}") from exc


_OF_TABLE = tuple(f.name for f in dataclasses.fields(TableSample))[1:]
_PLAIN_FIELDS = tuple(f.name for f in dataclasses.fields(ShardSample) if f.type in ("str", "int", "float"))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardState:
    """A shard as seen from outside; `error` says why there is no sample, `node` is its node of a cluster."""

    shard: int
    address: str
    node: str | None = None
    sample: ShardSample | None = None
    error: str | None = None
    num_restarts: int = 0
    is_stopped: bool = False  # for good; only the supervisor knows


def all_followers(samples: Iterable[ShardSample]) -> list[tuple[int, FollowerSample]]:
    """Return the shard and figures of each follower of each shard, those with the oldest missing update first."""
    found = [(sample.shard, follower) for sample in samples for follower in sample.followers]
    return sorted(found, key=lambda each: (-(each[1].age_s or 0), -each[1].records_behind, each[1].name, each[0]))


def merge_tables(samples: Iterable[ShardSample]) -> list[TableSample]:
    """Return each embedding table with its rows on all shards, by name; an estimate never exceeds the table."""
    merged: dict[TableSpec, TableSample] = {}
    for table in (table for sample in samples for table in sample.tables if not table.spec.is_dense):
        known = merged.get(table.spec)
        num_rows = table.num_rows_estimate + (known.num_rows_estimate if known else 0)
        # A row that was written again may count twice until the store has merged its files.
        num_rows = min(num_rows, table.spec.num_rows or num_rows)
        lacks = merged_lack((table.lacks, known.lacks if known else ""))
        owner = (known.owner if known else "") or table.owner
        has_ended = table.has_owner_ended and (known is None or known.has_owner_ended)
        merged[table.spec] = TableSample(
            table.spec,
            num_rows,
            owner,
            lacks=lacks,
            has_owner_ended=has_ended,
            is_backfilled=table.is_backfilled or (known is not None and known.is_backfilled),
        )
    return sorted(merged.values(), key=lambda table: table.spec.fqn)


def merge_dense(samples: Iterable[ShardSample]) -> list[DenseSample]:
    """Return the dense part of each model that has one, by model. Tensors of an older architecture are left out."""
    tables = [table for sample in samples for table in sample.tables]
    owners = {table.spec.fqn: table.owner for table in tables if table.owner}
    return [
        DenseSample(
            model=model,
            num_tensors=len(specs),
            size_bytes=part_bytes(specs.values()),
            owner=next((owners[name] for name in specs if name in owners), ""),
        )
        for model, specs in sorted(dense_sets((table.spec, table.owner_epoch) for table in tables).items())
    ]


def merge_writers(samples: Iterable[ShardSample]) -> list[WriterSample]:
    """Return each writer as seen by all shards together: its step is the one that every shard has, as is its age.

    What streaming costs it is as of the newest step that a shard has.
    Connected ones come first, then those of newer epochs. One that is away, ended no step and owns no table since its
    epoch is left out: its start was refused, or ended before `attach`.
    """
    samples = list(samples)
    owners = {(table.owner, table.owner_epoch) for sample in samples for table in sample.tables}
    by_key: dict[tuple[str, str, int], list[WriterSample]] = {}
    for writer in (writer for sample in samples for writer in sample.writers):
        by_key.setdefault((writer.run, writer.client, writer.epoch), []).append(writer)
    found = []
    for seen in by_key.values():
        # A shard knows no cost until a step ends there; of those that do, the one with the newest step knows best.
        told = max(seen, key=lambda each: (each.cost_percent is not None, each.step))
        is_connected = any(each.is_connected for each in seen)
        if is_connected or (told.run, told.epoch) in owners or any(each.step >= 0 for each in seen):
            step = min(each.step for each in seen)
            ages = [each.age_s for each in seen if each.age_s is not None]
            age_s = max(ages) if len(ages) == len(seen) else None
            found.append(dataclasses.replace(told, step=step, is_connected=is_connected, age_s=age_s))
    return sorted(found, key=lambda each: (not each.is_connected, -each.epoch, each.run, each.client))


@contextlib.asynccontextmanager
async def send_samples(sock: socket.socket, sample: Callable[[], Awaitable[ShardSample]]) -> AsyncIterator[None]:
    """Reply on the shard's end with what `sample` returns, while the block lasts; closes the socket at the end."""
    reader, writer = await asyncio.open_connection(sock=sock)
    async with background_task(_send(sample, reader, writer), name="headrace-metrics"):
        yield


async def _send(
    sample: Callable[[], Awaitable[ShardSample]], reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    try:
        while await reader.read(1):
            try:
                text = json.dumps((await sample()).to_json()).encode()
            except (HeadraceError, OSError) as exc:  # OSError: file descriptors may have run out, for a while
                fact(_log, logging.WARNING, "no sample for metrics", error=str(exc))
                text = b""
            writer.write(_LENGTH.pack(len(text)) + text)
            await writer.drain()
    except ConnectionError:
        pass  # the supervisor is gone; the end of stdin says so too
    finally:
        writer.transport.abort()


@contextlib.asynccontextmanager
async def receive_samples(sock: socket.socket, *, timeout_s: float = 5.0) -> AsyncIterator[SampleReceiver]:
    """Yield a receiver on the supervisor's end of one shard process; closes the socket at the end.

    A reply that is later than `timeout_s` answers the next request, as only one is under way.
    """
    reader, writer = await asyncio.open_connection(sock=sock)
    receiver = SampleReceiver(writer, timeout_s)
    async with background_task(receiver.read(reader), name="headrace-metrics-read") as receiver.reading:
        yield receiver


class SampleReceiver:
    """The supervisor's end of one shard process, on the event loop; made by `receive_samples`."""

    def __init__(self, writer: asyncio.StreamWriter, timeout_s: float) -> None:
        self.reading: asyncio.Task[None] | None = None
        self._writer = writer
        self._timeout_s = timeout_s
        self._reply: asyncio.Future[bytes] | None = None

    async def ask(self) -> ShardSample:
        """Return a sample; concurrent calls share one request.

        Raises:
            UnavailableError: The shard is gone, is late or has no sample.
            ProtocolError: The reply is not a sample.

        Cancellation: harmless; the request goes on for other callers.
        """
        assert self.reading is not None
        if self.reading.done():
            raise UnavailableError("the shard process has closed its metrics socket")
        if self._reply is None or self._reply.done():
            self._reply = asyncio.get_running_loop().create_future()
            self._writer.write(_ASK)
        try:
            async with asyncio.timeout(self._timeout_s):
                text = await asyncio.shield(self._reply)
        except TimeoutError as exc:
            raise UnavailableError(f"no metrics from the shard process within {self._timeout_s:g} s") from exc
        if not text:
            raise UnavailableError("the shard process could not make a sample; its log says why")
        try:
            return ShardSample.from_json(json.loads(text))
        except ValueError as exc:
            raise ProtocolError(f"not a sample: {exc}") from exc

    async def read(self, reader: asyncio.StreamReader) -> None:
        """Take replies until the shard process is gone or breaks the protocol; run by `receive_samples`."""
        try:
            while True:
                (size_bytes,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
                if size_bytes > _MAX_SAMPLE_BYTES:
                    return
                text = await reader.readexactly(size_bytes)
                if self._reply is not None and not self._reply.done():
                    self._reply.set_result(text)
        except (OSError, EOFError):
            pass
        finally:
            self._writer.transport.abort()
            if self._reply is not None and not self._reply.done():
                self._reply.set_result(b"")
