"""`headrace bench importance`: bytes and hit rate of a served copy where rows that hardly changed wait.

The model of `headrace demo` learns from an interaction log in time order. For each setting a flusher of its own takes
what one tap has marked, and the rows of its flushes go into a copy of its own, which ranks the next batch: its users
and its items are both the copy's; only the dense layer, 32 numbers, is the trainer's. All copies see the same training
and the same rivals. A batch takes a second of the flushers' clock and ends with a flush, as with `freshness_s=1`. The
other way to fewer bytes is to flush more rarely, so it is measured too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from headrace.scripts.benches.harness import OnStage, RoundsOption, bench_command, one_torch_thread
from headrace.scripts.ranking_demo.events import SAMPLE, TABLES, TOP, Replay, is_hit, read_events
from headrace.scripts.ranking_demo.training import DemoModel, process_group
from headrace.streamer.config import StreamerConfig
from headrace.streamer.flush.flusher import Flusher
from headrace.streamer.flush.layout import Flush, FlushedTable
from headrace.streamer.flush.staging import StagingPool
from headrace.streamer.taps.attach import Tap, tap_model
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["ImportanceConfig", "importance", "measure"]

_MAX_STALENESS_S = StreamerConfig().max_staleness_s
_STAGING_BYTES = 4 << 20
# What the hit rate may lose, points of a percent, in the figure that has a target.
_MAX_LOSS = 0.5
_Rows = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportanceConfig:
    """How much `headrace bench importance` measures."""

    events: Annotated[Path, typer.Option(metavar="FILE", help="Interaction log, as of `headrace demo`.")] = SAMPLE
    max_events: Annotated[int, typer.Option("--max-events", min=400, help="Use only the earliest ones.")] = 10**9
    batch_events: Annotated[int, typer.Option(min=1, help="Events of a batch.")] = 32
    shares: tuple[float, ...] = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4)  # of the changed rows, in a flush
    intervals: tuple[int, ...] = (2, 3, 4, 6, 8, 16)  # batches from one flush of everything to the next
    staleness_s: tuple[float, ...] = (10, 20, 60, 200)
    staleness_share: float = 0.1  # of the items
    num_rounds: RoundsOption = 3  # each with a seed of its own


def measure(config: ImportanceConfig, on_stage: OnStage) -> dict[str, Any]:
    """Measure bytes and hit rate of served copies, where each flush sends a share of the changed rows.

    The exit code is 1 if a figure misses its target.
    """
    log = read_events(config.events, max_events=config.max_events)
    rounds: dict[str, list[list[_Found]]] = {}
    rates, num_events = [], 0
    with one_torch_thread(), process_group():
        for seed in range(config.num_rounds):
            replay = Replay(log=log, batch_events=config.batch_events, seed=seed)
            copies = _run(config, replay, lambda what, seed=seed: on_stage(f"round {seed + 1}: {what}"))  # type: ignore[misc]
            (everything,) = copies.pop("everything")
            num_events = everything.num_events
            rates.append(everything.num_hits / num_events)
            for name, of_curve in copies.items():
                found = [copy.found(everything) for copy in of_curve]
                before = rounds.setdefault(name, [[] for _ in found])
                for of_x, value in zip(before, found, strict=True):
                    of_x.append(value)
    curves = {name: {"x": x, **_series(rounds[name])} for name, x in _settings(config).items()}
    return {
        "num_events": num_events,
        "hit_rate": {"top": TOP, "everything": rates},
        "max_staleness_s": _MAX_STALENESS_S,
        "staleness_share": config.staleness_share,
        "max_loss_points": _MAX_LOSS,
        "bytes_ratio": {name: _least_bytes(curves[name]) for name in ("share", "share_of_items", "rarely")},
        "curves": curves,
    }


@dataclass(frozen=True, slots=True)
class _Found:
    bytes_ratio: float
    released_ratio: float
    loss_points: float


def _settings(config: ImportanceConfig) -> dict[str, list[float]]:
    """Return the values of each curve's setting."""
    return {
        "rarely": list(config.intervals),
        "share": list(config.shares),
        "share_of_items": list(config.shares),
        "staleness": list(config.staleness_s),
    }


def _series(found: Sequence[Sequence[_Found]]) -> dict[str, list[list[float]]]:
    names = ("bytes_ratio", "released_ratio", "loss_points")
    return {name: [[getattr(each, name) for each in of_x] for of_x in found] for name in names}


def _least_bytes(curve: Mapping[str, Any]) -> float | None:
    """Return the least bytes, of everything sent, of a setting that loses no more than `_MAX_LOSS` in any round."""
    points = zip(curve["bytes_ratio"], curve["loss_points"], strict=True)
    return min((median(of_x) for of_x, losses in points if max(losses) <= _MAX_LOSS), default=None)


