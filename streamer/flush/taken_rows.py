"""What the host takes out of its tables for one flush."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from headrace.streamer.flush.device_cut import DeviceCut
from headrace.streamer.flush.gather import RowGatherer

__all__ = ["TakenRows"]

_Ids = npt.NDArray[np.int64]


class TakenRows:
    """Rows taken for one flush: gives them back if the flush comes to nothing.

    Attributes:
        deleted: Rows to be deleted, by table.
        cursor: Table and row at which the next flush goes on.
        cut: What of the flush is on its way from the device.
    """

    def __init__(self) -> None:
        """Begin with none."""
        self._parts_of: dict[RowGatherer, list[torch.Tensor]] = {}
        self.deleted: dict[RowGatherer, torch.Tensor] = {}
        self.cursor = (0, 0)
        self.cut: DeviceCut | None = None

    def add(self, source: RowGatherer, row_ids: torch.Tensor) -> None:
        """Note rows of a table, int64[n], local, on the CPU; several times, in any order."""
        if row_ids.numel():
            self._parts_of.setdefault(source, []).append(row_ids)

    def by_table(self) -> Iterator[tuple[RowGatherer, _Ids]]:
        """Yield each table with its local rows, unique and ascending."""
        for source, parts in self._parts_of.items():
            # A sweep takes a table's end before its beginning, and a long table is taken in parts.
            yield source, parts[0].numpy() if len(parts) == 1 else np.sort(torch.cat(parts).numpy())

    def note_sent(self) -> None:
        """Note that the rows go out, and are used again if they were evicted."""
        for source, parts in self._parts_of.items():
            for part in parts:
                source.table.deleted.note_sent(part)

    def give_back(self) -> None:
        """Make the rows dirty again, and have those deleted that were to be."""
        for source, parts in self._parts_of.items():
            for part in parts:
                source.table.dirty.mark(part)
        for source, row_ids in self.deleted.items():
            source.table.deleted.give_back(row_ids)
