"""A copy of tapped tables that only learns of rows that were marked dirty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from headrace.streamer.taps.attach import Tap, tap_model
from headrace.streamer.taps.tapped_table import TappedTable


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of `[rows, width]` as uint8 `[rows, bytes]`: equal for equal bits, NaN and -0.0 included."""
    return tensor.detach().contiguous().view(torch.uint8).reshape(tensor.shape[0], -1)


def part_name(table: TappedTable) -> str:
    """Return the table's name, with the columns if they are not all."""
    if table.shard == table.spec.whole:
        return table.spec.fqn
    return f"{table.spec.fqn}[{table.shard.offset}:{table.shard.offset + table.shard.width}]"


def full_values(table: TappedTable) -> dict[str, torch.Tensor]:
    """Return copies of a table's weights and states."""
    return {"weights": present_weights(table), **{k: v.clone() for k, v in table.states().items()}}


def present_weights(table: TappedTable) -> torch.Tensor:
    """Return a copy of a table's weights, with those that a cache has."""
    return table.weights_at(torch.arange(table.num_local_rows))


class Mirror:
    """Takes the dirty rows at each step boundary, copies them, and compares everything, bit for bit.

    Make it, pass `on_step` to `tap_model`, then `watch` the tap.

    Attributes:
        taken: For each boundary, the ids taken by table.
    """

    def __init__(self) -> None:
        self.taken: list[dict[str, list[int]]] = []
        self._tables: list[TappedTable] = []
        self._values: list[dict[str, torch.Tensor]] = []

    def watch(self, tap: Tap) -> None:
        """Start from the present values of a tap's tables."""
        self._tables = tap.tables
        self._values = [full_values(table) for table in self._tables]

    def on_step(self) -> None:
        """Copy the rows that are dirty; all others must be as they were."""
        taken: dict[str, list[int]] = {}
        for table, values in zip(self._tables, self._values, strict=True):
            ids = table.dirty.take()
            assert table.dirty.is_empty
            taken[part_name(table)] = ids.tolist()
            live = {"weights": present_weights(table), **table.states()}
            assert list(live) == ["weights", *(state.name for state in table.spec.states)]
            for name, tensor in live.items():
                values[name][ids] = tensor[ids]
        self.taken.append(taken)
        self.check()

    def check(self) -> None:
        """Compare all rows of all tables with the mirror."""
        for table, values in zip(self._tables, self._values, strict=True):
            for name, live in {"weights": present_weights(table), **table.states()}.items():
                assert live.shape[0] == table.num_local_rows
                different = (bits(live) != bits(values[name])).any(dim=1).nonzero().flatten().tolist()
                assert not different, f"{part_name(table)} {name}: rows {different} differ"

    def changed(self, train: Callable[[], object]) -> dict[str, list[int]]:
        """Run `train` and return the rows whose bits it changed, by table."""
        before = [full_values(table) for table in self._tables]
        train()
        found = {}
        for table, old in zip(self._tables, before, strict=True):
            now = full_values(table)
            different = torch.stack([(bits(now[name]) != bits(old[name])).any(dim=1) for name in now]).any(dim=0)
            found[part_name(table)] = different.nonzero().flatten().tolist()
        return found


def mirrored(model: nn.Module, optimizers: Any = (), **settings: Any) -> tuple[Tap, Mirror]:
    """Tap a model, with settings of `tap_model`, and mirror its tables from now on."""
    mirror = Mirror()
    tap = tap_model(model, optimizers, mirror.on_step, **settings)
    mirror.watch(tap)
    return tap, mirror
