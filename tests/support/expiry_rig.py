"""A shard's insides without its sockets: ingest, log, applier and store, with trainers that write to it, for expiry."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from memory_update_log import MemoryUpdateLog
from set_embeddings import delta_of, request_of
from text_scripts import runs

from headrace.paramserver.expiry.policy import ExpiryPolicy
from headrace.paramserver.expiry.sweep import sweep
from headrace.paramserver.expiry.table_pass import PassContext, TablePass, TableReport
from headrace.paramserver.ingest.pipeline import Ingest
from headrace.paramserver.store.applier import Applier
from headrace.paramserver.store.catalog import Table
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, decode_header, decode_struct, encode_message
from headrace.schemas.row_records import decode_row_ids, key_prefix
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec

SPEC = TableSpec(
    fqn="user.weight",
    num_rows=0,
    dim=4,
    dtype=DType.FLOAT32,
    states=(StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),),
)
MISSING, PRESENT = 0, 1
SECOND_US = 1_000_000


class Rig:
    """One shard.

    Attributes:
        log: The update log.
        now_us: The server's clock.
        slept_s: What was slept, which takes no time here.
    """

    def __init__(self, log: MemoryUpdateLog, applier: Applier, ingest: Ingest, store: RowStore, path: Path) -> None:
        self.log, self.applier, self.ingest, self.store, self.path = log, applier, ingest, store, path
        self.now_us = 10**15  # later than any step
        self.slept_s: list[float] = []
        self.is_waiting = asyncio.Event()
        self._client_seqs: dict[tuple[str, str, int], int] = {}

    async def sleep_forever(self, seconds: float) -> None:
        """Sleep until canceled, and say so in `is_waiting`."""
        self.is_waiting.set()
        await asyncio.Event().wait()

    @property
    def table(self) -> Table:
        return self.ingest.catalog.find(SPEC.fqn)

    def context(self, **changes: Any) -> PassContext:
        """Return what a run needs."""

        async def sleep(seconds: float) -> None:
            self.slept_s.append(seconds)

        fields: dict[str, Any] = {
            "ingest": self.ingest,
            "applier": self.applier,
            "store": self.store,
            "directory": self.path / "expiry",
            "num_shards": 1,
            "rows_per_s": 0,
            "clock_us": lambda: self.now_us,
            "sleep": sleep,
        }
        return PassContext(**(fields | changes))

    async def expire(self, policy: str, *, is_dry_run: bool = False, **changes: Any) -> TableReport:
        """Do a whole run."""
        run = TablePass(self.context(**changes), self.table, ExpiryPolicy.parse(policy), is_dry_run=is_dry_run)
        return await run.run()

    async def sweep(self) -> int:
        """Settle the table's rows; return the number of records that went."""
        return await sweep(self.context(), self.table)

    def stored_rows(self, shard: ColumnShard) -> list[int]:
        """Return the rows of which RocksDB has a record, a mark included, in some columns."""
        keys = [key for key, _ in self.store.scan(key_prefix(self.table.table_id, shard))]
        return decode_row_ids(keys).tolist() if keys else []

    async def hello(
        self,
        epoch: int,
        *,
        run: str = "run",
        client: str = "rank0",
        rank: int = 0,
        world_size: int = 1,
        specs: Sequence[TableSpec] = (SPEC,),
        **more: Any,
    ) -> None:
        """Say hello as a trainer's rank, or with `world_size` 0 as nobody's, or as a backfill that claims tables."""
        session, _ = await self.ingest.open_session(run, client, epoch, rank, world_size, list(specs), **more)
        self._client_seqs[run, client, epoch] = session.last_client_seq

    async def write(
        self,
        epoch: int,
        step: int,
        rows: Sequence[int] = (),
        *,
        value: float = 1.0,
        time_us: int | None = None,
        run: str = "run",
        client: str = "rank0",
        ends_step: bool = True,
        deleted: Sequence[int] = (),
        shard: ColumnShard | None = None,
    ) -> None:
        """Write rows and end the step."""
        self._client_seqs[run, client, epoch] += 1
        gone = np.array(deleted, "<i8") if deleted else None
        delta = delta_of(SPEC, rows, value, states=value, shard=shard, deleted_row_ids=gone)
        request = request_of(
            *([delta] if len(rows) or deleted else []),
            run=run,
            client=client,
            epoch=epoch,
            client_seq=self._client_seqs[run, client, epoch],
            step=step,
            time_us=step * SECOND_US if time_us is None else time_us,
            ends_step=ends_step,
            is_exact_cut=True,
        )
        await self.send(request)

    async def send(self, request: Any) -> None:
        """Write a request as if it came over the wire."""
        args = idl.ParameterServer.setEmbeddings_args(request=request)
        frame = memoryview(b"".join(bytes(part) for part in encode_message("setEmbeddings", CALL, 0, args)))
        decoded = decode_struct(idl.ParameterServer.setEmbeddings_args, frame, decode_header(frame).body_offset)
        await self.ingest.write(decoded.request, frame, lambda: lambda: None)

    async def accept(self, *args: Any, **more: Any) -> asyncio.Task[None]:
        """Begin a `write`, and return once it is accepted."""
        accepted = asyncio.Event()
        self.ingest.on_accepted = accepted.set
        writing = asyncio.ensure_future(self.write(*args, **more))
        await accepted.wait()
        return writing

    async def presence(self, rows: Sequence[int]) -> list[int]:
        """Return what a read says of rows."""
        read = await self.applier.read(self.table.table_id, SPEC, np.array(rows, np.int64))
        return [int(presence) for presence in read.presence]

    async def present(self, rows: Sequence[int]) -> list[int]:
        """Return those of some rows that are there."""
        return [row for row, found in zip(rows, await self.presence(rows), strict=True) if found == PRESENT]


