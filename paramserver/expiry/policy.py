"""Decide which rows expire. No I/O: rows and clocks come in as arguments.

Only *settled* rows are judged: every rank of the table's owner has ended a later step than the row's newest update. So
all column shards of that update are here, and whatever a rank sends later has a newer version. A row of which the
version is still the judged one was therefore not written since (`table_pass.py` relies on it). Until the owner has
ended a step, nothing is settled.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.log.sessions import Sessions
from headrace.paramserver.store.catalog import Owner
from headrace.paramserver.system.text import BYTES_BY_UNIT, SECONDS_BY_UNIT
from headrace.schemas.errors import ConfigError
from headrace.schemas.table_names import matches
from headrace.schemas.version import is_newer

__all__ = [
    "BudgetThreshold",
    "ExpiryPolicy",
    "ExpiryRules",
    "Horizon",
    "Recency",
    "RowFacts",
    "StepRange",
    "Verdict",
    "judge",
]

_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)([A-Za-z]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiryPolicy:
    """Which rows of a table expire, and when the server starts a pass.

    Attributes:
        ttl_s: A row expires when not updated for longer than this, seconds, by `clock`.
        clock: `trainer`: the trainer's clock at its last step, but at most the server's clock, so nothing ages while
            nobody trains; `wall`: the server's clock.
        idle_steps: A row expires when not updated for more than so many steps.
        min_frequency: A row expires when updated more rarely, see `frequency.py`. 1 expires rows that missed one pass.
        decay: Share of a row's frequency that is left after each pass, 0 to below 1.
        min_l2_norm: A row expires when its weights' Euclidean norm is below this.
        match: Whether `any` or `all` of the given conditions above must hold.
        max_rows: Rows that the table keeps, over all shards; beyond it the least recently updated expire too.
        interval_s: Seconds between passes.
        trigger_rows: A pass starts when the table has about more rows than this, over all shards.
        trigger_bytes: A pass starts when the table's rows take about more bytes than this, over all shards.
    """

    ttl_s: float | None = None
    clock: str = "trainer"
    idle_steps: int | None = None
    min_frequency: float | None = None
    decay: float = 0.5
    min_l2_norm: float | None = None
    match: str = "any"
    max_rows: int | None = None
    interval_s: float | None = None
    trigger_rows: int | None = None
    trigger_bytes: int | None = None

    def __post_init__(self) -> None:
        lowest = {"ttl_s": 0, "idle_steps": 1, "max_rows": 0, "trigger_rows": 1, "trigger_bytes": 1}
        for name, least in lowest.items():
            value = getattr(self, name)
            if value is not None and not least <= value < 2**62:
                raise ConfigError(f"{name} is {value}, must be at least {least}")
        for name in ("min_frequency", "min_l2_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}, must be above 0")
        if self.interval_s is not None and not 1 <= self.interval_s < 2**31:
            raise ConfigError(f"interval_s is {self.interval_s:g}, must be at least 1")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"decay is {self.decay:g}, must be from 0 to below 1")
        for name, words in (("clock", ("trainer", "wall")), ("match", ("any", "all"))):
            if getattr(self, name) not in words:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, not {' or '.join(words)}")
        if not self.names and self.max_rows is None:
            raise ConfigError("no policy: give ttl_s, idle_steps, min_frequency, min_l2_norm or max_rows")

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the given conditions that look at single rows."""
        of_rows = ("ttl_s", "idle_steps", "min_frequency", "min_l2_norm")
        return tuple(name for name in of_rows if getattr(self, name) is not None)

    @classmethod
    def parse(cls, text: str) -> ExpiryPolicy:
        """Parse a policy such as `ttl_s=7d, max_rows=1000000`. Raises ConfigError for a bad key or value."""
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, _, raw = (piece.strip() for piece in part.partition("="))
            if key not in _PARSERS:
                raise ConfigError(f"{part!r} is not a policy; use {', '.join(_PARSERS)}")
            if key in values:
                raise ConfigError(f"{key} is given twice")
            values[key] = _PARSERS[key](key, raw)
        return cls(**values)


def _number(units: Mapping[str, float], kind: type[int] | type[float]) -> Any:
    def parse(key: str, raw: str) -> float:
        match = _NUMBER.fullmatch(raw)
        value = None if match is None or match[2] not in units else float(match[1]) * units[match[2]]
        if value is None or (kind is int and not value.is_integer()):
            or_with = ", or one with " + ", ".join(filter(None, units)) if len(units) > 1 else ""
            raise ConfigError(f"{key}={raw}: not a number from 0 on{or_with}")
        return kind(value)

    return parse


def _word(key: str, raw: str) -> str:
    return raw


