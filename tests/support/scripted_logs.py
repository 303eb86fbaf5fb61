"""Logs of shards that a test writes record by record, and a copy of a replica that takes them; without a server."""

from __future__ import annotations

from dataclasses import replace
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
from headrace.schemas.tables import DType, TableSpec

__all__ = ["SPEC", "Copy", "Following", "Shard", "begun", "shown_rows"]

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

    def hello(self, rank: int, *, epoch: int = 1, run: str = "run", owns: str = "", ranks: int | None = None) -> None:
        """Say hello; the tables that it `owns` are the run's from here on. A backfill has no ranks."""
        self._client_seqs[rank] = 0
        owned = owns.split(",") if owns else []
        header = {
            "run": run,
            "client": f"rank{rank}",
            "rank": rank,
            "world_size": len(self._client_seqs) if ranks is None else ranks,
            "tables": [pack_spec(replace(self.spec, fqn=name)) for name in owned or [self.spec.fqn]],
            "owned": owned,
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
        run: str = "run",
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
            run=run,
        )

    def drop(self, epoch: int) -> None:
        """Drop the table, and name it anew in the next epoch."""
        admin = {"run": "admin", "client": "admin", "rank": 0, "world_size": 0, "tables": []}
        self._append(epoch, idl.UpdateKind.HELLO, admin | {"dropped": ["t"]}, b"")

    def backfill(self, row: int, value: float) -> None:
        """Write a row as `headrace backfill` does, outside of any step; it owns a table in the newest epoch."""
        if not self._num_backfilled:
            header = {"run": "fill", "client": "fill", "rank": 0, "world_size": 0}
            header |= {"tables": [pack_spec(replace(SPEC, fqn="filled"))], "owned": ["filled"]}
            self._append(9, idl.UpdateKind.HELLO, header, b"")
        self._num_backfilled += 1
        self._write(0, value, row=row, client="fill", client_seq=self._num_backfilled, run="fill", epoch=9)

    def end(self, step: int, *, epoch: int = 1, is_recorded: bool = False, clock_us: int = 0) -> None:
        """End a step of the only rank, without rows."""
        self._client_seqs[0] += 1
        names = {"run": "run", "client": "rank0", "client_seq": self._client_seqs[0], "epoch": epoch}
        time_us = step * 1_000_000 + clock_us
        self._request(request_of(step=step, time_us=time_us, ends_step=True, is_recorded=is_recorded, **names))

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
    def __init__(self, num_shards: int, *, is_by_step: bool = True, only: str = "", before: Copy | None = None) -> None:
        """Begin at the start of the logs, or with `before` by step at what that copy has taken; of no rows."""
        self.only = only
        self.sessions = [Sessions({}) for _ in range(num_shards)] if before is None else before.sessions
        begins = [(0, Catalog({})) for _ in range(num_shards)]
        if before is not None:
            begins = [(tail.seq, tail.catalog) for tail in before.table_set.tails]
        tails = [
            ShardTail(shard, seq=seq, catalog=catalog, sessions=self.sessions[shard], wants=self._wants)
            for shard, (seq, catalog) in enumerate(begins)
        ]
        self.now_us = 0
        self.table_set = TableSet(
            "s",
            tails,
            is_by_step=is_by_step,
            make_table=lambda spec: MemoryTable(spec) if self._wants(spec.fqn) else None,
            clock_us=lambda: self.now_us,
        )

    def _wants(self, name: str) -> bool:
        return self.only in ("", name)

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


