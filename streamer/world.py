"""The ranks of a training run, as far as a streamer must agree with the others."""

from __future__ import annotations

from typing import Any, Protocol, TypeVar

import torch.distributed as dist

__all__ = ["SoloWorld", "TorchWorld", "World", "current_world"]

_T = TypeVar("_T")


class World(Protocol):
    """Who takes part in a run.

    Attributes:
        rank: This process, 0 to `size` - 1.
        size: Processes.
    """

    @property
    def rank(self) -> int:
        """This process."""

    @property
    def size(self) -> int:
        """Processes."""

    def share(self, value: _T | None) -> _T:
        """Return rank 0's value on every rank; all must call it, and the others' values are not looked at."""

    def gather(self, value: _T) -> list[_T]:
        """Return every rank's value, by rank, on every rank; all must call it."""


class SoloWorld:
    """A run of one process."""

    rank = 0
    size = 1

    def share(self, value: _T | None) -> _T:
        """Return the value."""
        assert value is not None
        return value

    def gather(self, value: _T) -> list[_T]:
        """Return the value alone."""
        return [value]


class TorchWorld:
    """The default process group of `torch.distributed`. REQUIRES: it is initialized."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def share(self, value: _T | None) -> _T:
        """Return rank 0's value; blocks until all ranks are here."""
        box: list[Any] = [value]
        dist.broadcast_object_list(box, src=0)
        shared: _T = box[0]
        return shared

    def gather(self, value: _T) -> list[_T]:
        """Return all values; blocks until all ranks are here."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values


def current_world() -> World:
    """Return the ranks that `torch.distributed` knows of, or a run of one process when it is not initialized."""
    return TorchWorld() if dist.is_available() and dist.is_initialized() else SoloWorld()
