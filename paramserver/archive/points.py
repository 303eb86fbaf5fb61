"""Points of a log to which a server can be restored: a step that all ranks of a run have ended, or a moment.

Each shard's log is read once. A step is a point where the run's watermark reaches it; if the run stands exactly at the
step a little later, that place is better. Shards are cut at a point that all of them have, so they are of one step.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from headrace.paramserver.log.interface import KIND_BATCH, KIND_HELLO, LogRecord, is_housekeeping
from headrace.paramserver.log.sessions import Sessions
from headrace.schemas.errors import ConfigError, CorruptionError
from headrace.schemas.idl import idl
from headrace.schemas.messages import decode_header, decode_struct

__all__ = ["PointFinder", "RestorePoint", "StepPoint", "choose_point"]

_SEQ_OR_STEP = re.compile(r"(seq|step)=(\d{1,18})")


@dataclass(frozen=True, kw_only=True, slots=True)
class RestorePoint:
    """What a user wants to go back to: a seq of one shard, a step, or a time (microseconds since 1970); one of them."""

    seq: int | None = None
    step: int | None = None
    time_us: int | None = None

    @classmethod
    def parse(cls, text: str) -> RestorePoint:
        """Return the point of `seq=N`, `step=N` or `time=` with an ISO 8601 time, UTC unless it says otherwise.

        Raises:
            ConfigError: It is something else.
        """
        if match := _SEQ_OR_STEP.fullmatch(text):
            return cls(**{match[1]: int(match[2])})
        if text.startswith("time="):
            try:
                at = datetime.fromisoformat(text.removeprefix("time="))
                at = at.replace(tzinfo=UTC) if at.tzinfo is None else at.astimezone(UTC)
            except (OverflowError, ValueError):
                pass
            else:
                return cls(time_us=int(at.timestamp() * 1e6))
        raise ConfigError(f"--at {text}: give seq=N, step=N or time=2026-01-31T12:00:00 (UTC)")

    def __str__(self) -> str:
        if self.time_us is not None:
            return f"time={datetime.fromtimestamp(self.time_us / 1e6, UTC).isoformat()}"
        return f"seq={self.seq}" if self.seq is not None else f"step={self.step}"


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPoint:
    """Where one shard has all of a step, by the trainer's clock at `time_us`; nothing newer if it `is_exact`."""

    epoch: int
    step: int
    seq: int
    time_us: int
    is_exact: bool


class PointFinder:
    """Finds the points of one shard's log; `take` gets its records in order. No I/O.

    Attributes:
        points: By epoch and step.
    """

    def __init__(self, meta: Mapping[bytes, bytes], *, seq: int) -> None:
        """Begin with a store's metadata, as of record `seq`."""
        self.points: dict[tuple[int, int], StepPoint] = {}
        self._sessions = Sessions(meta)
        self._note(seq)

    def take(self, record: LogRecord) -> None:
        """Take the next record.

        Raises:
            CorruptionError: It does not follow on those before.
        """
        header = record.header
        if is_housekeeping(header):
            return
        try:
            kind = header["kind"]
            if kind == KIND_HELLO:
                session = self._sessions.open(
                    header["run"], header["client"], record.epoch, header["rank"], header["world_size"]
                )
            elif kind == KIND_BATCH:
                found = self._sessions.find(header["run"], header["client"])
                if found is None:
                    raise KeyError("a batch without a hello")
                session = found
                ends_step = header["ends_step"]
                self._sessions.advance(
                    session,
                    client_seq=header["client_seq"],
                    step=header["step"],
                    time_us=header["time_us"],
                    ends_step=ends_step,
                    is_exact_cut=ends_step and bool(_request_of(record).is_exact_cut),
                )
            else:
                raise KeyError(f"kind {kind!r}")
        except (KeyError, TypeError, ValueError) as exc:
            raise CorruptionError(f"log record {record.seq} cannot be read: {exc}") from exc
        self._sessions.settle(session, record.seq)
        if kind == KIND_HELLO or header["ends_step"]:
            self._note(record.seq)

    def _note(self, seq: int) -> None:
        epoch = self._sessions.newest_epoch_of(lambda _: True)
        step = self._sessions.watermark_of(epoch)
        if step < 0:
            return
        is_exact = self._sessions.exact_step_of(epoch) == step
        known = self.points.get((epoch, step))
        if known is None or (is_exact and not known.is_exact):
            time_us = max(session.time_us for session in self._sessions.ranks_of(epoch))
            self.points[epoch, step] = StepPoint(epoch=epoch, step=step, seq=seq, time_us=time_us, is_exact=is_exact)


def choose_point(
    wanted: RestorePoint, shards: Sequence[Mapping[tuple[int, int], StepPoint]], where: str
) -> list[StepPoint]:
    """Return where each shard has the last step at or before a step or a time that every shard has.

    Raises:
        ConfigError: There is none in the logs, which are at `where`.
    """
    common = set(shards[0]).intersection(*shards[1:])
    if wanted.step is not None:
        early = [key for key in common if key[1] <= wanted.step]
    else:
        assert wanted.time_us is not None
        early = [key for key in common if max(points[key].time_us for points in shards) <= wanted.time_us]
    if not early:
        oldest = "the oldest is step {1} of epoch {0}".format(*min(common)) if common else "there is none"
        raise ConfigError(f"--at {wanted}: {where} has no step by then that all shards have; {oldest}")
    return [points[max(early)] for points in shards]


def _request_of(record: LogRecord) -> Any:
    offset = decode_header(record.body).body_offset
    return decode_struct(idl.ParameterServer.setEmbeddings_args, record.body, offset).request
