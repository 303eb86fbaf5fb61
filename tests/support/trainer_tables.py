"""Tapped tables without a model, and flushes out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from headrace.kernels.dtypes import TORCH_DTYPES
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.rendezvous import Writer
from headrace.streamer.flush.flusher import Flusher
from headrace.streamer.flush.layout import Flush
from headrace.streamer.flush.pace import FlushPace
from headrace.streamer.flush.staging import StagingPool
from headrace.streamer.taps.tapped_table import TappedTable

POINTWISE = StateSpec(name="exp_avg", kind=StateKind.POINTWISE, dtype=DType.FLOAT32)
ROWWISE = StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1)
# Of staging: its two buffers hold about 450 rows each of a table that is so wide.
SMALL_BYTES = 64 * 2**10
WIDE = 16
WRITER = Writer(run="run", client="rank0", epoch=1, rank=0, world_size=1)


class Trained:
    """A table whose values are tensors of its own.

    Attributes:
        tapped: What a tap would have made of it.
        weights: [rows, width].
        states: By name.
    """

    def __init__(
        self,
        fqn: str = "t.weight",
        num_rows: int = 50,
        dim: int = 4,
        *,
        dtype: DType = DType.FLOAT32,
        states: Sequence[StateSpec] = (),
        shard: ColumnShard | None = None,
        row_offset: int = 0,
        total_rows: int | None = None,
        seed: int = 0,
    ) -> None:
        spec = TableSpec(
            fqn=fqn, num_rows=total_rows or num_rows + row_offset, dim=dim, dtype=dtype, states=tuple(states)
        )
        shard = shard or spec.whole
        generator = torch.Generator().manual_seed(seed)

        def noise(dtype: DType, width: int) -> torch.Tensor:
            return torch.randn(num_rows, width, generator=generator).to(TORCH_DTYPES[dtype])

        self.weights = noise(dtype, shard.width).requires_grad_()
        self.states = {state.name: noise(state.dtype, state.width_in(shard)) for state in states}
        self.tapped = TappedTable(
            spec=spec,
            num_local_rows=num_rows,
            weights=lambda: self.weights,
            states=lambda: self.states,
            backing=lambda: [self.weights, *self.states.values()],
            shard=shard,
            row_offset=row_offset,
        )

    def mark(self, rows: Iterable[int]) -> None:
        self.tapped.dirty.mark(torch.tensor(list(rows), dtype=torch.int64))

    def update(self, rows: Iterable[int], value: float) -> None:
        """Set rows to a value and mark them."""
        rows = list(rows)
        with torch.no_grad():
            self.weights[rows] = value
        self.mark(rows)


class Submitted:
    """A flusher's other side: keeps what is submitted, and gives buffers back when told.

    Attributes:
        flushes: In order.
        error: Raised by the next submits.
        cost: Called by each submit: moves a fake clock.
    """

    def __init__(
        self,
        tables: Sequence[Trained | VirtualRows],
        *,
        num_shards: int = 1,
        staging_bytes: int = 2**20,
        clock: Any = None,
        **settings: Any,
    ) -> None:
        self.flushes: list[Flush] = []
        self.error: Exception | None = None
        self.cost: Callable[[], None] | None = None
        self.pool = StagingPool(staging_bytes)
        config = StreamerConfig.load(environ={}, **{"freshness_s": 0, "max_cost_percent": 100, **settings})
        clocks = {"thread_s": clock, "process_s": clock} if clock else {}
        self.flusher = Flusher(
            config=config,
            num_shards=num_shards,
            pool=self.pool,
            submit=self._submit,
            describe_delay=lambda: "shard 0 is behind",
            pace=FlushPace.of(config, **clocks),
            **({"monotonic_s": clock} if clock else {}),
        )
        self.flusher.add_tables([table.tapped for table in tables])

    def _submit(self, flush: Flush) -> None:
        if self.error is not None:
            raise self.error
        if self.cost is not None:
            self.cost()
        self.flushes.append(flush)

    def release(self) -> None:
        """Give back the buffers of all flushes, as acks would."""
        for flush in self.flushes:
            if flush.staging is not None:
                self.pool.release(flush.staging)
                flush.staging = None


def rows_of(flush: Flush, num_shards: int, *, max_bytes: int = 2**22) -> list[tuple[int, str, int, bytes]]:
    """Return (shard, fqn, row, bytes of the row's columns) for all that a flush's messages carry, in their order."""
    rows = []
    for shard in range(num_shards):
        for message in flush.messages(shard, max_bytes):
            for delta in message.deltas:
                ids = np.frombuffer(delta.row_ids, "<i8").tolist()
                columns = [bytes(delta.weights), *(bytes(state.data) for state in delta.states)]
                for at, row in enumerate(ids):
                    parts = [c[at * len(c) // len(ids) : (at + 1) * len(c) // len(ids)] for c in columns]
                    rows.append((shard, delta.fqn, row, b"".join(parts)))
    return rows


def taken(flush: Flush, fqn: str = "t.weight") -> list[int]:
    """Return the rows of a table that a flush carries, ascending."""
    return sorted(row for _, name, row, _ in rows_of(flush, 1) if name == fqn)


def deleted_of(flush: Flush, num_shards: int, *, max_bytes: int = 2**22) -> list[tuple[int, str, int]]:
    """Return (shard, fqn, row) for all that a flush's messages delete, in their order."""
    return [
        (shard, delta.fqn, row)
        for shard in range(num_shards)
        for message in flush.messages(shard, max_bytes)
        for delta in message.deltas
        for row in np.frombuffer(delta.deleted_row_ids or b"", "<i8").tolist()
    ]


class VirtualRows:
    """A table with virtual ids: rows come and go, each in a place of its own while it is held.

    Attributes:
        tapped: What a tap would have made of it.
        weights: [places, dim].
        place_of: Place by id.
    """

    def __init__(self, fqn: str = "v.weight", num_places: int = 64, dim: int = 4, *, states: Sequence[StateSpec] = ()):
        spec = TableSpec(fqn=fqn, num_rows=0, dim=dim, dtype=DType.FLOAT32, states=tuple(states))
        generator = torch.Generator().manual_seed(0)
        self.weights = torch.randn(num_places, dim, generator=generator)
        self.states = {
            state.name: torch.randn(num_places, state.width_in(spec.whole), generator=generator) for state in states
        }
        self.place_of: dict[int, int] = {}
        self._free = list(range(num_places))
        self.tapped = TappedTable(
            spec=spec, num_local_rows=0, weights=lambda: self.weights, states=lambda: self.states, index=self
        )

    def find(self, row_ids: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.place_of.get(row, -1) for row in row_ids.tolist()], dtype=torch.int64)

    def row_ids(self) -> torch.Tensor:
        return torch.tensor(list(self.place_of), dtype=torch.int64)

    def update(self, rows: Iterable[int], value: float) -> None:
        """Set rows to a value, those that are not held too, and mark them."""
        rows = list(rows)
        for row in rows:
            if row not in self.place_of:
                self.place_of[row] = self._free.pop()
            self.weights[self.place_of[row]] = value
            for state in self.states.values():
                state[self.place_of[row]] = -value
        self.tapped.dirty.mark(torch.tensor(rows, dtype=torch.int64))

    def drop(self, rows: Iterable[int]) -> None:
        """Hold rows no more; nobody is told."""
        for row in rows:
            self._free.append(self.place_of.pop(row))