@contextlib.asynccontextmanager
async def open_rig(path: Path, log: MemoryUpdateLog | None = None) -> AsyncIterator[Rig]:
    """Open a shard's store in `path`, on a log that is new or goes on from one that was closed."""
    log = log or MemoryUpdateLog()
    store = RowStore.open(path / "store", config=StoreConfig(block_cache_bytes=1 << 20, write_buffer_bytes=1 << 20))
    try:
        async with Applier(store) as applier:
            ingest = Ingest(log, applier, store.read_meta(), max_backlog_bytes=1 << 30)
            await ingest.recover()
            try:
                yield Rig(log, applier, ingest, store, path)
            finally:
                await log.close()
    finally:
        store.close()


class RigCommands:
    """The commands of scripts: a shard in `path`, to which a trainer in epoch 1 has said hello."""

    def __init__(self, path: Path) -> None:
        self._path, self._stack, self._pass = path, contextlib.AsyncExitStack(), list[TablePass]()
        self._epochs: dict[str, int] = {}

    async def __aenter__(self) -> RigCommands:
        await self._open(MemoryUpdateLog())
        await self.hello(1)
        return self

    async def __aexit__(self, *_: object) -> None:
        for begun in self._pass:
            await begun.close()
        await self._stack.aclose()

    async def _open(self, log: MemoryUpdateLog) -> None:
        self.rig = await self._stack.enter_async_context(open_rig(self._path, log))

    async def restart(self, *, store: bool = True) -> None:
        """Restart the shard, perhaps without its store; a pass that has begun ends with it."""
        self._pass.clear()
        await self._stack.aclose()
        if not store:
            shutil.rmtree(self._path / "store")
        await self._open(self.rig.log.reopen())

    async def hello(self, epoch: int, *, run: str = "run", ranks: int = 1, tables: bool = True, **more: Any) -> None:
        self._epochs[run] = epoch
        await self.rig.hello(epoch, run=run, world_size=ranks, specs=(SPEC,) if tables else (), **more)

    async def write(self, step: int, rows: Any = (), *, deleted: Any = (), **more: Any) -> None:
        """Write rows, and delete others, in a step of a run's newest epoch, and end the step unless `ends=no`."""
        run = more.setdefault("run", "run")
        epoch = more.pop("epoch", self._epochs[run])
        shard, ends = _SHARDS[more.pop("shard", "whole")], more.pop("ends", True)
        more |= {"shard": shard, "ends_step": ends, "deleted": _ids(deleted)}
        await self.rig.write(epoch, step, _ids(rows), **more)

    async def applied(self) -> None:
        await self.rig.applier.wait_applied(self.rig.ingest.submitted_seq)

    async def expire(self, *, dry: bool = False, shards: int = 1, piece: int = 8192, **policy: Any) -> str:
        more = {"num_shards": shards, "piece_rows": piece}
        return _told(await self.rig.expire(_policy(policy), is_dry_run=dry, **more))

    async def begin(self, **policy: Any) -> str:
        """Begin a pass, and judge the first rows."""
        self._pass.append(TablePass(self.rig.context(), self.rig.table, ExpiryPolicy.parse(_policy(policy))))
        assert await self._pass[-1].begin() and await self._pass[-1].scan()

    async def end(self) -> None:
        await self._pass[-1].delete(is_last=True)

    async def sweep(self) -> str:
        return f"{await self.rig.sweep()} records removed"

    def clock(self, seconds: int) -> None:
        self.rig.now_us = seconds * SECOND_US

    async def rows(self, rows: Any) -> str:
        found = await self.rig.presence(_ids(rows))
        names = {PRESENT: "present", MISSING: "missing"}
        told = {
            name: runs(row for row, each in zip(_ids(rows), found, strict=True) if each == presence)
            for presence, name in names.items()
        }
        return "; ".join(f"{name} {numbers}" for name, numbers in told.items() if numbers)

    async def values(self, rows: Any) -> str:
        read = await self.rig.applier.read(self.rig.table.table_id, SPEC, np.array(_ids(rows), np.int64))
        shown = zip(_ids(rows), read.presence, read.weights.tolist(), strict=True)
        return "; ".join(f"{row} is {values}" for row, is_there, values in shown if is_there == PRESENT)

    async def stored(self) -> str:
        """Tell which records RocksDB has, marks included, by columns."""
        await self.applied()
        shards = self.rig.store.layouts(self.rig.table.table_id)
        found = {shard: runs(self.rig.stored_rows(shard)) for shard in shards}
        names = {shard or SPEC.whole: name for name, shard in _SHARDS.items()}
        return "; ".join(f"{names[shard]} {rows}" for shard, rows in found.items() if rows) or "nothing"

    def sessions(self) -> list[str]:
        return [f"{each.run}/{each.client}: batch {each.last_client_seq}" for each in self.rig.ingest.sessions]

    def log(self) -> str:
        """Tell where the log ends."""
        return f"record {self.rig.log.last_seq}"

    def files(self) -> str:
        return " ".join(sorted(path.name for path in self._path.glob("expiry/*"))) or "none"


_SHARDS = {"whole": None, "left": ColumnShard(offset=0, width=1), "right": ColumnShard(offset=1, width=3)}


def _ids(rows: Any) -> list[int]:
    return [rows] if isinstance(rows, int) else list(rows)


def _policy(conditions: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in conditions.items())


def _told(report: TableReport) -> str:
    by_policy = ", ".join(f"{name} {number}" for name, number in report.by_policy.items() if number)
    counts = f"{report.live} of {report.scanned} live, {report.expired} expired"
    return counts + (by_policy and f": {by_policy}") + (report.note and f": {report.note}")
