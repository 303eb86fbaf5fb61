"""The freshness bench's replica: notes when each step becomes visible, by waiting for it and not by looking.

Orders on stdin: first the address of the server and `ReplicaConfig` settings, then steps to wait for. A look-up in a
loop would take the processor from what it measures; `EmbeddingReplica.wait_for` sleeps until something has become
visible.
"""

from __future__ import annotations

import threading
import time

import torch

from headrace.paramserver.replica import EmbeddingReplica
from headrace.schemas.errors import UnavailableError
from headrace.scripts.benches.bench_child import give_answer, orders

__all__ = ["Observer"]

_WAIT_S = 60.0
_WAKE_S = 1.0


class Observer:
    """Notes, on a thread of its own, which step was visible when."""

    def __init__(self, replica: EmbeddingReplica) -> None:
        """Begin behind what is visible now."""
        self._replica = replica
        self._seen: list[tuple[int, int]] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._observe, name="observer", daemon=True)
        self._thread.start()

    def wait_for(self, step: int) -> list[tuple[int, int]]:
        """Return (step, monotonic nanoseconds) of each change since the last call, once a step is visible.

        Raises:
            UnavailableError: It is not within a minute.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: bool(self._seen) and self._seen[-1][0] >= step, _WAIT_S):
                raise UnavailableError(f"step {step} has not become visible within {_WAIT_S:g} s")
            seen, self._seen = self._seen, []
            return seen

    def close(self) -> None:
        """End the thread."""
        self._is_closed = True
        self._thread.join()

    def _observe(self) -> None:
        last = self._replica.step
        while not self._is_closed:
            try:
                self._replica.wait_for(last + 1, _WAKE_S)
            except UnavailableError:
                continue  # nothing has come for a second
            now_ns, last = time.monotonic_ns(), self._replica.step
            with self._changed:
                self._seen.append((last, now_ns))
                self._changed.notify_all()


def _main() -> None:
    torch.set_num_threads(1)
    given = orders()
    first = next(given)
    with EmbeddingReplica(first["address"], **first["settings"]) as replica:
        observer = Observer(replica)
        give_answer({})
        for order in given:
            seen = observer.wait_for(order["step"])
            delays = [shard.delay for shard in replica.freshness()]
            p50_ms = max(delay.percentile(50) for delay in delays) * 1000
            give_answer({"seen": seen, "histogram_p50_ms": p50_ms})
        observer.close()


if __name__ == "__main__":
    _main()
