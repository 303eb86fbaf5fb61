"""How a table-batched module is called, and what cuts an update short: no row that changes is missed."""

from __future__ import annotations

import gc
import sys
import warnings
import weakref
from types import FrameType
from typing import Any

import pytest
import torch
from mirror import Mirror
from torch import nn

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.tap import Tap, tap_model

pytestmark = pytest.mark.torchrec

ops = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")
common = pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_common")
configs = pytest.importorskip("fbgemm_gpu.split_embedding_configs")
ALL = list(range(60))


class Called:
    """A module of one table, the model around it, and a mirror of it."""

    def __init__(self, optimizer: str = "EXACT_ROWWISE_ADAGRAD") -> None:
        torch.manual_seed(3)
        self.module = ops.SplitTableBatchedEmbeddingBagsCodegen(
            [(60, 4, common.EmbeddingLocation.HOST, ops.ComputeDevice.CPU)],
            optimizer=getattr(configs.EmbOptimType, optimizer),
            device=torch.device("cpu"),
            learning_rate=0.1,
            eps=1e-3,
            table_names=["t"],
        )
        self.module.init_embedding_weights_uniform(-1.0, 1.0)
        self.model = nn.ModuleDict({"m": self.module})
        self.mirror = Mirror()

    def tap(self) -> Tap:
        tap = tap_model(self.model, [], self.mirror.on_step)
        self.mirror.watch(tap)
        return tap


def look_up(call: Any, *ids: int) -> torch.Tensor:
    output: torch.Tensor = call(torch.tensor(ids), torch.arange(len(ids) + 1))
    return output.pow(2).sum()


def test_a_forward_that_runs_no_hook_is_noticed() -> None:
    """`module.forward(…)` runs no hook: it is told once, and all rows go from then on, also of a backward to come."""
    called = Called()
    tap = called.tap()
    loss = look_up(called.module.forward, 1, 2)
    with pytest.warns(RuntimeWarning, match=r"tables 'm\.t': all rows .*its forward\(\) was called directly"):
        assert tap.end_step()
    loss.backward()
    look_up(called.module, 3).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert tap.end_step()
    assert called.mirror.taken == [{"m.t": ALL}] * 2


@pytest.mark.parametrize("requires_grad", [True, False], ids=["on the CPU", "as on a GPU"])
def test_a_lookup_before_attach_is_noticed(requires_grad: bool) -> None:
    """Its backward comes after `attach`, and nobody has kept its batch: all rows go, that one time."""
    called = Called()
    for name in ("weights_host", "momentum1_host"):  # buffers on a GPU
        getattr(called.module, name).requires_grad_(requires_grad)
    losses = [look_up(called.module, 1, 2), look_up(called.module, 3)]
    tap = called.tap()
    for loss in losses:
        loss.backward()
        assert tap.end_step()
        look_up(called.module, 7).backward()
        assert tap.end_step()
    assert called.mirror.taken == [{"m.t": ALL}, {"m.t": [7]}] * 2


def test_a_tap_that_nobody_has_is_not_kept() -> None:
    """The hook at the end of each backward, which the module keeps, keeps neither alive."""
    called = Called()
    tap = called.tap()
    look_up(called.module, 1).backward()
    reference = weakref.ref(called.module)
    del called, tap
    gc.collect()
    assert reference() is None


@pytest.mark.parametrize("place", ["prepare_inputs", "_report_io_size_count"])
def test_a_forward_that_fails_is_no_forward_without_hooks(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that fails, before or after the module has counted it, widens nothing."""
    called = Called()
    tap = called.tap()

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(called.module, place, fail)
        for _ in range(3):
            with pytest.raises(RuntimeError, match="out of memory"):
                look_up(called.module, 1, 2)
    look_up(called.module, 5).backward()
    assert tap.end_step()
    assert called.mirror.taken == [{"m.t": [5]}]


@pytest.mark.parametrize("compiled_first", [True, False])
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
def test_a_compiled_module_sends_all_rows(optimizer: str, compiled_first: bool) -> None:
    """A compiled module keeps the batch of an earlier call, so its own rows are not known: all go, and it is told."""
    torch.compiler.reset()
    called = Called(optimizer)
    compiled = torch.compile(called.module, backend="eager")
    look_up(called.module, 50, 51).backward()
    if compiled_first:
        look_up(compiled, 1, 2).backward()
    tap = called.tap()
    with pytest.warns(RuntimeWarning, match="a compiled module does not keep its batch"):
        look_up(compiled, 3, 4).backward()
    assert tap.end_step()
    assert called.mirror.taken == [{"m.t": ALL}]


@pytest.mark.parametrize("at", ["after_update", "_mark"])
def test_an_interrupt_amid_the_update_loses_no_row(at: str) -> None:
    """Ctrl-C while `backward()` updates is raised in the hook behind it, whose marks are then made up for."""
    called = Called()
    tap = called.tap()
    loss = look_up(called.module, 1, 2)

    def interrupt(frame: FrameType, event: str, _: Any) -> None:
        if frame.f_code.co_name == at:
            sys.settrace(None)
            raise KeyboardInterrupt

    tracing = sys.gettrace()
    sys.settrace(interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            loss.backward()
    finally:
        sys.settrace(tracing)
    assert tap.end_step()
    look_up(called.module, 7).backward()
    assert tap.end_step()
    assert called.mirror.taken == [{"m.t": ALL}, {"m.t": [7]}]


def test_memory_shared_with_other_processes_is_refused() -> None:
    """The fused updates of another process would never be seen."""
    called = Called()
    called.model.share_memory()
    with pytest.raises(UnsupportedModelError, match=r"'m\.t' lies in memory that is shared with other processes"):
        called.tap()


def test_a_module_that_is_replaced_is_told() -> None:
    """Another module in its place is what trains then, so the next flush says that it was not attached."""
    called = Called()
    tap = called.tap()
    called.model["m"] = Called().module
    with pytest.raises(UnsupportedModelError, match=r"'m\.t' is not what was attached"):
        tap.end_step()
