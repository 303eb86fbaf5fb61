"""Which rows go: what a table's policy says, and which rows may go at all. Pure decisions: rows and clocks come in.

**Why no update is lost.** An expired row is deleted by a conditional batch, which a shard takes only where it has no
newer version of the row. Its version is *T* = (e, W - 1), where e is the row's own epoch and W the last step that every
rank of the run with that epoch has ended on this shard, as of a position P of the log. Only rows below T may go, and
they are looked at when the store has everything up to P. Then, whatever is written meanwhile:

- An update before P is in what was looked at. If it made the row T or newer, the row did not go.
- An update after P has (e, step) with step ≥ W, because a client's steps only rise and each rank had ended W; or a
  higher epoch. Both are above T: before the tombstone in the log, the tombstone is dropped; behind it, the update
  brings the row back, as it should.
- The tombstone is above every version that the row had, so none of its old updates brings it back by a replay.

T is W - 1 and not W: a trainer that flushes twice within a step writes (e, W) once more. Rows whose epoch no run has
any more (its run has begun again, or a replay has brought them) get T = (e, highest step among them + 1): nobody makes
steps of such an epoch, and the next trainer has a higher one. Without a run that has ended a step, nothing may go.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.ingest.sessions import Sessions
from headrace.schemas.durations import SECONDS_BY_UNIT
from headrace.schemas.errors import ConfigError
from headrace.schemas.sizes import BYTES_BY_UNIT

__all__ = ["ExpiryPolicy", "ExpiryRules", "Horizon", "RowFacts", "RunHorizon", "Verdict", "judge"]

_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]
_LAST_STEP = 2**63 - 1  # nothing is above it
_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]+)?(?:e-?[0-9]+)?)([A-Za-z]*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpiryPolicy:
    """What makes a row of a table go, and when the server looks.

    Attributes:
        ttl_s: Not updated for longer than this, seconds, by `clock`.
        clock: `trainer`: the trainer's clock at its last step, so that nothing grows old while nobody trains, but no
            later than the server's clock now; `wall`: the server's clock now.
        idle_steps: Not updated for more than so many steps.
        min_frequency: Updated more rarely: see `expiry_frequency`. 1 lets go a row that has missed one run.
        decay: What is left of a row's frequency at each run, 0 to below 1.
        min_l2_norm: The weights' Euclidean norm is below this.
        match: Whether a row goes when `any` of the above says so, or when `all` of those that are given do.
        max_rows: Rows that the table keeps, on all shards together; beyond it the least recently updated go, too.
        interval_s: The server looks this often, seconds.
        trigger_rows: It looks when the table has more rows than this, on all shards together, about.
        trigger_bytes: It looks when the table's rows take more than this, on all shards together, about.
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
        """Check the policy.

        Raises:
            ConfigError: A value is out of range, or nothing would ever go.
        """
        for name, least in (
            ("ttl_s", 0),
            ("idle_steps", 1),
            ("max_rows", 0),
            ("trigger_rows", 1),
            ("trigger_bytes", 1),
        ):
            value = getattr(self, name)
            if value is not None and not least <= value < 2**62:
                raise ConfigError(f"{name} is {value}, not from {least} on")
        for name in ("min_frequency", "min_l2_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ConfigError(f"{name} is {value}, not above 0")
        if self.interval_s is not None and not 1 <= self.interval_s < 2**31:
            raise ConfigError(f"interval_s is {self.interval_s:g}, not from 1 on")
        if not 0 <= self.decay < 1:
            raise ConfigError(f"decay is {self.decay:g}, not from 0 to below 1")
        for name, words in (("clock", ("trainer", "wall")), ("match", ("any", "all"))):
            if getattr(self, name) not in words:
                raise ConfigError(f"{name} is {getattr(self, name)!r}, not {' or '.join(words)}")
        if not self.names and self.max_rows is None:
            raise ConfigError("no policy: give ttl_s, idle_steps, min_frequency, min_l2_norm or max_rows")

    @property
    def names(self) -> tuple[str, ...]:
        """Which of the policies that look at a row alone are given."""
        of_rows = ("ttl_s", "idle_steps", "min_frequency", "min_l2_norm")
        return tuple(name for name in of_rows if getattr(self, name) is not None)

    @classmethod
    def parse(cls, text: str) -> ExpiryPolicy:
        """Return the policy that a text such as `ttl_s=7d, max_rows=1000000` writes down.

        Raises:
            ConfigError: A key is unknown or given twice, or a value is wrong.
        """
        values: dict[str, Any] = {}
        for part in filter(None, (part.strip() for part in text.split(","))):
            key, _, raw = (piece.strip() for piece in part.partition("="))
            if key not in _PARSERS:
                raise ConfigError(f"{part!r} is no policy; there are {', '.join(_PARSERS)}")
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
            raise ConfigError(f"{key}={raw}: not a number{or_with}")
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
    """Policies by pattern of fqn (`*`, `?`, `[…]`); the first that fits a table counts.

    Attributes:
        rules: Pattern and policy, in their order.
    """

    rules: tuple[tuple[str, ExpiryPolicy], ...] = ()

    @classmethod
    def parse(cls, text: str) -> ExpiryRules:
        """Return the rules of a text such as `user.*: ttl_s=7d; *: max_rows=1000000`.

        Raises:
            ConfigError: Naming the rule that is wrong.
        """
        rules = []
        for part in filter(None, (part.strip() for part in text.split(";"))):
            pattern, colon, policy = (piece.strip() for piece in part.partition(":"))
            if not colon or not pattern:
                raise ConfigError(f"expiry: {part!r} is not PATTERN: POLICY=VALUE, …")
            try:
                rules.append((pattern, ExpiryPolicy.parse(policy)))
            except ConfigError as exc:
                raise ConfigError(f"expiry: {pattern}: {exc}") from exc
        return cls(tuple(rules))

    def policy_of(self, fqn: str) -> ExpiryPolicy | None:
        """Return a table's policy; None when it has none."""
        return next((policy for pattern, policy in self.rules if fnmatchcase(fqn, pattern)), None)


@dataclass(frozen=True, slots=True)
class RunHorizon:
    """How far one run has come on a shard.

    Attributes:
        step: Last step that all its ranks have ended, *W*; -1 before the first.
        time_us: The trainer's clock at that step, microseconds since 1970.
    """

    step: int
    time_us: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Horizon:
    """How far training has come on a shard, at one position of its log.

    Attributes:
        seq: The position, *P*: rows may be judged by this once the store has everything up to it.
        highest_epoch: No run or row had a higher one.
        runs: By epoch: every run in its present epoch.
    """

    seq: int
    highest_epoch: int
    runs: dict[int, RunHorizon]

    @classmethod
    def of(cls, sessions: Sessions, seq: int) -> Horizon:
        """Return the horizon of a shard whose sessions are as record `seq` has left them."""
        epochs = {session.epoch for session in sessions if session.is_trainer}
        runs = {}
        for epoch in epochs:
            times = [session.time_us for session in sessions.ranks_of(epoch)]
            runs[epoch] = RunHorizon(sessions.watermark_of(epoch), min(times, default=0))
        return cls(seq=seq, highest_epoch=sessions.highest_epoch, runs=runs)

    @property
    def newest(self) -> RunHorizon | None:
        """The newest run that has ended a step; None when none has."""
        ended = [epoch for epoch, run in self.runs.items() if run.step >= 0]
        return self.runs[max(ended)] if ended else None

    def may_go(self, epochs: _Ids, steps: _Ids) -> _Mask:
        """Return which rows are below every version that may still come: bool[n] for int64[n] each."""
        if self.newest is None:
            return np.zeros(epochs.size, bool)
        mask = (epochs <= self.highest_epoch) & (steps < _LAST_STEP)
        for epoch, run in self.runs.items():
            mask &= (epochs != epoch) | (steps < run.step - 1)
        return mask

    def tombstone_step(self, epoch: int, highest_step: int) -> int:
        """Return the second half of *T*, for rows of an epoch that may go.

        Args:
            epoch: Of the rows; it is the first half.
            highest_step: The highest among them.
        """
        run = self.runs.get(epoch)
        return highest_step + 1 if run is None else run.step - 1

    def present(self, epochs: _Ids) -> tuple[_Ids, _Ids]:
        """Return (step, time_us), int64[n] each, that count as the present for rows of these epochs.

        A row is measured by its own run, or by the newest one where its epoch is no run's any more.
        """
        newest = self.newest or RunHorizon(-1, 0)
        steps = np.full(epochs.size, newest.step, np.int64)
        times = np.full(epochs.size, newest.time_us, np.int64)
        for epoch, run in self.runs.items():
            steps[epochs == epoch] = run.step
            times[epochs == epoch] = run.time_us
        return steps, times


@dataclass(frozen=True, kw_only=True, slots=True)
class RowFacts:
    """What a scan knows of some live rows, whole ones, of one table.

    Attributes:
        row_ids: int64[n], ascending.
        epochs: int64[n], of each row's newest record.
        steps: int64[n], likewise.
        times_us: int64[n], likewise; microseconds since 1970, 0 where unknown.
        norms: float64[n]: Euclidean norms of the weights; None when nobody asked.
        frequencies: float32[n]; None when nobody asked.
    """

    row_ids: _Ids
    epochs: _Ids
    steps: _Ids
    times_us: _Ids
    norms: npt.NDArray[np.float64] | None = None
    frequencies: npt.NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is to become of some rows.

    Attributes:
        expired: bool[n]: they go.
        may_go: bool[n]: they are old enough to be deleted without a race.
        named: bool[n]: the policy wants them gone, whether they may or not.
        by_policy: Rows that each policy names and that may go.
    """

    expired: _Mask
    may_go: _Mask
    named: _Mask
    by_policy: dict[str, int] = field(default_factory=dict)


def judge(policy: ExpiryPolicy, horizon: Horizon, rows: RowFacts, *, now_us: int) -> Verdict:
    """Decide about rows by all of a policy but its row budget, which needs to know all rows.

    Args:
        policy: The table's.
        horizon: As of before the rows were looked at.
        rows: Live ones.
        now_us: The server's clock, microseconds since 1970.
    """
    may_go = horizon.may_go(rows.epochs, rows.steps)
    masks = dict(_masks(policy, horizon, rows, now_us))
    named = np.zeros(rows.row_ids.size, bool)
    if masks:
        combine = np.logical_and if policy.match == "all" else np.logical_or
        named = combine.reduce(list(masks.values()))
    counts = {name: int(np.count_nonzero(mask & may_go)) for name, mask in masks.items()}
    return Verdict(named & may_go, may_go, named, counts)


def _masks(policy: ExpiryPolicy, horizon: Horizon, rows: RowFacts, now_us: int) -> Iterator[tuple[str, _Mask]]:
    steps, times_us = horizon.present(rows.epochs)
    if policy.ttl_s is not None:
        # A trainer's clock that has leapt ahead would make a whole table old at once, and what has gone stays away. So
        # the earlier of two clocks is the present: while only one of them is ahead, no row goes early.
        present_us = np.minimum(times_us, now_us) if policy.clock == "trainer" else np.full_like(times_us, now_us)
        # A client may send no time at all: such rows have no age.
        yield "ttl_s", (rows.times_us > 0) & (present_us - rows.times_us > policy.ttl_s * 1e6)
    if policy.idle_steps is not None:
        yield "idle_steps", steps - rows.steps > policy.idle_steps
    if policy.min_frequency is not None:
        assert rows.frequencies is not None
        yield "min_frequency", rows.frequencies < policy.min_frequency
    if policy.min_l2_norm is not None:
        assert rows.norms is not None
        yield "min_l2_norm", rows.norms < policy.min_l2_norm  # NaN is not: such a row wants to be looked at
