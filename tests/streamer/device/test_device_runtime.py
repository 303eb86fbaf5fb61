"""What a device is driven by: whether it has the kernels of a cut is known before the first step."""

from __future__ import annotations

import sys
from types import ModuleType

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
