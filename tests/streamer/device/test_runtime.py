"""What a device is driven by: whether it has the kernels of a drain is known before the first step."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace

import pytest
import torch

from headrace.kernels.runtime.cuda_module import KernelsUnavailableError
from headrace.streamer.device import runtime as device_runtime


@pytest.mark.parametrize("lost", ["bitmap", "dirty_drain", "row_packing"])
def test_a_device_without_one_kind_of_kernels_is_refused(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """All families that marking and draining launch are made before a table is taken over; the reason is told."""

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


def test_a_copy_aside_makes_no_context_on_the_first_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that copies from its process's GPU sets no other device, which would take memory there.

    A block of a stream ends by setting the device that was current at its beginning, which for a new thread is the
    first. A device that is set gets a context; a block of a device goes back without making one.
    """
    current, calls, was_set = [0], [], []

    @contextlib.contextmanager
    def on_stream(stream: str) -> Iterator[None]:
        before = current[-1]
        yield
        was_set.append(before)

    @contextlib.contextmanager
    def on_device(device: torch.device) -> Iterator[None]:
        current.append(device.index)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", on_stream)
    monkeypatch.setattr(torch.cuda, "device", on_device)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: "side" if priority else "of captures")
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: SimpleNamespace(record=calls.append))
    monkeypatch.setattr(device_runtime, "beside_captures", contextlib.nullcontext)
    source, target = (SimpleNamespace(copy_=lambda *_, **__: None, record_stream=calls.append) for _ in range(2))
    device_runtime.CudaRuntime(torch.device("cuda", 1)).copy_aside(source, target)  # type: ignore[arg-type]
    assert (was_set, current, calls) == ([1], [0], ["side", "side"])


# In a process of its own, whose context is spoiled by the kernel that stops. The kernel comes behind a sleep of the
# device: it has not stopped yet when the call returns.
_STOPPED = """
import os, sys, torch
from headrace.kernels.dirty_bitmap import make_bitmap, mark_dirty, mark_dirty_tables
from headrace.kernels.packing import pack_rows, unpack_rows
from headrace.streamer.device.runtime import CudaRuntime, cuda_runtime

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
