"""Ranks of one run that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["Ranks", "ThreadRank"]

_WAIT_S = 60.0


class Ranks:
    """What some threads exchange.

    Attributes:
        num_exchanges: How often they have.
    """

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=_WAIT_S)
        self.num_exchanges = 0

    def run(self, work: Callable[[ThreadRank], Any]) -> list[Any]:
        """Return what the work returns on each rank, or the error that it raises there."""
        results: list[Any] = [None] * len(self.values)

        def run(rank: int) -> None:
            try:
                results[rank] = work(ThreadRank(self, rank))
            except BaseException as exc:
                results[rank] = exc

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(results))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return results


class ThreadRank:
    """A `World` of threads."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self._ranks, self.rank, self.size = ranks, rank, len(ranks.values)

    def share(self, value: Any) -> Any:
        return self.gather(value)[0]

    def gather(self, value: Any) -> list[Any]:
        self._ranks.values[self.rank] = value
        if self._ranks.barrier.wait() == 0:
            self._ranks.num_exchanges += 1
        values = list(self._ranks.values)
        self._ranks.barrier.wait()
        return values

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        return self.gather(list(values))

    def swap(self, sent: Sequence[Any], received: Sequence[int]) -> list[Any]:
        found = [of_rank[self.rank] for of_rank in self.gather(list(sent))]
        assert [each.numel() for each in found] == list(received)
        return found