_PARSERS = {
    "ttl_s": _number(SECONDS_BY_UNIT, float),
    "clock": _word,
    "idle_steps": _number({"": 1}, int),
    "min_frequency": _number({"": 1}, float),
    "decay": _number({"": 1}, float),
    "min_l2_norm": _number({"": 1}, float),
    "match": _word,
    "max_rows": _number({"": 1}, int),
    "interval_s": _number(SECONDS_BY_UNIT, float),
    "trigger_rows": _number({"": 1}, int),
    "trigger_bytes": _number(BYTES_BY_UNIT, int),
}
assert set(_PARSERS) == {known.name for known in dataclasses.fields(ExpiryPolicy)}


@dataclass(frozen=True, slots=True)
class ExpiryRules:
    """Policies by pattern of names or paths (`*`, `?`, `[…]`), in order; the first that matches a table counts."""

    rules: tuple[tuple[str, ExpiryPolicy], ...] = ()

    @classmethod
    def parse(cls, text: str) -> ExpiryRules:
        """Parse rules such as `user.*: ttl_s=7d; *: max_rows=1000000`. Raises ConfigError naming a bad rule."""
        rules = []
        for part in filter(None, (part.strip() for part in text.split(";"))):
            pattern, colon, policy = (piece.strip() for piece in part.rpartition(":"))
            if not colon or not pattern:
                raise ConfigError(f"expiry: {part!r} is not PATTERN: POLICY=VALUE, …")
            try:
                rules.append((pattern, ExpiryPolicy.parse(policy)))
            except ConfigError as exc:
                raise ConfigError(f"expiry: {pattern}: {exc}") from exc
        return cls(tuple(rules))

    def policy_of(self, fqn: str) -> ExpiryPolicy | None:
        """Return a table's policy; None when it has none."""
        return next((policy for pattern, policy in self.rules if matches(fqn, pattern)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Horizon:
    """The progress of a table's owner on a shard as of log position `seq`, *P*.

    Rows may be judged once the store has everything up to `seq`.

    Attributes:
        epoch: The owner's present epoch; 0 until all its ranks have ended a step in it.
        step: The last step that all ranks have ended, *W*.
        time_us: The clock of the rank that is furthest behind when it ended its last step, microseconds since 1970.
        since: Rows of epochs below this are of other runs, or of a backfill: their steps tell nothing.
        first_step: The step at which those count as updated.
    """

    seq: int
    epoch: int = 0
    step: int = -1
    time_us: int = 0
    since: int = 0
    first_step: int = -1

    @classmethod
    def of(cls, sessions: Sessions, seq: int, owner: Owner | None) -> Horizon:
        """Return a shard's horizon from its sessions as of log record `seq`, for tables of an owner.

        So rows of a backfill, or of a run that is not known any more, wait for the trainer that takes the table.
        """
        epoch = 0 if owner is None else sessions.newest_epoch_of(owner.run.__eq__)
        if owner is None or (step := sessions.watermark_of(epoch)) < 0:
            return cls(seq=seq)
        time_us = min(session.time_us for session in sessions.ranks_of(epoch))
        first_step = owner.first_step if owner.first_step >= 0 else step
        return cls(seq=seq, epoch=epoch, step=step, time_us=time_us, since=owner.since, first_step=first_step)

    def settled(self, epochs: _Ids, steps: _Ids) -> _Mask:
        """Return which rows, int64[n] versions, are settled: bool[n]."""
        return ~is_newer(epochs, steps, self.epoch, self.step - 1)

    def idle_steps(self, epochs: _Ids, steps: _Ids) -> _Ids:
        """Return for how many steps rows, int64[n] versions, have not been updated: int64[n]."""
        return self.step - np.where(epochs < self.since, self.first_step, steps)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """The facts that a scan knows about n live, whole rows of a table, ascending by row id.

    Versions, int64[n], are those of each row's newest record; `times_us` is in microseconds since 1970, 0 where
    unknown. `norms`, float64[n], are Euclidean norms of the weights; they and `frequencies`, float32[n], are None when
    not requested.
    """

    row_ids: _Ids
    epochs: _Ids
    steps: _Ids
    times_us: _Ids
    norms: npt.NDArray[np.float64] | None = None
    frequencies: npt.NDArray[np.float32] | None = None

    def take(self, rows: _Mask | slice) -> RowFacts:
        """Return the facts of some rows: bool[n], or a slice."""
        return RowFacts(
            row_ids=self.row_ids[rows],
            epochs=self.epochs[rows],
            steps=self.steps[rows],
            times_us=self.times_us[rows],
            norms=None if self.norms is None else self.norms[rows],
            frequencies=None if self.frequencies is None else self.frequencies[rows],
        )


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision about n rows, bool[n] each, and the number of settled rows that each condition selects.

    `stays` are settled rows that do not expire, and so may exceed a row budget.
    """

    expired: _Mask
    stays: _Mask
    by_policy: dict[str, int] = field(default_factory=dict)


def judge(policy: ExpiryPolicy, horizon: Horizon, rows: RowFacts, *, now_us: int) -> Verdict:
    """Decide about live rows by the whole policy except its row budget, which depends on all rows.

    The horizon was taken before the rows were read; `now_us` is the server's clock, microseconds since 1970.
    """
    settled = horizon.settled(rows.epochs, rows.steps)
    masks: dict[str, _Mask] = {}
    if policy.ttl_s is not None:
        # A trainer's clock that leaps ahead would age a whole table at once, and expired rows stay away. The earlier of
        # two clocks is safe while only one of them is ahead.
        present_us = min(horizon.time_us, now_us) if policy.clock == "trainer" else now_us
        # Rows without a time have no age.
        masks["ttl_s"] = (rows.times_us > 0) & (present_us - rows.times_us > policy.ttl_s * 1e6)
    if policy.idle_steps is not None:
        masks["idle_steps"] = horizon.idle_steps(rows.epochs, rows.steps) > policy.idle_steps
    if policy.min_frequency is not None:
        assert rows.frequencies is not None
        masks["min_frequency"] = rows.frequencies < policy.min_frequency
    if policy.min_l2_norm is not None:
        assert rows.norms is not None
        masks["min_l2_norm"] = rows.norms < policy.min_l2_norm  # NaN is not below: such a row deserves a look
    named = np.zeros(rows.row_ids.size, bool)
    if masks:
        combine = np.logical_and if policy.match == "all" else np.logical_or
        named = combine.reduce(list(masks.values()))
    counts = {name: int(np.count_nonzero(mask & settled)) for name, mask in masks.items()}
    return Verdict(named & settled, settled & ~named, counts)


_MAX_BUCKETS = 65_536


@dataclass(frozen=True, slots=True, order=True)
class StepRange:
    """The steps `first` to `end` - 1 of an epoch."""

    epoch: int
    first: int
    end: int


class BudgetThreshold:
    """The rows that exceed a budget: all below a version, and the first `num_left` of that version, by row id."""

    def __init__(self, epoch: int, step: int, num_left: int) -> None:
        self.epoch, self.step, self.num_left = epoch, step, num_left

    def take(self, epochs: _Ids, steps: _Ids, counted: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """Return which rows exceed the budget, bool[n], for int64[n] versions; call it for all rows in id order.

        `counted` are the rows that `Recency` counted, bool[n].
        """
        below = is_newer(self.epoch, self.step, epochs, steps)
        ties = np.flatnonzero((epochs == self.epoch) & (steps == self.step) & counted)[: self.num_left]
        self.num_left -= ties.size
        below &= counted
        below[ties] = True
        return below


class Recency:
    """Counts rows by version to find a budget's threshold, exactly and in bounded memory.

    Beyond `max_buckets`, twice as many steps share a bucket; an epoch has at least one. A second pass over the rows
    then counts only those `within` the range of one bucket.
    """

    def __init__(self, within: StepRange | None = None, *, max_buckets: int = _MAX_BUCKETS) -> None:
        self._within = within
        self._max_buckets = max_buckets
        self._shift = 0
        self._counts: defaultdict[tuple[int, int], int] = defaultdict(int)

    @property
    def num_rows(self) -> int:
        """Rows counted."""
        return sum(self._counts.values())

    def add(self, epochs: _Ids, steps: _Ids) -> None:
        """Count rows, int64[n] each."""
        if self._within is not None:
            some = (epochs == self._within.epoch) & (steps >= self._within.first) & (steps < self._within.end)
            epochs, steps = epochs[some], steps[some]
        for epoch in np.unique(epochs).tolist():
            buckets, counts = np.unique(steps[epochs == epoch] >> self._shift, return_counts=True)
            for bucket, count in zip(buckets.tolist(), counts.tolist(), strict=True):
                self._counts[epoch, bucket] += count
            while len(self._counts) > self._max_buckets and self._shift < 63:
                self._shift += 1
                fine, self._counts = self._counts, defaultdict(int)
                for (of_epoch, bucket), count in fine.items():
                    self._counts[of_epoch, bucket >> 1] += count

    def threshold(self, num_rows: int) -> tuple[BudgetThreshold, None] | tuple[StepRange, int]:
        """Return the threshold of the `num_rows` least recently updated rows and None.

        Where buckets are too coarse, return the range of steps to count separately, and how many of its rows exceed the
        budget.
        """
        left = num_rows
        for (epoch, bucket), count in sorted(self._counts.items()):
            if left <= count:
                if self._shift == 0:
                    return BudgetThreshold(epoch, bucket, left), None
                return StepRange(epoch, bucket << self._shift, (bucket + 1) << self._shift), left
            left -= count
        last_epoch, last = max(self._counts, default=(0, 0))
        return BudgetThreshold(last_epoch, (last + 1) << self._shift, 0), None
