"""Tables that your own code holds by row id, such as a dictionary or a hash table on a disk or a device.

`RawEmbeddingStreamer.attach_source` streams such a table. Nothing hooks it: you say which rows have changed
(`StreamedSource.mark`), and a flush reads them from the source.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import numpy.typing as npt
import torch

from headrace.kernels.plain_context import in_plain_context, users_context
from headrace.schemas.errors import UnsupportedModelError
from headrace.schemas.tables import StateKind, StateSpec, TableSpec, row_ids_of
from headrace.streamer.taps.local_parts import TableCopy
from headrace.streamer.taps.tapped_table import TappedTable, dtype_of

__all__ = ["SourceRows", "SourceTap", "StreamedSource", "TableSource"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SourceRows:
    """Rows that a source has been asked for, as they are now.

    Attributes:
        is_held: bool[n], of each row that was asked for, whether the source holds it.
        weights: `[m, dim]` of the m rows that it holds, in the order asked for; on any device.
        states: Optimizer states of the same rows by name, each `[m, dim]`, or `[m, 1]` for one value per row.
    """

    is_held: torch.Tensor
    weights: torch.Tensor
    states: Mapping[str, torch.Tensor] = field(default_factory=dict)


class TableSource(Protocol):
    """Holds the rows of one table. Ids are 0 to 2⁶³ − 1; rows come and go.

    It is called on the training thread, or on another one while that waits (`audit`, `load_state_dict`); never while a
    row is being written.
    """

    def row_ids(self) -> torch.Tensor:
        """Return the ids of all rows that are held, int64[k], each once, in any order."""

    def read(self, row_ids: torch.Tensor) -> SourceRows:
        """Return rows, int64[n] on the CPU, each once. Without ids, the shapes and types alone are told."""


class StreamedSource:
    """A source that is streamed. Thread: the training thread's."""

    def __init__(self, table: TappedTable) -> None:
        """Mark rows of `table`; `RawEmbeddingStreamer.attach_source` makes it."""
        self._table = table

    @property
    def name(self) -> str:
        """The table's name."""
        return self._table.spec.fqn

    @in_plain_context
    def mark(self, row_ids: npt.ArrayLike) -> None:
        """Say that rows have changed, are new, or are not held any more. They go out with the next flushes.

        A marked row that the source does not hold when it is read is deleted in the store. Call it once the rows are
        written, before the step ends.

        Args:
            row_ids: Integers of any shape, as a tensor, array or list; may repeat.

        Raises:
            RowRangeError: An id is negative.
            RequestError: The ids are not integers, for example a mask.
        """
        ids = torch.unique(torch.tensor(row_ids_of(row_ids), dtype=torch.int64, device="cpu"))
        self._table.spec.check_row_ids(ids.numpy())
        self._table.dirty.mark(ids)

    def __repr__(self) -> str:
        return f"StreamedSource({self.name!r}, {self._table.dirty.count} rows to send)"


class SourceTap:
    """A tap on one source, which ends no steps: that is for the model that is trained, or `streamer.step()`."""

    def __init__(self, path: str, source: TableSource) -> None:
        """Ask the source for shapes and types.

        Raises:
            UnsupportedModelError: A type cannot be streamed, or a shape is none of a table's.
        """
        self._window = _Window(path, source)
        self.table = TappedTable(
            spec=self._window.spec,
            num_local_rows=0,
            weights=lambda: self._window.rows.weights,
            states=lambda: dict(self._window.rows.states),
            index=self._window,
        )
        self.tables = [self.table]
        self.names = frozenset([path])
        self.unstreamed: dict[str, str] = {}

    def copies(self) -> list[TableCopy]:
        """Return none: no rank has the same rows."""
        return []

    def new_tables(self) -> list[str]:
        """Return none: a source is one table."""
        return []

    def end_step(self) -> bool:
        """End nothing."""
        return False

    def sweep(self) -> None:
        """The owner of the source says what has changed."""

    def close(self) -> None:
        """There is no hook to remove."""


class _Window:
    """The rows that were asked for last: a `RowIndex` whose places are theirs.

    So whoever asks for places reads weights and states of the same rows right behind.

    Attributes:
        rows: The rows.
        spec: The table, as the source tells it when it is asked for no row.
    """

    def __init__(self, path: str, source: TableSource) -> None:
        self._path, self._source = path, source
        self.rows = self._read(torch.empty(0, dtype=torch.int64, device="cpu"))
        weights = self.rows.weights
        if weights.ndim != 2 or not weights.shape[1]:
            raise UnsupportedModelError(
                f"source {path!r}: weights of shape {list(weights.shape)}: return [rows, dim]; see docs/sources.md"
            )
        dim, states = weights.shape[1], []
        for name, state in self.rows.states.items():
            if state.ndim != 2 or state.shape[1] not in (1, dim):
                raise UnsupportedModelError(
                    f"source {path!r}: state {name!r} of shape {list(state.shape)}, neither [rows, {dim}] nor [rows, 1]"
                    "; see docs/sources.md"
                )
            kind = StateKind.POINTWISE if state.shape[1] == dim else StateKind.ROWWISE
            dtype = dtype_of(f"state {name!r} of source {path!r}", state.dtype)
            states.append(StateSpec(name=name, kind=kind, dtype=dtype, width=int(kind is StateKind.ROWWISE)))
        dtype = dtype_of(f"source {path!r}", weights.dtype)
        self.spec = TableSpec(fqn=path, num_rows=0, dim=dim, dtype=dtype, states=tuple(states))

    def find(self, row_ids: torch.Tensor) -> torch.Tensor:
        """Read rows; return their places among those that are held, -1 for the others."""
        rows = self._read(row_ids)
        is_held = rows.is_held.detach().cpu()
        num_held = int(is_held.sum())
        counts = {"weights": rows.weights.shape[0], **{name: each.shape[0] for name, each in rows.states.items()}}
        if is_held.dtype != torch.bool or is_held.shape != row_ids.shape or set(counts.values()) != {num_held}:
            raise UnsupportedModelError(
                f"source {self._path!r}: asked for {row_ids.numel()} rows, it gave {rows.is_held.dtype}"
                f"{list(is_held.shape)} for those that it holds, and rows of {counts}; see docs/sources.md"
            )
        if missing := {state.name for state in self.spec.states} - rows.states.keys():
            raise UnsupportedModelError(
                f"source {self._path!r} gave rows without state {min(missing)!r}: return the same states each time"
            )
        self.rows = rows
        places = torch.full(row_ids.shape, -1, dtype=torch.int64, device="cpu")
        places[is_held] = torch.arange(num_held, dtype=torch.int64, device="cpu")
        return places

    def row_ids(self) -> torch.Tensor:
        """Return the ids of all rows."""
        with users_context():
            return self._source.row_ids()

    def _read(self, row_ids: torch.Tensor) -> SourceRows:
        with users_context():
            return self._source.read(row_ids)
