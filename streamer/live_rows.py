"""Fetch present values of rows from the trainer's own tables, by id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy.typing as npt
import torch

from headrace.paramserver.system.text import describe_near
from headrace.schemas.errors import RowRangeError, UnknownTableError
from headrace.schemas.tables import row_ids_of
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["LiveRows", "fetch_rows"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LiveRows:
    """Copies of rows of one table, in the order of the given ids.

    Attributes:
        row_ids: The given ids, flattened, int64[n] on the CPU.
        columns: (first column, number of columns) of each part on this rank, side by side in weights and states.
        weights: `[n, width of all parts]` on the CPU.
        states: By name, `[n, width]` on the CPU. A rowwise state has one value per part.
    """

    row_ids: torch.Tensor
    columns: tuple[tuple[int, int], ...]
    weights: torch.Tensor
    states: dict[str, torch.Tensor]


def fetch_rows(tables: Sequence[TappedTable], fqn: str, row_ids: npt.ArrayLike) -> LiveRows:
    """Return present rows of one of this rank's tables; see `RawEmbeddingStreamer.fetch`."""
    parts = [table for table in tables if table.spec.fqn == fqn]
    if not parts:
        near = describe_near(fqn, (table.spec.fqn for table in tables))
        raise UnknownTableError(f"no table {fqn!r} is streamed on this rank; {near}")
    ids = torch.tensor(row_ids_of(row_ids))
    by_columns: dict[tuple[int, int], list[TappedTable]] = {}
    for part in parts:
        by_columns.setdefault((part.shard.offset, part.shard.width), []).append(part)
    columns = tuple(sorted(by_columns))
    pieces = [_gather(by_columns[of], ids) for of in columns]
    return LiveRows(
        row_ids=ids,
        columns=columns,
        weights=torch.cat([piece["weights"] for piece in pieces], dim=1),
        states={
            state.name: torch.cat([piece[f"state:{state.name}"] for piece in pieces], dim=1)
            for state in parts[0].spec.states
        },
    )


def _gather(parts: Sequence[TappedTable], ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Gather rows, by the names of their columns, from parts with the same columns and different rows."""
    spec, shard = parts[0].spec, parts[0].shard
    found = torch.zeros(ids.numel(), dtype=torch.bool)
    columns: dict[str, torch.Tensor] = {}
    for part in parts:
        if part.index is None:
            places = ids - part.row_offset
            inside = (places >= 0) & (places < part.num_local_rows)
        else:
            places = part.places(ids)
            inside = places >= 0
        found |= inside
        states = part.states()
        live = {"weights": part.weights()} | {f"state:{state.name}": states[state.name] for state in spec.states}
        for name, tensor in live.items():
            if name not in columns:
                columns[name] = torch.zeros(ids.numel(), tensor.shape[1], dtype=tensor.dtype)
            local = places[inside].to(tensor.device)
            columns[name][inside] = tensor.detach().index_select(0, local).cpu()
    if not bool(found.all()):
        missing = int(ids[~found][0])
        raise RowRangeError(
            f"table {spec.fqn!r}: row {missing} is not on this rank, or beyond the table's {spec.num_rows} rows "
            f"(columns {shard.offset} to {shard.offset + shard.width - 1})"
        )
    return columns