class Following:
    """The world of scripts about a copy: shards whose logs grow by commands, and the copy that takes them."""

    def __init__(self) -> None:
        self.shards: list[Shard] = []
        self.queues: list[list[Update]] = []

    def copy(self, num_shards: int = 1, *, latest: bool = False, ranks: int = 1, only: str = "") -> None:
        """Make shards, and a copy that follows them; hellos wait to be taken."""
        self._copy = Copy(num_shards, is_by_step=not latest, only=only)
        self._table_set = self._copy.table_set
        self.shards = [Shard(world_size=ranks) for _ in range(num_shards)]
        self.queues = [[] for _ in range(num_shards)]

    def begun(self, num_shards: int = 1, *, latest: bool = False) -> str:
        """Make shards, and a copy that shows their step 1."""
        self.copy(num_shards, latest=latest)
        self.write("all", 1, 1.0)
        return self.take()

    def write(self, shard: int | str, step: int, value: float, **options: Any) -> None:
        """Write a row, and end the step unless it says `ends=no`."""
        for each in self._each(shard):
            each.write(step, value, **options)

    def end(self, shard: int | str, step: int, **options: Any) -> None:
        for each in self._each(shard):
            each.end(step, **options)

    def hello(self, shard: int | str, epoch: int, *, uses: str | None = None, **options: Any) -> None:
        """Let the next trainer say hello, or with `ranks=0` a backfill."""
        for each in self._each(shard):
            each.spec = SPEC if uses is None else SPEC.described(uses)
            each.hello(0, epoch=epoch, **options)

    def again(self) -> str:
        """Begin a copy at what was taken by now, as one that starts does; tell the step that it shows."""
        self._copy = Copy(len(self.shards), only=self._copy.only, before=self._copy)
        self._table_set = self._copy.table_set
        return f"shows {self._table_set.visible}" if self._table_set.advance() else "shows nothing"

    def backfill(self, shard: int, row: int, value: float) -> None:
        self.shards[shard].backfill(row, value)

    def drop(self, shard: int, epoch: int) -> None:
        self.shards[shard].drop(epoch)

    def take(self, *shards: int, num: int | None = None, unsent: int = 0) -> str:
        """Let the copy take so many records of some shards, all that there are by default, and show what it can.

        `unsent` more records are in the shard's log.
        """
        has_changed = False
        for number in shards or range(len(self.shards)):
            queue = self.queues[number]
            queue += self.shards[number].take()
            taken = queue[:num]
            last_seq = (taken[-1].seq if taken else self._table_set.tails[number].seq) + unsent
            has_changed |= self._table_set.take(number, taken, last_seq)
            del queue[:num]
        return self._state(has_changed)

    def advance(self) -> str:
        return self._state(self._table_set.advance())

    def limit(self, *seqs: int) -> None:
        """Show no more than these records of the shards; any without arguments."""
        self._table_set.limits = list(seqs) or None

    def hold(self, is_on: bool, *, goes_on: bool = False) -> str:
        """Let lookups stay at recorded steps."""
        self._table_set.hold_recorded(is_on, goes_on=goes_on)
        return f"held {self._table_set.held}"

    def waiting(self, max_bytes: int) -> str:
        """Say which shards are not fetched from, with so many bytes pending at most."""
        return " ".join("yes" if self._table_set.is_waiting(at, max_bytes) else "no" for at in range(len(self.shards)))

    def tails(self) -> list[str]:
        return [
            f"seq {tail.seq}, visible {tail.visible_seq}, {'some' if tail.pending_bytes else 'nothing'} pending"
            for tail in self._table_set.tails
        ]

    def lookup(self, name: str) -> str:
        return self._table_set.table(name).spec.fqn

    def uses(self) -> str:
        return str(self._table_set.tables["t"].spec.uses)

    def clock(self, now_s: float) -> None:
        self._copy.now_us = int(now_s * 1e6)

    def freshness(self) -> list[str]:
        return [
            f"{'behind' if at.is_behind else 'whole'}, lag {at.lag_s:g} s, {at.lag_steps} steps, age "
            f"{'none' if at.age_s is None else f'{at.age_s:g} s'}, {at.delay.count} delays up to {at.delay.max_s:g} s"
            for at in self._table_set.freshness()
        ]

    def _each(self, shard: int | str) -> list[Shard]:
        return self.shards if isinstance(shard, str) else [self.shards[shard]]

    def _state(self, has_changed: bool) -> str:
        held = " held" if self._table_set.held is not None else ""
        what = "shows" if has_changed else "still"
        return f"{what} {self._table_set.visible}{held}, {shown_rows(self._table_set)}"


def shown_rows(table_set: TableSet) -> str:
    """Say which rows each table of a copy has."""
    shown = []
    for name, table in table_set.tables.items():
        rows, missing = table.gather(np.arange(128))
        shown.append(" ".join([f"{name}:", *(f"{row}={rows[row, 0]:g}" for row in np.flatnonzero(~missing))]))
    return ", ".join(shown) or "no table"
