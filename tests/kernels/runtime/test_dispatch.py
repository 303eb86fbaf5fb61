"""Which way an operation takes on a device, and that it is said once."""

from __future__ import annotations

import logging
from types import ModuleType

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from headrace.kernels import dirty_bitmap as bm
from headrace.kernels.runtime import cuda_module, dispatch, hip_module
from headrace.kernels.runtime.cuda_module import KernelsUnavailableError

CUDA = torch.device("cuda", 0)


class _Launcher:
    def launch(self, kernel: str, blocks: int, threads: int, *args: torch.Tensor | int) -> None:
        raise AssertionError("nothing is launched here")


@pytest.fixture(autouse=True)
def _forget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "_logged", set())
    monkeypatch.setattr(dispatch, "_missing", {})


def test_a_missing_kernel_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The first call of each operation warns with the reason; compiling is not tried again."""
    tries = []

    def refuse(family: str, device: torch.device) -> _Launcher:
        tries.append(family)
        raise KernelsUnavailableError("no compiler")

    monkeypatch.setattr(dispatch, "gpu_module", refuse)
    for operation in ("mark_dirty", "mark_dirty", "take_dirty"):
        assert dispatch.launcher_for(operation, "bitmap", CUDA) is None
    assert tries == ["bitmap"]
    messages = [record.getMessage() for record in caplog.records if record.name == dispatch.__name__]
    assert messages == [
        f"{operation} on cuda:0: torch's own operations, which are slower; no kernels: no compiler"
        for operation in ("mark_dirty", "take_dirty")
    ]


def test_a_kernel_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The way by a kernel is said at INFO; where there are no kernels, torch's operations do."""
    launcher = _Launcher()
    monkeypatch.setattr(dispatch, "gpu_module", lambda family, device: launcher)
    with caplog.at_level(logging.INFO):
        assert dispatch.launcher_for("pack_rows", "row_packing", CUDA) is launcher
        assert dispatch.launcher_for("pack_rows", "row_packing", CUDA) is launcher
    told = [(record.levelname, record.getMessage()) for record in caplog.records if record.name == dispatch.__name__]
    assert told == [("INFO", "pack_rows on cuda:0: kernels of row_packing.cu")]
    assert dispatch.launcher_for("mark_dirty", "bitmap", torch.device("meta")) is None
    assert "there are none for meta" in caplog.text


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_a_traced_call_comes_to_the_operator(mode: str) -> None:
    """A tracer sees the operator, be its tensors real ones or not."""

    def mark(bitmap: torch.Tensor, row_ids: torch.Tensor) -> torch.Tensor:
        bm.mark_dirty(bitmap, row_ids)
        return bitmap + 0

    graph = make_fx(mark, tracing_mode=mode)(bm.make_bitmap(100), torch.tensor([5]))
    assert "headrace.mark_dirty" in graph.code
    assert graph(bm.make_bitmap(100), torch.tensor([6, 64])).tolist() == [64, 1]


@pytest.mark.gpu
def test_operations_take_the_kernels(caplog: pytest.LogCaptureFixture) -> None:
    """With a GPU and the extra, the public functions take the kernels and give the definition's rows."""
    bitmap = bm.make_bitmap(1000, "cuda")
    with caplog.at_level(logging.INFO):
        bm.mark_dirty(bitmap, torch.tensor([5, -1, 999, 5], device="cuda"))
        rows, count = bm.take_dirty(bitmap)
    assert rows[: int(count)].tolist() == [5, 999]
    assert "take_dirty on cuda:0: kernels of bitmap.cu" in caplog.text


@pytest.mark.gpu
def test_without_kernels_the_rows_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU and no compiler, torch's operations give the same."""

    def refuse(family: str, device: torch.device) -> _Launcher:
        raise KernelsUnavailableError("no compiler")

    monkeypatch.setattr(dispatch, "gpu_module", refuse)
    bitmap = bm.make_bitmap(1000, "cuda")
    bm.mark_dirty(bitmap, torch.tensor([5, -1, 999, 5], device="cuda"))
    rows, count = bm.take_dirty(bitmap)
    assert rows[: int(count)].tolist() == [5, 999]


_GLOBAL, _RELAXED = 0, 2


@pytest.mark.parametrize(("is_hip", "module"), [(False, cuda_module), (True, hip_module)], ids=["CUDA", "HIP"])
def test_a_thread_minds_no_capture_while_it_waits(
    monkeypatch: pytest.MonkeyPatch, is_hip: bool, module: ModuleType
) -> None:
    """Inside the block captures of other threads forbid nothing; after it they do as before, also after an error."""
    modes = [_GLOBAL]

    def exchange(mode: int) -> int:
        modes.append(mode)
        return modes[-2]

    monkeypatch.setattr(torch.version, "hip", "6.4" if is_hip else None)
    monkeypatch.setattr(module, "exchange_capture_mode", exchange)
    with dispatch.beside_captures(), dispatch.beside_captures():
        assert modes[-1] == _RELAXED
    assert modes == [_GLOBAL, _RELAXED, _RELAXED, _RELAXED, _GLOBAL]
    with pytest.raises(ValueError, match="in the block"), dispatch.beside_captures():
        raise ValueError("in the block")
    assert modes[-1] == _GLOBAL
