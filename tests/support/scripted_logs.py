"""Logs of shards that a test writes record by record, and a copy of a replica that takes them; without a server."""

from __future__ import annotations

from typing import Any

import numpy as np
from set_embeddings import delta_of, request_of

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.reading.follower import Update
from headrace.paramserver.replica.copy.shard_tail import ShardTail
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.paramserver.store.catalog import Catalog, pack_spec
from headrace.schemas.idl import idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.move_records import ImportRecord, Move, MoveRecord, MoveStep, Position
from headrace.schemas.tables import DType, TableSpec

__all__ = ["SPEC", "Copy", "Shard", "begun"]

SPEC = TableSpec(fqn="t", num_rows=0, dim=1, dtype=DType.FLOAT32)


class Shard:
    """One shard's log, written by ranks with a row each."""

    def __init__(self, *, world_size: int = 1) -> None:
        self.updates: list[Update] = []
        self.spec = SPEC
        self._client_seqs = [0] * world_size
        self._num_backfilled = 0
        for rank in range(world_size):
            self.hello(rank)

    def hello(self, rank: int, *, epoch: int = 1) -> None:
        self._client_seqs[rank] = 0
        header = {
            "run": "run",
            "client": f"rank{rank}",
            "rank": rank,
            "world_size": len(self._client_seqs),
            "tables": [pack_spec(self.spec)],
        }
        self._append(epoch, idl.UpdateKind.HELLO, header, b"")

    def write(
        self,
        step: int,
        value: float,
        *,
        rank: int = 0,
        row: int | None = None,
        epoch: int = 1,
        ends: bool = True,
        clock_us: int = 0,
        is_recorded: bool = False,
        oldest_us: int | None = None,
    ) -> None:
        self._client_seqs[rank] += 1
        self._write(
            step,
            value,
            row=rank if row is None else row,
            client=f"rank{rank}",
            client_seq=self._client_seqs[rank],
            ends=ends,
            epoch=epoch,
            clock_us=clock_us,
            is_recorded=is_recorded,
            oldest_us=oldest_us,
        )

    def drop(self, epoch: int) -> None:
        """Drop the table, and name it anew in the next epoch."""
        admin = {"run": "admin", "client": "admin", "rank": 0, "world_size": 0, "tables": []}
        self._append(epoch, idl.UpdateKind.HELLO, admin | {"dropped": ["t"]}, b"")

    def rename(self, epoch: int, new: str) -> None:
        """Rename the table, without its rows' knowing."""
        admin = {"run": "admin", "client": "admin", "rank": 0, "world_size": 0, "tables": []}
        self._append(epoch, idl.UpdateKind.HELLO, admin | {"renamed": {self.spec.fqn: new}}, b"")
        self.spec = self.spec.renamed(new)

    def backfill(self, row: int, value: float) -> None:
        """Write a row as `headrace backfill` does, outside of any step."""
        if not self._num_backfilled:
            header = {"run": "fill", "client": "fill", "rank": 0, "world_size": 0, "tables": []}
            self._append(1, idl.UpdateKind.HELLO, header, b"")
        self._num_backfilled += 1
        self._write(0, value, row=row, client="fill", client_seq=self._num_backfilled, run="fill", version_epoch=1)

    def end(self, step: int, *, epoch: int = 1, is_recorded: bool = False, clock_us: int = 0) -> None:
        """End a step of the only rank, without rows."""
        self._client_seqs[0] += 1
        names = {"run": "run", "client": "rank0", "client_seq": self._client_seqs[0], "epoch": epoch}
        time_us = step * 1_000_000 + clock_us
        self._request(request_of(step=step, time_us=time_us, ends_step=True, is_recorded=is_recorded, **names))

    def move(self, move: Move, step: MoveStep, position: int | None = None) -> int:
        """Write a transition of a move; return its seq."""
        at = None if position is None else Position(seq=position, mark=None)
        self._append(1, idl.UpdateKind.MOVE, MoveRecord(step=step, move=move, position=at).header(), b"")
        return self.seq

    def bring_in(self, move: Move, update: Update) -> None:
        """Import a record of the move's source."""
        record = {"kind": update.kind, **update.header}
        at = Position(seq=update.seq, mark=None)
        header = ImportRecord(move_id=move.move_id, source=move.source, position=at, record=record).header()
        self._append(update.epoch, idl.UpdateKind.MOVE, header, bytes(update.body))

    def _write(
        self,
        step: int,
        value: float,
        *,
        row: int,
        ends: bool = False,
        run: str = "run",
        clock_us: int = 0,
        **names: Any,
    ) -> None:
        time_us = step * 1_000_000 + clock_us
        request = request_of(
            delta_of(self.spec, [row], value), run=run, step=step, time_us=time_us, ends_step=ends, **names
        )
        self._request(request)

    def _request(self, request: Any) -> None:
        args = idl.ParameterServer.setEmbeddings_args(request=request)
        body = b"".join(encode_message("setEmbeddings", CALL, 1, args))
        self._append(request.epoch, idl.UpdateKind.BATCH, {}, body)

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
        self.table_set = TableSet(
            "s", tails, is_by_step=is_by_step, make_table=MemoryTable, clock_us=lambda: self.now_us
        )

    def take(self, shard: int, updates: list[Update]) -> bool:
        return self.table_set.take(shard, updates, updates[-1].seq if updates else 0)

    def values(self, *rows: int) -> list[float]:
        return self.table_set.tables["t"].gather(np.array(rows))[0].flatten().tolist()


def begun(num_shards: int = 1, *, is_by_step: bool = True) -> tuple[Copy, list[Shard]]:
    """Return a copy that shows step 1 of its shards."""
    copy, shards = Copy(num_shards, is_by_step=is_by_step), [Shard() for _ in range(num_shards)]
    for number, shard in enumerate(shards):
        shard.write(1, 1.0)
        copy.take(number, shard.take())
    return copy, shards
