"""Waiting for the other ranks of a run: told when it takes long, for one that never comes is told by nobody else."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator

from headrace.schemas.durations import format_seconds

__all__ = ["told_when_late"]

_log = logging.getLogger(__name__)

# Ranks load their models at paces of their own; the process group's own deadline is half an hour.
_LATE_S = 30.0


@contextlib.contextmanager
def told_when_late(call: str, *, rank: int, world_size: int) -> Iterator[None]:
    """Say once in the log, from a thread, that a call which all ranks make together has not ended for long.

    Args:
        call: As the user writes it.
        rank: This one.
        world_size: Ranks; of one alone nothing is told.
    """
    if world_size == 1:
        yield
        return
    timer = threading.Timer(_LATE_S, _tell, (call, rank, world_size, _LATE_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _tell(call: str, rank: int, world_size: int, late_s: float) -> None:
    _log.warning(
        "rank %d of %d has waited in %s for %s: every rank has to make this call, so no `if rank == 0` may stand "
        "before it; or another rank is slow to come, or waits for the server",
        rank,
        world_size,
        call,
        format_seconds(late_s),
    )
