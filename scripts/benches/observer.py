"""A replica in a process of its own that notes when each step becomes visible, for benches and the demo."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from headrace.schemas.errors import ProtocolError, UnavailableError
from headrace.scripts.benches.child import Child, Worker

if TYPE_CHECKING:
    from headrace.paramserver.replica import EmbeddingReplica  # loads torch, which the parent may not need

__all__ = ["Observer", "delays_of", "observed_replica"]

_WAIT_S = 60.0
_WAKE_S, _POLL_S = 1.0, 0.001


class Observer:
    """Notes which step became visible when, on its own thread; use it with `with`.

    It sleeps in `wait_for`: lookups in a loop would take processor time from what is measured.
    """

    def __init__(self, replica: EmbeddingReplica) -> None:
        """Start after the step that is visible now."""
        self._replica, self._is_closed = replica, False
        self._seen: list[tuple[int, int]] = []
        self._thread = threading.Thread(target=self._observe, args=(replica.step,), name="observer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._is_closed = True
        self._thread.join()

    def wait_for(self, step: int) -> list[tuple[int, int]]:
        """Return (step, monotonic nanoseconds) of each change since the last call, once a step is visible.

        Raises:
            UnavailableError: It is not visible within a minute.
        """
        self._replica.wait_for(step, _WAIT_S)
        while not self._seen or self._seen[-1][0] < step:  # the thread has woken up as well
            time.sleep(_POLL_S)
        seen, self._seen = self._seen, []
        return seen

    def _observe(self, last: int) -> None:
        while not self._is_closed:
            with contextlib.suppress(UnavailableError):  # nothing has come for a second
                self._replica.wait_for(last + 1, _WAKE_S)
                now_ns, last = time.monotonic_ns(), self._replica.step
                self._seen.append((last, now_ns))


def delays_of(steps: Sequence[int], updated_ns: Sequence[int], seen: Sequence[Sequence[int]]) -> list[float]:
    """Return how long after its update each step was visible, milliseconds, on the clock that all processes share.

    A step is visible with the first change in `seen`, from `Observer.wait_for`, that is not below it.

    Raises:
        ProtocolError: A step was never visible.
    """
    shown, moments = np.array(seen, np.int64).reshape(-1, 2).T
    places = np.searchsorted(shown, np.array(steps, np.int64))
    if len(places) and places[-1] >= shown.size:
        raise ProtocolError(f"the replica has not shown step {steps[-1]}")
    found: list[float] = ((moments[places] - np.array(updated_ns)) / 1e6).tolist()
    return found


def observed_replica(address: str) -> Child:
    """Start a replica in its own process. Asked for a `step`, it answers with what `Observer.wait_for` returns."""
    return Child(f"{__name__}:_replicate", "the bench's replica", address=address)


def _replicate(address: str) -> Worker:
    """Follow the server at an address."""
    import torch

    from headrace.paramserver.replica import EmbeddingReplica

    torch.set_num_threads(1)
    with EmbeddingReplica(address) as replica, Observer(replica) as observer:
        answer: dict[str, Any] = {}
        while True:
            order = yield answer
            answer = {"seen": observer.wait_for(order["step"])}
