"""What a device is driven by: whether it has the kernels of a cut is known before the first step."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from headrace.kernels.cuda_module import KernelsUnavailableError
from headrace.streamer.device import device_runtime


@pytest.mark.parametrize("lost", ["bitmap", "dirty_cut", "row_packing"])
def test_a_device_without_one_kind_of_kernels_is_refused(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """All families that marking and cutting launch are made before a table is taken over; the reason is told."""

    def make(family: str, device: torch.device) -> object:
        if family == lost:
            raise KernelsUnavailableError(f"{family}.cu cannot be loaded")
        return object()

    monkeypatch.setattr(device_runtime, "gpu_module", make)
    assert device_runtime.cuda_runtime(torch.device("cuda", 0)) == f"{lost}.cu cannot be loaded"


@pytest.mark.parametrize("is_loaded", [False, True])
def test_managed_memory_is_fbgemms(monkeypatch: pytest.MonkeyPatch, is_loaded: bool) -> None:
    """FBGEMM says which tensors are in its managed memory; where it is not loaded nobody looks for its operators."""
    asked = []

    class Operators:
        def is_uvm_tensor(self, tensor: torch.Tensor) -> bool:
            asked.append(tensor)
            return True

    monkeypatch.delitem(sys.modules, "fbgemm_gpu", raising=False)
    if is_loaded:
        monkeypatch.setitem(sys.modules, "fbgemm_gpu", ModuleType("fbgemm_gpu"))
    monkeypatch.setattr(torch.ops, "fbgemm", Operators())
    runtime, tensor = object.__new__(device_runtime.CudaRuntime), torch.zeros(3)
    runtime.device = tensor.device
    assert runtime.holds(tensor) != is_loaded
    assert len(asked) == is_loaded


@pytest.mark.torchrec
def test_fbgemm_for_the_cpu_has_no_managed_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operator is there, and has nothing for a GPU's tensors, nor for one of another kind: that is no error."""
    import fbgemm_gpu  # noqa: F401

    tensor = torch.eye(2).to_sparse()
    with pytest.raises(NotImplementedError):
        torch.ops.fbgemm.is_uvm_tensor(tensor)
    runtime = object.__new__(device_runtime.CudaRuntime)
    runtime.device = tensor.device
    assert runtime.holds(tensor)


class _FakeGpu:
    """What of torch a copy aside calls, and the rules that CUDA has for it.

    A thread begins on the first device. While another thread captures a graph, a wait is an error, unless the thread
    has said that it keeps away from it. A block of a stream ends by setting the device that was current at its
    beginning, and a device that is set gets a context; a block of a device gives that one back without making one.
    """

    def __init__(self) -> None:
        self.current, self.contexts = 0, {1}
        self.is_relaxed = False
        self.calls: list[str] = []

    @contextlib.contextmanager
    def stream(self, stream: str) -> Iterator[None]:
        before, self.current = self.current, 1
        yield
        self.current = before
        self.contexts.add(before)

    @contextlib.contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before, self.current = self.current, device.index
        yield
        self.current = before

    @contextlib.contextmanager
    def beside_captures(self) -> Iterator[None]:
        before, self.is_relaxed = self.is_relaxed, True
        yield
        self.is_relaxed = before

    def Event(self, *, blocking: bool) -> SimpleNamespace:
        assert blocking
        return SimpleNamespace(record=lambda stream: self._call(f"record on {stream}"), synchronize=self._wait)

    def Stream(self, device: torch.device, *, priority: int) -> str:
        assert priority, "one of the streams that a capture may be on"
        return "side"

    def current_stream(self, device: torch.device) -> str:
        return "training"

    def tensor(self) -> Any:
        return SimpleNamespace(
            copy_=lambda source, non_blocking: self._call(f"copy on {self.current}"),
            record_stream=lambda stream: self._call(f"keep for {stream}"),
        )

    def _wait(self) -> None:
        assert self.is_relaxed, "operation not permitted when stream is capturing"
        self._call("wait")

    def _call(self, what: str) -> None:
        self.calls.append(what)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _FakeGpu:
    fake = _FakeGpu()
    for name in ("stream", "device", "Event", "Stream", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, getattr(fake, name))
    monkeypatch.setattr(device_runtime, "beside_captures", fake.beside_captures)
    return fake


def test_a_wait_bears_a_capture_by_the_training_thread(gpu: _FakeGpu) -> None:
    """The sender's thread waits for a header and for rows while a graph is captured; neither wait breaks it."""
    runtime = device_runtime.CudaRuntime(torch.device("cuda", 1))
    runtime.record().synchronize()
    runtime.copy_aside(gpu.tensor(), gpu.tensor()).synchronize()
    assert gpu.calls == ["record on training", "wait", "copy on 1", "keep for side", "record on side", "wait"]
    assert not gpu.is_relaxed


def test_a_copy_aside_makes_no_context_on_the_first_device(gpu: _FakeGpu) -> None:
    """A thread that copies from its process's GPU takes no memory on another one, which is another process's."""
    runtime = device_runtime.CudaRuntime(torch.device("cuda", 1))
    runtime.copy_aside(gpu.tensor(), gpu.tensor())
    assert gpu.contexts == {1} and gpu.current == 0


# In a process of its own, whose context is spoiled by the kernel that stops. The kernel comes behind a sleep of the
# device: it has not stopped yet when the call returns.
_STOPPED = """
import os, sys, torch
from headrace.kernels.bitmap import make_bitmap, mark_dirty, mark_dirty_tables
from headrace.kernels.row_packing import pack_rows, unpack_rows
from headrace.streamer.device.device_runtime import CudaRuntime, cuda_runtime

device = torch.device("cuda", torch.cuda.current_device())
runtime = cuda_runtime(device)
assert isinstance(runtime, CudaRuntime), runtime
table, ids = torch.zeros(100, 8, device=device), torch.tensor([5, 100], device=device)
bitmap, out = make_bitmap(100, device)[:1], torch.empty(4096, dtype=torch.uint8, device=device)
slots = make_bitmap(256, device)
torch.cuda.synchronize()
torch.cuda._sleep(100_000_000)
{call}
print("launched", flush=True)
try:
    runtime.record().synchronize()
except RuntimeError:
    print("raised", flush=True)
os._exit(0)
"""


@pytest.mark.gpu
@pytest.mark.parametrize(
    "call",
    [
        "mark_dirty(bitmap, ids)",
        "mark_dirty_tables(slots, [ids], [0], [100])",
        "pack_rows([table], [ids], [[]], out)",
        "unpack_rows(table, ids, table[:2])",
    ],
)
def test_a_wait_tells_that_a_kernel_has_stopped(call: str) -> None:
    """On a GPU a row that is none stops the kernel, and the next wait raises; the call has told nothing."""
    command = [sys.executable, "-c", _STOPPED.format(call=call)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.returncode) == (["launched", "raised"], 0), done.stderr
