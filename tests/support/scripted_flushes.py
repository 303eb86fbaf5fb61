"""Commands of scripts about flushes: tables whose rows change, a flusher on a clock, and who takes its flushes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from dense_model import dense_of
from text_scripts import runs
from torch import nn
from trainer_tables import POINTWISE, ROWWISE, Submitted, Trained, VirtualRows, deleted_of, rows_of

from headrace.schemas.errors import UnavailableError
from headrace.schemas.routing import shards_of_rows
from headrace.streamer.delivery.sender import DroppedRows
from headrace.streamer.flush.layout import Flush
from headrace.streamer.taps.dense_tensors import DenseTensors

__all__ = ["ScriptedFlushes"]

_STATES = {"none": (), "rowwise": (ROWWISE,), "pointwise": (POINTWISE,)}
_BEGIN_S = 100.0


class _CostlyTensors(DenseTensors):
    """Dense tensors whose copy takes time on a fake clock."""

    on_copy: Callable[[], None] = staticmethod(lambda: None)

    def live(self) -> dict[str, torch.Tensor]:
        self.on_copy()
        return super().live()


class _Taken(Submitted):
    """Tells of each flush when it is submitted, while its buffer is its own."""

    on_flush: Callable[[Flush], None]

    def _submit(self, flush: Flush) -> None:
        super()._submit(flush)
        self.on_flush(flush)


class ScriptedFlushes:
    """Tables, a flusher of them, and its other side.

    A flush is told as `a 1..3 | a deletes 4 | mark 5 exact`. Each is checked first: its rows have the bytes of their
    tables, come once, and are on the shards that the routing names.
    """

    def __init__(self) -> None:
        self._now_s = _BEGIN_S
        self._tables: dict[str, Trained | VirtualRows] = {}
        self._settings: dict[str, Any] = {}
        self._made: _Taken | None = None
        self._layer: nn.Module | None = None
        self._dense: _CostlyTensors | None = None
        self._lines: list[str] = []
        self._stored: dict[tuple[str, int], bytes] = {}
        self._num_losses = 0
        self._is_serving = False

    @property
    def _to(self) -> _Taken:
        if self._made is None:
            self._made = _Taken([*self._tables.values()], clock=lambda: self._now_s, **self._settings)
            self._made.on_flush = self._take
        return self._made

    def settings(self, **settings: Any) -> None:
        """Set the flusher's settings, before anything else needs it."""
        assert self._made is None
        self._settings = settings

    def table(
        self,
        name: str,
        rows: int = 50,
        dim: int = 4,
        *,
        states: str = "none",
        offset: int = 0,
        total: int | None = None,
        share: float = 1.0,
    ) -> None:
        self._tables[name] = made = Trained(
            name, rows, dim, states=_STATES[states or "none"], row_offset=offset, total_rows=total
        )
        if share < 1:
            made.tapped.hold_back_all_but(share)

    def virtual(self, name: str, places: int = 64, *, states: str = "none") -> None:
        self._tables[name] = VirtualRows(name, places, states=_STATES[states or "none"])

    def layer(self, *, copy_s: float = 0.0, norm: bool = False) -> None:
        """Publish a layer's parameters, or a norm's; a copy of them takes some time."""
        self._layer = nn.BatchNorm1d(3) if norm else nn.Linear(3, 2)
        self._dense = _CostlyTensors(
            self._layer, (), model_name="default", names=None, table_paths=(), has_states=False
        )
        self._to.flusher.check_dense(self._dense, max_frame_bytes=2**26)
        self._to.flusher.add_dense(self._dense)
        self._dense.on_copy = lambda: self.wait(copy_s)
        self.fill("0")

    def _table(self, name: str) -> Trained | VirtualRows:
        assert self._to is not None  # from here on the flusher has it
        return self._tables[name]

    def mark(self, name: str, rows: int | list[int]) -> None:
        self._table(name).tapped.dirty.mark(torch.tensor(_listed(rows), dtype=torch.int64))

    def update(self, name: str, rows: int | list[int], value: float) -> None:
        self._table(name).update(_listed(rows), float(value))

    def change(self, name: str, rows: int | list[int], size: float) -> None:
        """Move rows by a length, and mark them."""
        with torch.no_grad():
            self._table(name).weights[_listed(rows), 0] += size
        self.mark(name, rows)

    def spoil(self, name: str, row: int, value: str, *, state: str = "") -> None:
        """Set one element of a row, of which nobody is told."""
        table = self._table(name)
        with torch.no_grad():
            (table.states[state] if state else table.weights)[row, 0] = float(value)

    def evict(self, name: str, rows: int | list[int]) -> None:
        self._table(name).tapped.evict(torch.tensor(_listed(rows), dtype=torch.int64))

    def drop(self, name: str, rows: int | list[int]) -> None:
        """Hold rows with virtual ids no more."""
        table = self._table(name)
        assert isinstance(table, VirtualRows)
        table.drop(_listed(rows))

    def fill(self, value: str) -> None:
        """Set all values of the layer."""
        assert self._layer is not None
        with torch.no_grad():
            for tensor in self._layer.state_dict().values():
                tensor.fill_(float(value) if tensor.is_floating_point() else 0)

    def reshape(self, name: str) -> None:
        """Give the layer a parameter of another shape."""
        setattr(self._layer, name, nn.Parameter(torch.zeros(5)))

    def wait(self, seconds: float) -> None:
        self._now_s = round(self._now_s + seconds, 6)

    def serve(self) -> None:
        """From now on give each buffer back at once."""
        self._is_serving = True

    def release(self) -> None:
        self._to.release()

    def refuse(self) -> None:
        """Have the sender refuse flushes."""
        self._to.error = UnavailableError("streaming has ended")

    def accept(self) -> None:
        self._to.error = None

    def lose(self, shard: int | None = None) -> None:
        """Have all rows, or those of a shard, wanted again."""
        self._num_losses += 1
        if shard is None:
            self._to.flusher.mark_all(num_losses=self._num_losses)
        else:
            self._to.flusher.mark_shards([shard], num_losses=self._num_losses)

    def dropped(self) -> None:
        """Have the oldest flush whose buffer is in use dropped, as at a switch to another server."""
        flush = next(each for each in self._to.flushes if each.staging is not None)
        self._num_losses += 1
        self._to.flusher.mark_again(DroppedRows.of([flush]).rows, num_losses=self._num_losses)

    def shards(self, num_shards: int) -> None:
        """Go on at a server with another number of shards."""
        self._num_losses += 1
        self._to.flusher.change_shards(num_shards, num_losses=self._num_losses)
        self._settings["num_shards"] = num_shards

    def step(self, step: int) -> str:
        self._to.flusher.on_step(step)
        return self._told()

    def pass_step(self, step: int) -> None:
        """End a step in a pause."""
        self._to.flusher.pass_step(step)

    def flush_all(self, step: int, timeout_s: float = 1.0, *, is_recorded: bool = False) -> str:
        self._to.flusher.flush_all(step, timeout_s, is_recorded=is_recorded)
        return self._told()

    def train(
        self,
        steps: list[int],
        name: str = "",
        rows: int | list[int] | None = None,
        *,
        every: float = 0.0,
        cost: float = 0,
    ) -> str:
        """Make steps, each of which changes the layer and some rows, or that of its number; tell of their flushes."""
        told = []
        self._to.cost = lambda: self.wait(cost)
        for step in _listed(steps):
            self.wait(every)
            if self._layer is not None:
                self.fill(str(step))
            if name:
                self.mark(name, step if rows is None else rows)
            self._to.flusher.on_step(step)
            told += [f"{step}: {line}" for line in self._told().splitlines()]
            self._to.release()
        self._to.cost = None
        return "\n".join(told)

    def stored(self) -> str:
        """Tell which rows of its tables the other side lacks, or has otherwise."""
        parts = []
        for name, table in self._tables.items():
            ids = [*table.place_of] if isinstance(table, VirtualRows) else range(table.tapped.num_local_rows)
            now = dict(zip(ids, self._bytes(table, ids), strict=True))
            lacks = [row for row in ids if (name, row) not in self._stored]
            others = [row for row in {*ids} - {*lacks} if self._stored[name, row] != now[row]]
            parts += [f"{name} lacks {runs(sorted(lacks))}"] if lacks else []
            parts += [f"{name} differs in {runs(sorted(others))}"] if others else []
        return " | ".join(parts or ["equal"])

    def lost(self) -> None:
        """Have the other side lose all rows, and ask for them."""
        self._stored.clear()
        self.lose()

    def rows(self) -> str:
        """Tell how many rows are dirty."""
        return str(self._to.flusher.num_dirty_rows)

    def waiting(self) -> str:
        """Tell how many rows wait."""
        return str(self._to.flusher.num_waiting_rows)

    def buffers(self) -> str:
        """Tell how many are free."""
        return str(self._to.pool.num_free)

    def kind(self, name: str) -> str:
        """Tell how a table's dirty rows are kept."""
        return type(self._tables[name].tapped.dirty).__name__

    def dense_step(self) -> str:
        return str(self._to.flusher.dense_step)

    def cost(self) -> str:
        """Tell what flushes cost, and whether that is why the last one was not earlier."""
        last = self._to.flushes[-1]
        return f"{last.cost_percent:.1f} % bound={self._to.flusher.pace.is_cost_bound}"

    def age(self) -> str:
        """Tell of the last flush how old its oldest change is, and since when rows have waited."""
        last = self._to.flushes[-1]
        assert {message.oldest_us for message in last.messages(0, 1000)} == {last.oldest_us}
        return f"{(last.time_us - last.oldest_us) / 1e6:g} s, since {last.dirty_since_s - _BEGIN_S:g}"

    def messages(self, shard: int = 0, max_bytes: int = 2**20) -> str:
        """Tell of the last flush's messages to a shard."""
        lines = []
        for each in self._to.flushes[-1].messages(shard, max_bytes):
            num_rows = sum(len(delta.row_ids) // 8 for delta in each.deltas)
            ends = " ends it" + " exactly" * each.is_exact_cut if each.ends_step else ""
            lines.append(f"step {each.step}, {num_rows} rows{ends}")
        return "\n".join(lines)

    @property
    def _num_shards(self) -> int:
        found: int = self._settings.get("num_shards", 1)
        return found

    def _take(self, flush: Flush) -> None:
        self._lines.append(self._line(flush))
        if self._is_serving:
            self._to.release()

    def _told(self) -> str:
        lines, self._lines = self._lines, []
        return "\n".join(lines)

    def _line(self, flush: Flush) -> str:
        rows, deleted = rows_of(flush, self._num_shards), deleted_of(flush, self._num_shards)
        parts = []
        for name, table in self._tables.items():
            sent = {row: data for _, fqn, row, data in rows if fqn == name}
            gone = [row for _, fqn, row in deleted if fqn == name]
            assert len(sent) + len(gone) == sum(fqn == name for _, fqn, *_ in [*rows, *deleted]), "a row comes twice"
            assert [*sent.values()] == self._bytes(table, sent), "not the table's bytes"
            placed = np.array([(shard, row) for shard, fqn, row, *_ in [*rows, *deleted] if fqn == name]).reshape(-1, 2)
            shards = shards_of_rows(table.tapped.spec.seed, placed[:, 1], self._num_shards)
            assert (shards == placed[:, 0]).all(), "a wrong shard"
            self._stored |= {(name, row): data for row, data in sent.items()}
            for row in gone:
                self._stored.pop((name, row), None)
            parts += [f"{name} {runs(sorted(sent))}"] if sent else []
            parts += [f"{name} deletes {runs(sorted(gone))}"] if gone else []
        if self._dense is not None and (found := dense_of(flush, self._dense, self._num_shards)):
            assert found.keys() == {each.path for each in self._dense.all}
            values = {f"{value:g}" for tensor in found.values() for value in tensor.unique().tolist()}
            parts.append(f"dense {' '.join(sorted(values))}")
        if flush.mark is not None:
            kinds = " exact" * flush.mark.is_exact_cut + " recorded" * flush.mark.is_recorded
            parts.append(f"mark {flush.mark.step}{kinds}")
        return " | ".join(parts or ["no row, no mark"])

    @staticmethod
    def _bytes(table: Trained | VirtualRows, rows: Iterable[int]) -> list[bytes]:
        """Return what rows should be sent as."""
        columns = [column.detach() for column in (table.weights, *table.states.values())]
        whole = torch.cat([column.view(torch.uint8) for column in columns], dim=1).numpy()
        if isinstance(table, VirtualRows):
            return [whole[table.place_of[row]].tobytes() for row in rows]
        return [whole[row - table.tapped.row_offset].tobytes() for row in rows]


def _listed(rows: int | Iterable[int]) -> list[int]:
    return [rows] if isinstance(rows, int) else list(rows)
