"""The ranks of a training run, and a warning when one of them is late."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist

from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import HeadraceError, UnavailableError

__all__ = ["SoloWorld", "TorchWorld", "World", "current_world", "together", "warn_when_late"]

_log = logging.getLogger(__name__)

# Ranks load their models at different speeds; the process group's own deadline is half an hour.
_LATE_S = 30.0
# Between two looks for other ranks. The store's own `wait` would keep all other threads from it meanwhile.
_MEETING_POLL_S = 0.005

_T = TypeVar("_T")


class World(Protocol):
    """The ranks that take part in a run."""

    @property
    def rank(self) -> int:
        """This process's rank, 0 to `size` - 1."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def share(self, value: _T | None) -> _T:
        """Return rank 0's value on every rank, and ignore the others'; all ranks must call it.

        Raises:
            HeadraceError: Another rank has ended, or does not come.
        """

    def gather(self, value: _T) -> list[_T]:
        """Return every rank's value, by rank, on every rank; all ranks must call it.

        Raises:
            HeadraceError: Another rank has ended, or does not come.
        """

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Like `gather`, for as many int64 values on each rank, between two steps of training.

        Raises:
            HeadraceError: Another rank has ended.
        """

    def swap(self, sent: Sequence[torch.Tensor], received: Sequence[int]) -> list[torch.Tensor]:
        """Send each rank a tensor, uint8[n] on the CPU, and return theirs, by rank, of so many bytes.

        Raises:
            HeadraceError: Another rank has ended.
        """

    def leave_note(self, name: str, text: str) -> list[str | None]:
        """Leave a text for the other ranks in place of the last one of this name; return each rank's last one, if any.

        Waits for no rank.

        Raises:
            RuntimeError: There is no place for notes any more.
        """

    def meet(self, call: str, timeout_s: float) -> None:
        """Return once all ranks are in this call, or on none of them; needs no process group.

        Raises:
            UnavailableError: Not all ranks have come in time; the message names those that are missing.
        """


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

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Return the values alone."""
        return [list(values)]

    def swap(self, sent: Sequence[torch.Tensor], received: Sequence[int]) -> list[torch.Tensor]:
        """Return the tensor alone."""
        return list(sent)

    def leave_note(self, name: str, text: str) -> list[str | None]:
        """Return the text alone."""
        return [text]

    def meet(self, call: str, timeout_s: float) -> None:
        """Return at once."""