def _run(config: ImportanceConfig, replay: Replay, on_stage: Callable[[str], None]) -> dict[str, list[_Copy]]:
    """Train once, and return all copies, by curve; the first tenth of the log is trained on and not counted."""
    log = replay.log
    model = DemoModel(num_users=log.user_ids.size, num_items=log.item_ids.size, seed=replay.seed)
    tap = tap_model(model.dmp, (), lambda: None, is_streamed=False)
    item = (TABLES[1],)
    share = config.staleness_share
    copies = {
        "everything": [_Copy(tap, {})],
        "rarely": [_Copy(tap, {}, flush_interval_s=interval) for interval in config.intervals],
        "share": [_Copy(tap, dict.fromkeys(TABLES, share)) for share in config.shares],
        "share_of_items": [_Copy(tap, dict.fromkeys(item, share)) for share in config.shares],
        "staleness": [_Copy(tap, dict.fromkeys(item, share), max_staleness_s=s) for s in config.staleness_s],
    }
    every = [copy for of_curve in copies.values() for copy in of_curve]
    first_batch = replay.part_starts[1]
    try:
        for batch in range(replay.num_batches):
            events = replay.events_of(batch)
            users, items, candidates = log.users[events], log.items[events], replay.candidates(batch)
            if batch % 50 == 0:
                on_stage(f"batch {batch} of {replay.num_batches}")
            if batch >= first_batch:
                top = model.dmp.state_dict()["top.weight"].numpy().ravel()
                for copy in every:
                    copy.rank(users, candidates, top)
            model.train(batch, users, items, replay.num_items_seen[events])
            tap.end_step()
            changed = {table.path: table.dirty.take() for table in tap.tables}
            for copy in every:
                copy.step(batch + 1, changed)
    finally:
        tap.close()
    return copies


class _Copy:
    """What a server would have of the tables, by the flushes of one setting.

    Attributes:
        num_events: Events that were ranked.
        num_hits: Those that were hits.
        num_bytes: Bytes of the flushes since all rows were published.
        num_released_bytes: Those of flushes after which nothing waits.
    """

    def __init__(self, tap: Tap, shares: Mapping[str, float], **settings: Any) -> None:
        """Publish all rows."""
        self.num_events = self.num_hits = self.num_bytes = self.num_released_bytes = 0
        self._now_s, self._pool = 0.0, StagingPool(_STAGING_BYTES)
        self._tables = {table.path: _copy_of(table) for table in tap.tables}
        for path, share in shares.items():
            self._tables[path].hold_back_all_but(share)
        config = StreamerConfig(**{"freshness_s": 0, "max_cost_percent": 100, **settings})
        self._flusher = Flusher(
            config=config,
            num_shards=1,
            pool=self._pool,
            submit=self._apply,
            describe_delay=lambda: "no server",
            monotonic_s=lambda: self._now_s,
        )
        self._rows: dict[str, _Rows] = {
            path: np.zeros((table.num_local_rows, table.shard.width), np.float32)
            for path, table in self._tables.items()
        }
        self._flusher.add_tables(list(self._tables.values()))
        for table in self._tables.values():
            table.mark_all()
        self._flusher.flush_all(0, 1.0)
        self.num_bytes = self.num_released_bytes = 0

    def step(self, step: int, changed: Mapping[str, Any]) -> None:
        """End a step that has changed rows, by table."""
        for path, row_ids in changed.items():
            self._tables[path].dirty.mark(row_ids)
        self._now_s += 1.0
        self._flusher.on_step(step)

    def rank(self, users: npt.NDArray[np.int64], candidates: npt.NDArray[np.int64], top: _Rows) -> None:
        """Count the events that the copy ranks as hits."""
        of_users, of_items = (self._rows[path] for path in TABLES)
        scores = np.einsum("bd,bnd->bn", of_users[users] * top, of_items[candidates])
        self.num_events += users.size
        self.num_hits += int(is_hit(scores).sum())

    def found(self, everything: _Copy) -> _Found:
        """Return the figures beside those of a copy to which everything is sent."""
        loss = (everything.num_hits - self.num_hits) / self.num_events
        return _Found(self.num_bytes / everything.num_bytes, self.num_released_bytes / everything.num_bytes, 100 * loss)

    def _apply(self, flush: Flush) -> None:
        for table in flush.tables:
            assert isinstance(table, FlushedTable)
            rows = self._rows[table.format.spec.fqn]
            row_ids = np.frombuffer(table.row_ids.data, "<i8")
            rows[row_ids] = np.frombuffer(table.weights.data, "<f4").reshape(row_ids.size, -1)
        self.num_bytes += flush.size_bytes
        self.num_released_bytes += flush.size_bytes * (flush.mark is not None)
        assert flush.staging is not None
        self._pool.release(flush.staging)


def _copy_of(table: TappedTable) -> TappedTable:
    """Return another table of the same live values, with dirty rows of its own."""
    return TappedTable(spec=table.spec, num_local_rows=table.num_local_rows, weights=table.weights, states=table.states)


importance = bench_command("importance", ImportanceConfig, measure, has_bounds=True)
