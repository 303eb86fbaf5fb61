"""Plan a reshard: which partitions move, in what stages, how long it takes, and how long writes pause.

`make_plan` is a pure function of numbers: the same input gives the same plan, in any thread and process. `placement.py`
says how owners are chosen, and `stages.py` how stages are found and timed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

import numpy as np

from headrace.paramserver.reshard.inventory import Cluster, Goal, Loads
from headrace.paramserver.reshard.placement import Band, least_bytes, place
from headrace.paramserver.reshard.stages import StageTimes, find_stages, time_stage
from headrace.paramserver.reshard.transport import Ints
from headrace.paramserver.system.text import counted
from headrace.schemas.errors import RequestError

__all__ = ["Move", "Plan", "PlannedDisk", "Stage", "make_plan"]

_MAX_RUNS = 8  # of partitions that the text of a plan names for each way; `--json` has all


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """A partition that goes from one shard to another."""

    partition: int
    source: int
    destination: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Moves that go at once; the next stage begins when the sources have removed what moved."""

    moves: tuple[Move, ...]
    size_bytes: int
    times: StageTimes


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedDisk:
    """A node's disk: the most that it holds beyond today's bytes at any time, and what is free then."""

    node: str
    peak_added_bytes: int
    least_free_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a reshard does.

    Attributes:
        stages: In order; none where nothing need move.
        disks: Of the nodes that get bytes, by name.
        num_partitions: Of the server.
        moved_bytes: Of all stages; a partition that goes through another node counts twice.
        least_bytes: No plan for the same goal moves fewer.
        balance: What is evened out.
        worst_before: The highest load of a shard ÷ the mean of the goal's shards.
        worst_after: The same after the last stage.
    """

    stages: tuple[Stage, ...]
    disks: tuple[PlannedDisk, ...]
    num_partitions: int
    moved_bytes: int
    least_bytes: int
    balance: str
    worst_before: float
    worst_after: float

    @property
    def seconds(self) -> float:
        """Of all stages."""
        return sum(stage.times.seconds for stage in self.stages)

    @property
    def write_pause_s(self) -> float:
        """The longest of any stage."""
        return max((stage.times.write_pause_s for stage in self.stages), default=0.0)

    def to_dict(self) -> dict[str, Any]:
        """Return what `--json` prints: the fields, with `seconds` and `write_pause_s`."""
        return {**asdict(self), "seconds": self.seconds, "write_pause_s": self.write_pause_s}

    def text(self) -> str:
        """Return what `--plan` prints, lines without a newline at the end."""
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        if not self.stages:
            yield f"nothing to move: the fullest shard has {self.worst_before:.2f} × the mean of {self.balance}"
            return
        num_moves = sum(len(stage.moves) for stage in self.stages)
        yield (
            f"{num_moves:,} moves among {self.num_partitions:,} partitions, {_size(self.moved_bytes)} "
            f"(at least {_size(self.least_bytes)}) in {counted(len(self.stages), 'stage')}, {self.seconds:,.1f} s, "
            f"writes pause for up to {self.write_pause_s:.3f} s"
        )
        change = f"{self.worst_before:.2f} × before, {self.worst_after:.2f} × after"
        yield f"fullest shard, of the mean of {self.balance}: {change}"
        for number, stage in enumerate(self.stages, 1):
            times = stage.times
            yield (
                f"stage {number}: {len(stage.moves):,} moves, {_size(stage.size_bytes)}, {times.seconds:,.1f} s "
                f"(copy {times.copy_s:,.1f}, follow {times.follow_s:,.1f}, verify {times.verify_s:,.1f}, "
                f"purge {times.purge_s:,.1f}), "
                f"pause {times.write_pause_s:.3f} s"
            )
            by_way = sorted(stage.moves, key=lambda move: (move.source, move.destination, move.partition))
            for (source, to), moves in groupby(by_way, key=lambda move: (move.source, move.destination)):
                yield f"  shard {source} → {to}: partitions {_ranges([move.partition for move in moves])}"
        for disk in self.disks:
            left = _size(disk.least_free_bytes)
            yield f"disk of {disk.node}: {_size(disk.peak_added_bytes)} more at most, {left} stay free"


def make_plan(cluster: Cluster, loads: Loads, goal: Goal, *, owner: Ints | None = None) -> Plan:
    """Return the plan for a goal.

    Args:
        cluster: Nodes, shards and speeds.
        loads: The partitions.
        goal: Which shards shall own them, and what is evened out. See `drain` for a node's removal.
        owner: int64[partitions], who shall own each, if this is decided already: then only stages are found.

    Raises:
        RequestError: No plan can work: updates outrun applying, caps leave no placement, or disks no order. The message
            says what lacks, and how much.
    """
    wrong = [shard for shard in (*goal.shards, int(loads.owner.max())) if not 0 <= shard < len(cluster.shards)]
    if wrong:
        raise RequestError(f"there is no shard {wrong[0]}; there are {len(cluster.shards)}")
    band = Band.of(cluster, loads, goal)
    target = place(cluster, loads, goal, band) if owner is None else owner
    stages, at, node = [], loads.owner.copy(), cluster.node_of_shard
    added, peak = np.zeros(len(cluster.nodes), np.int64), np.zeros(len(cluster.nodes), np.int64)
    for parts, to in find_stages(cluster, loads, target):
        moves = zip(parts.tolist(), at[parts].tolist(), to.tolist(), strict=True)
        size = loads.size_bytes[parts]
        stages.append(
            Stage(
                moves=tuple(Move(partition=part, source=source, destination=there) for part, source, there in moves),
                size_bytes=int(size.sum()),
                times=time_stage(cluster, loads, at, parts, to),
            )
        )
        np.add.at(added, node[to], size)
        peak = np.maximum(peak, added)
        np.subtract.at(added, node[at[parts]], size)
        at[parts] = to
    shards = len(cluster.shards)
    before, after = (np.bincount(who, band.weight, shards) for who in (loads.owner, at))
    mean = max(float(band.weight.sum()) / len(goal.shards), 1e-9)
    return Plan(
        stages=tuple(stages),
        disks=tuple(
            PlannedDisk(node=each.name, peak_added_bytes=more, least_free_bytes=each.free_bytes - more)
            for each, more in sorted(zip(cluster.nodes, peak.tolist(), strict=True), key=lambda pair: pair[0].name)
            if more
        ),
        num_partitions=len(target),
        moved_bytes=sum(stage.size_bytes for stage in stages),
        least_bytes=least_bytes(loads, band) if owner is None else int(loads.size_bytes[target != loads.owner].sum()),
        balance=goal.balance,
        worst_before=float(before.max()) / mean,
        worst_after=float(after.max()) / mean,
    )


def _size(num_bytes: int) -> str:
    """Return bytes as people write them."""
    size, units = float(num_bytes), ["B", "kB", "MB", "GB", "TB"]
    while size >= 1000 and len(units) > 1:
        size /= 1000
        units.pop(0)
    return f"{size:.3g} {units[0]}"


def _ranges(numbers: list[int]) -> str:
    """Return ascending numbers with runs put together, `1, 4-9`, and how many there are behind the first runs."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    told = ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs[:_MAX_RUNS])
    more = sum(last - first + 1 for first, last in runs[_MAX_RUNS:])
    return f"{told} and {more:,} more" if more else told
