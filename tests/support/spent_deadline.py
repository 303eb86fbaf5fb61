"""A deadline that is over once an attempt has failed, for tests of what is told then: no time has to pass for it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from headrace.streamer.delivery import rendezvous

__all__ = ["spent_deadline"]


class _NoTimeLeft:
    """Stands for the pauses between attempts to reach a server."""

    def __init__(self, **_: Any) -> None:
        """Take what the pauses take."""

    def next_s(self) -> float:
        """Do what the deadline does amid a pause."""
        raise TimeoutError


@contextmanager
def spent_deadline() -> Iterator[None]:
    """Have a streamer that looks for its server, or says hello to the shards, give up after the first failure.

    However slow the machine is, that failure is told, and the deadline itself may be generous.
    """
    with mock.patch.object(rendezvous, "Backoff", _NoTimeLeft):
        yield
