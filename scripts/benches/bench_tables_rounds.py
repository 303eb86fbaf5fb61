"""What the benches of backfill and export share: how much is measured, and the rounds of a child and its peer."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated

import typer

from headrace.scripts.benches.bench_tables_child import ChildResult

__all__ = ["ChildRounds", "RowsOption", "TablesConfig"]

RowsOption = Annotated[int, typer.Option("--rows", min=1000, help="Rows of the table.")]
_MEMORY_PARTS = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class TablesConfig:
    """How much is measured.

    Attributes:
        num_rows: Rows of 64 float32 and a rowwise state.
        num_rounds: Both are measured so often, in turn; the medians count.
        folder: Where files go; None for the system's temporary folder.
    """

    num_rows: int = 5_000_000
    num_rounds: int = 1
    folder: Path | None = None

    @property
    def num_stages(self) -> int:
        """How often `on_stage` is called."""
        return 3 + 2 * self.num_rounds

    @property
    def few_rows(self) -> int:
        """Rows of the small table, whose memory is held against the whole one's."""
        return max(self.num_rows // _MEMORY_PARTS, 1)


class ChildRounds:
    """What children of several kinds took, round after round.

    Attributes:
        walls: By kind, seconds of each round.
    """

    def __init__(self, config: TablesConfig) -> None:
        """Begin with no round."""
        self._config = config
        self.walls: dict[str, list[float]] = {}
        self._cpus: dict[str, list[float]] = {}
        self._peaks: dict[str, list[float]] = {}

    def add(self, kind: str, result: ChildResult) -> None:
        """Note one child."""
        self.walls.setdefault(kind, []).append(result["wall_s"])
        self._cpus.setdefault(kind, []).append(result["cpu_s"])
        self._peaks.setdefault(kind, []).append(result["peak_rss_bytes"])

    def wall_ratio(self, kind: str, peer: str) -> float:
        """Return how many times as fast as a peer a kind is."""
        return median(self.walls[peer]) / median(self.walls[kind])

    def cpu_ratio(self, kind: str, peer: str) -> float:
        """Return the same in processor time."""
        return median(self._cpus[peer]) / median(self._cpus[kind])

    def per_s(self, number: float) -> dict[str, float]:
        """Return by kind how many of something that all have done `number` of they do in a second."""
        return {kind: number / median(seconds) for kind, seconds in self.walls.items()}

    def cpu_us_per_row(self, kind: str) -> float:
        """Return a kind's processor time for a row, microseconds."""
        return 1e6 * median(self._cpus[kind]) / self._config.num_rows

    def peak_rss_bytes(self, kind: str, few: ChildResult) -> dict[str, float]:
        """Return the most memory that the small table and the whole one took, by their rows."""
        return {str(self._config.few_rows): few["peak_rss_bytes"], str(self._config.num_rows): max(self._peaks[kind])}