class TorchWorld:
    """The default process group of `torch.distributed`. REQUIRES: it is initialized."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        # Of its own, and on the CPU: whatever the training has queued, nothing waits for it or comes between.
        self._group: Any = None
        # The last meeting's call, and how often this rank has come to it.
        self._meeting = ("", 0)

    def share(self, value: _T | None) -> _T:
        """Return rank 0's value; blocks until all ranks call it."""
        box: list[Any] = [value]
        with self._mapped_errors():
            dist.broadcast_object_list(box, src=0)
        shared: _T = box[0]
        return shared

    def gather(self, value: _T) -> list[_T]:
        """Return all values; blocks until all ranks call it."""
        values: list[Any] = [None] * self.size
        with self._mapped_errors():
            dist.all_gather_object(values, value)
        return values

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        """Return all values; blocks until all ranks call it. The first call makes a process group."""
        group = self._own_group()
        found = [torch.empty(len(values), dtype=torch.int64, device="cpu") for _ in range(self.size)]
        with self._mapped_errors():
            dist.all_gather(found, torch.tensor(values, dtype=torch.int64, device="cpu"), group=group)
        return [each.tolist() for each in found]

    def swap(self, sent: Sequence[torch.Tensor], received: Sequence[int]) -> list[torch.Tensor]:
        """Return what each rank sends this one; blocks until all ranks call it, the first time as `exchange` does."""
        group = self._own_group()
        found = torch.empty(sum(received), dtype=torch.uint8, device="cpu")
        with self._mapped_errors():
            sizes = [tensor.numel() for tensor in sent]
            dist.all_to_all_single(found, torch.cat(list(sent)), list(received), sizes, group=group)
        return list(torch.split(found, list(received)))

    def _own_group(self) -> Any:
        if self._group is None:
            self._group = dist.new_group(backend="gloo")
        return self._group

    @contextlib.contextmanager
    def _mapped_errors(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as exc:
            raise HeadraceError(f"rank {self.rank} has lost another rank of the run: {exc}") from exc

    def leave_note(self, name: str, text: str) -> list[str | None]:
        """Return all ranks' last notes, from the process group's store."""
        store = dist.distributed_c10d._get_default_store()
        keys = [f"headrace/{name}/{rank}" for rank in range(self.size)]
        store.set(keys[self.rank], text)
        return [store.get(key).decode() if store.check([key]) else None for key in keys]

    def meet(self, call: str, timeout_s: float) -> None:
        """Return once all ranks are here. The first that sees all, or that waits in vain, decides for all ranks."""
        store = dist.distributed_c10d._get_default_store()
        self._meeting = (call, self._meeting[1] + 1 if self._meeting[0] == call else 1)
        key = f"headrace/{call}/{self._meeting[1]}"
        ranks = {rank: f"{key}/{rank}" for rank in range(self.size)}
        store.set(ranks[self.rank], "here")
        deadline_s = time.monotonic() + timeout_s
        while not (is_whole := store.check(list(ranks.values()))) and time.monotonic() < deadline_s:
            if store.check([key]):  # another rank has given up
                break
            time.sleep(_MEETING_POLL_S)
        missing = "" if is_whole else ", ".join(str(rank) for rank, here in ranks.items() if not store.check([here]))
        # A rank that comes only now may have made the meeting whole: one decision counts.
        decision = store.compare_set(key, "", f"without {missing}" if missing else "all").decode()
        if decision != "all":
            missing = decision.removeprefix("without ")
            raise UnavailableError(
                f"{call}: rank {missing} of {self.size} did not come in time: all ranks have to make this call "
                "together, so no `if rank == 0` may guard it"
            )


def current_world() -> World:
    """Return the ranks of `torch.distributed`, or a run of one process if it is not initialized."""
    return TorchWorld() if dist.is_available() and dist.is_initialized() else SoloWorld()


@dataclass(frozen=True, slots=True)
class _Failure:
    text: str


def together(
    world: World, work: Callable[[], _T], cannot: str, *, error: type[HeadraceError] = HeadraceError
) -> list[_T]:
    """Return what the call returns on each rank, by rank; if it raises on one, raise on all, which would wait for it.

    All ranks call it together. A rank whose own call succeeds raises `error`: "rank 2", what it `cannot` do, and why.
    """
    failure: Exception | None = None
    result: _T | _Failure
    try:
        result = work()
    except Exception as exc:
        failure, result = exc, _Failure(str(exc) or type(exc).__name__)
    gathered = world.gather(result)
    if failure is not None:
        raise failure
    results: list[_T] = []
    for rank, each in enumerate(gathered):
        if isinstance(each, _Failure):
            raise error(f"rank {rank} {cannot}: {each.text}")
        results.append(each)
    return results


@contextlib.contextmanager
def warn_when_late(call: str, *, rank: int, world_size: int) -> Iterator[None]:
    """Warn once if a call that all ranks make together takes long; nothing else reports a missing rank."""
    if world_size == 1:
        yield
        return
    timer = threading.Timer(_LATE_S, _warn_late, (call, rank, world_size, _LATE_S))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()


def _warn_late(call: str, rank: int, world_size: int, late_s: float) -> None:
    _log.warning(
        "rank %d of %d has waited in %s for %s: every rank has to make this call, so no `if rank == 0` may guard it; "
        "or another rank is slow, or waits for the server",
        rank,
        world_size,
        call,
        format_seconds(late_s),
    )
