"""A device that keeps CUDA's rules on CPU tensors, and uses all the freedom that they leave."""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

POISON = 0xA5
# What asks a tensor for its values, and so waits for a device.
_WAITING = ("cpu", "tolist", "numpy", "item", "nonzero", "__bool__", "__int__", "__float__", "__index__")


class FakeDevice:
    """A `DeviceRuntime`: work that is queued runs when an event after it is waited for, or at any moment before.

    The streams take turns at random. What is copied to is poison until the copy has run. A thread in `training` may not
    wait, neither for an event nor for a tensor's values. Work that raises fails at the next wait, as on a device.

    Attributes:
        device: The CPU.
        on_host: Addresses of tensors that are not on this device.
        capturing: A graph is being captured.
        gate: Nobody's wait for an event is over before it is set.
        num_waits: How often somebody has waited.
    """

    def __init__(self, seed: int = 0, *, trains_at_once: bool = False) -> None:
        """Begin with nothing queued.

        Args:
            seed: Of what runs when.
            trains_at_once: Work on the training stream runs when it is queued, for models that are trained on the CPU;
                copies do not.
        """
        self.device = torch.device("cpu")
        self.on_host: set[int] = set()
        self.capturing = False
        self.num_waits = 0
        self.gate = threading.Event()
        self.gate.set()
        self._trains_at_once = trains_at_once
        self._random = random.Random(seed)
        self._lock = threading.RLock()
        self._queues: dict[str, list[Callable[[], object]]] = {"training": [], "side": []}
        self._num_run = dict.fromkeys(self._queues, 0)
        self._failure: Exception | None = None
        self._may_not_wait: set[int] = set()
        self._is_running = False

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.data_ptr() not in self.on_host

    def pinned(self, size_bytes: int) -> torch.Tensor:
        return torch.full((size_bytes,), POISON, dtype=torch.uint8)

    def enqueue(self, work: Callable[[], object]) -> None:
        with self._lock:
            if self._trains_at_once:
                self._run(work)
            else:
                self._queue("training", work)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def copy_to_host(self, source: torch.Tensor, target: torch.Tensor) -> None:
        self._copy("training", source, target)

    def record(self) -> FakeEvent:
        return self._record("training")

    def copy_aside(self, source: torch.Tensor, target: torch.Tensor) -> FakeEvent:
        self._copy("side", source, target)
        return self._record("side")

    def read(self, tensor: torch.Tensor) -> torch.Tensor:
        self.record().synchronize()
        return tensor.clone()

    def is_capturing(self) -> bool:
        return self.capturing

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Forbid this thread to wait; where some tensors are on the host, their values may be asked for."""
        thread = threading.get_ident()

        def guarded(name: str) -> Callable[..., Any]:
            original = getattr(torch.Tensor, name)

            def call(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                self._check_wait(f"Tensor.{name}")
                return original(tensor, *args, **kwargs)

            return call

        self._may_not_wait.add(thread)
        try:
            with contextlib.ExitStack() as patches:
                for name in () if self.on_host else _WAITING:
                    patches.enter_context(mock.patch.object(torch.Tensor, name, guarded(name)))
                yield
        finally:
            self._may_not_wait.discard(thread)

    def run_all(self) -> None:
        """Run what is queued on the training stream."""
        with self._lock:
            self._run_to("training", self._num_run["training"] + len(self._queues["training"]))

    def _check_wait(self, what: str) -> None:
        if threading.get_ident() in self._may_not_wait and not self._is_running:
            raise AssertionError(f"the training thread waits for the device: {what}")

    def _copy(self, stream: str, source: torch.Tensor, target: torch.Tensor) -> None:
        with self._lock:
            target.view(torch.uint8).fill_(POISON)
            self._queue(stream, lambda: target.copy_(source))

    def _record(self, stream: str) -> FakeEvent:
        with self._lock:
            return FakeEvent(self, stream, self._num_run[stream] + len(self._queues[stream]))

    def _queue(self, stream: str, work: Callable[[], object]) -> None:
        self._queues[stream].append(work)
        if self._random.random() < 0.5:
            some = self._random.choice(list(self._queues))
            self._run_to(some, self._num_run[some] + self._random.randint(0, len(self._queues[some])))

    def _run_to(self, stream: str, end: int) -> None:
        while self._num_run[stream] < end:
            self._num_run[stream] += 1
            self._run(self._queues[stream].pop(0))

    def _run(self, work: Callable[[], object]) -> None:
        if self._failure is not None:
            return
        was_running, self._is_running = self._is_running, True
        try:
            with torch.no_grad():
                work()
        except Exception as exc:
            self._failure = exc
        finally:
            self._is_running = was_running

    def _wait(self, stream: str, end: int) -> None:
        self._check_wait("an event")
        assert self.gate.wait(60.0)
        with self._lock:
            self.num_waits += 1
            self._run_to(stream, end)
            if self._failure is not None:
                raise RuntimeError(f"device-side assert triggered: {self._failure}")


class FakeEvent:
    """A place in a stream of a `FakeDevice`."""

    def __init__(self, device: FakeDevice, stream: str, end: int) -> None:
        self._device, self._stream, self._end = device, stream, end

    def synchronize(self) -> None:
        self._device._wait(self._stream, self._end)
