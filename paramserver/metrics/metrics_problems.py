"""What is wrong with a server, in order of urgency, each with what to do: shown first wherever a server is shown."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.paramserver.metrics.metrics_families import ShardState
from headrace.paramserver.metrics.metrics_sample import ShardDetail, ShardSample

__all__ = ["Problem", "Severity", "find_problems"]

# The store holds rows back for two seconds by design; several times that is a store that does not keep up.
_MAX_APPLY_LAG_S = 15.0
_MAX_LOOP_PAUSE_S = 0.25
_MIN_FREE_PART = 0.1
_YOUNG_S = 60.0


class Severity(enum.IntEnum):
    """How urgent it is."""

    CRITICAL = 0
    """Something does not work now."""
    WARNING = 1
    """It works, and may not for long, or not as it should."""
    NOTE = 2
    """It may explain something."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One finding.

    Attributes:
        severity: How urgent.
        text: What is so, with the names and numbers.
        advice: What to do about it.
    """

    severity: Severity
    text: str
    advice: str

    def to_json(self) -> dict[str, str]:
        """Return a form that `json` can write."""
        return {"severity": self.severity.name.lower(), "text": self.text, "advice": self.advice}


def find_problems(states: Sequence[ShardState]) -> list[Problem]:
    """Return what is wrong, the most urgent first.

    Args:
        states: All shards of a server, or the ones that are known.
    """
    samples = [state.sample for state in states if state.sample is not None]
    found = [problem for state in states for problem in _of_state(state)]
    found += [problem for sample in samples for problem in _of_sample(sample)]
    found += _of_server(samples)
    return sorted(found, key=lambda problem: problem.severity)


def _of_state(state: ShardState) -> Iterator[Problem]:
    if state.sample is None:
        yield Problem(
            severity=Severity.CRITICAL,
            text=f"shard {state.shard} does not answer: {state.error or 'no reason is known'}",
            advice="Its rows cannot be read, and trainers keep theirs. The server's log says whether it has died. "
            "One that hangs is killed and started again after --hang-timeout-s. Nothing acked is lost.",
        )
    elif state.num_restarts and state.sample.uptime_s < _YOUNG_S:
        since = f"{state.sample.uptime_s:.0f} s ago"
        yield Problem(
            severity=Severity.WARNING,
            text=f"shard {state.shard} was started again {since}; restarts: {state.num_restarts}",
            advice="The server's log says what ended it. Nothing acked is lost.",
        )


def _of_sample(sample: ShardSample) -> Iterator[Problem]:
    name = f"shard {sample.shard}"
    if sample.expiry.num_failed:
        yield Problem(
            severity=Severity.WARNING,
            text=f"{name}: {sample.expiry.num_failed} runs of expiry ended in an error",
            advice="The log has `expiry failed` and why; `headrace expire --dry-run` tries it again.",
        )
    if sample.worst_loop_pause_s > _MAX_LOOP_PAUSE_S:
        yield Problem(
            severity=Severity.WARNING,
            text=f"{name} paused for {sample.worst_loop_pause_s:.2f} s in the last minute",
            advice="Processors or disk are taken by others, or there are too few for the shards.",
        )
    if sample.detail is None:
        if sample.num_refused:
            yield Problem(
                severity=Severity.NOTE,
                text=f"{name} has refused {sample.num_refused:,} requests or connections since its start",
                advice="The server's log says whose and why.",
            )
        return
    yield from _of_detail(name, sample.detail)


def _of_detail(name: str, detail: ShardDetail) -> Iterator[Problem]:
    if detail.apply_lag_s > _MAX_APPLY_LAG_S:
        yield Problem(
            severity=Severity.WARNING,
            text=f"{name}: the store is {detail.apply_lag_s:.0f} s behind the log",
            advice="The disk or the processor does not keep up. Acks will wait at --max-backlog-bytes.",
        )
    if detail.disk_free_bytes < _MIN_FREE_PART * detail.disk_bytes:
        yield Problem(
            severity=Severity.WARNING,
            text=f"{name}: {100 * detail.disk_free_bytes / max(detail.disk_bytes, 1):.0f} % of its disk is free",
            advice="A full disk stops the shard. Lower --log-retention-bytes, prune snapshots or add disk.",
        )
    if detail.num_holds_broken:
        yield Problem(
            severity=Severity.WARNING,
            text=f"{name}: log that replicas or snapshots needed was removed {detail.num_holds_broken:,} times",
            advice="Those replicas begin anew. Raise --log-hold-bytes, or make a snapshot for them to begin from.",
        )
    if detail.num_failed:
        yield Problem(
            severity=Severity.WARNING,
            text=f"{name}: {detail.num_failed} requests were ended by a bug",
            advice="The log has the traceback; please report it.",
        )
    if reasons := ", ".join(f"{count:,} {reason}" for reason, count in detail.refused.items() if count):
        yield Problem(
            severity=Severity.NOTE,
            text=f"{name} has refused requests or connections since its start: {reasons}",
            advice="The server's log says whose.",
        )


def _of_server(samples: Sequence[ShardSample]) -> Iterator[Problem]:
    versions = sorted({sample.version for sample in samples})
    if len(versions) > 1:
        yield Problem(
            severity=Severity.WARNING,
            text=f"the shards run different versions: {', '.join(versions)}",
            advice="Restart the server.",
        )
    # Steps of a run become visible when every rank has ended them; of older runs nobody waits.
    newest_epoch = max((w.epoch for sample in samples for w in sample.writers), default=0)
    newest = [w for sample in samples for w in sample.writers if w.epoch == newest_epoch and w.world_size]
    connected = {(w.run, w.client) for w in newest if w.is_connected}
    away = sorted({(w.run, w.client) for w in newest} - connected)
    if connected and away:
        run = away[0][0]
        yield Problem(
            severity=Severity.WARNING,
            text=f"run {run}: {len(away)} of {len(away) + len(connected)} trainers are away, {away[0][1]} among them",
            advice="Replicas with consistency `step` wait for them.",
        )
