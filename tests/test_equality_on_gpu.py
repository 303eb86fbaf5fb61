"""Tables that are cut on a device: every row of the store equals the trainer's, bit for bit, and no step waits.

On a GPU where there is one; and everywhere on a fake device, whose copies run as late as they may.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from equality_tables import TABLES, TorchModel, batch_of, table_batched
from fake_device import FakeDevice
from store_comparison import compare_with_store
from torch import nn

from headrace.paramserver.shard.launch import ServerProcess
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.delivery import pipeline as delivery
from headrace.streamer.device.dirty_rows import DeviceDirtyRows
from headrace.streamer.flush.flusher import Flusher

NUM_STEPS = 12
PLACES = [pytest.param("cuda", id="on a GPU", marks=pytest.mark.gpu), pytest.param("cpu", id="on a fake device")]


@pytest.fixture
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where tables are; the CPU stands for a fake device."""
    if request.param == "cpu":
        fake = FakeDevice(5, trains_at_once=True)
        monkeypatch.setattr(delivery, "Flusher", functools.partial(Flusher, runtime_of=lambda device: fake))
    return torch.device(request.param, 0) if request.param == "cuda" else torch.device("cpu")


@contextlib.contextmanager
def no_waits(device: torch.device) -> Iterator[None]:
    """Have CUDA raise where the host would wait for it; the fake device checks its own calls."""
    if device.type == "cpu":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def guard_steps(streamer: RawEmbeddingStreamer, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make it an error that the end of a step, or the marking before it, waits for the device."""
    for owner, name in ((streamer._delivery, "on_step"), (DeviceDirtyRows, "mark"), (DeviceDirtyRows, "add")):
        original: Callable[..., Any] = getattr(owner, name)

        def guarded(*args: Any, original: Callable[..., Any] = original, **kwargs: Any) -> Any:
            with no_waits(device):
                return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, guarded)


def check(streamer: RawEmbeddingStreamer, server: ServerProcess) -> None:
    assert all(isinstance(table.dirty, DeviceDirtyRows) for table in streamer.tables)
    comparison = compare_with_store(streamer.tables, server.address)
    assert comparison.is_equal, str(comparison)
    assert comparison.num_compared == sum(rows for _, rows, _ in TABLES)


OPTIMIZERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "sgd-sparse": (lambda p: torch.optim.SGD(p, lr=0.1), True),
    "sgd-dense": (lambda p: torch.optim.SGD(p, lr=0.1), False),
    "adam-sparse": (lambda p: torch.optim.SparseAdam(p, lr=0.1), True),
    "adam-dense": (lambda p: torch.optim.Adam(p, lr=0.1), False),
    "momentum-and-decay": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1), False),
}


@pytest.mark.parametrize("device", PLACES, indirect=True)
@pytest.mark.parametrize("case", OPTIMIZERS)
def test_torch_optimizers(
    server: ServerProcess, case: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plain tables arrive whole, also in sweeps of many small flushes."""
    make_optimizer, sparse = OPTIMIZERS[case]
    torch.manual_seed(1)
    generator = torch.Generator().manual_seed(2)
    model = nn.ModuleDict({f"{case}-{device.type}": TorchModel(sparse=sparse)}).to(device)
    (core,) = model.values()
    optimizer = make_optimizer(list(model.parameters()))
    settings = {
        "staging_bytes": 2**16,
        "freshness_s": 0,
        "max_cost_percent": 100,
    }
    with RawEmbeddingStreamer(server.address, run=next(iter(model)), device_pipeline=True, **settings) as streamer:
        streamer.attach(model, optimizer, publish="all")
        guard_steps(streamer, device, monkeypatch)
        for _ in range(NUM_STEPS):
            optimizer.zero_grad()
            (core(batch_of(generator, device)) - 1).pow(2).mean().backward()
            optimizer.step()
        streamer.flush()
        check(streamer, server)


@pytest.mark.torchrec
@pytest.mark.parametrize("device", PLACES, indirect=True)
@pytest.mark.parametrize("name", ["EXACT_SGD", "EXACT_ROWWISE_ADAGRAD"])
def test_table_batched(server: ServerProcess, name: str, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables of a fused module arrive whole, with the optimizer's states and its count of steps."""
    import fbgemm_gpu.split_table_batched_embeddings_ops_training  # noqa: F401 (it registers the operators)

    has_kernels = torch._C._dispatch_has_kernel_for_dispatch_key("fbgemm::bounds_check_indices", "CUDA")
    if device.type == "cuda" and not has_kernels:
        pytest.skip("this fbgemm_gpu is a build for the CPU")
    torch.manual_seed(3)
    generator = torch.Generator().manual_seed(4)
    tbe, forward = table_batched(name, device=device)
    model = nn.ModuleDict({f"{name}-{device.type}": tbe})
    with RawEmbeddingStreamer(
        server.address, run=next(iter(model)), device_pipeline=True, freshness_s=0, max_cost_percent=100
    ) as streamer:
        streamer.attach(model, publish="all")
        guard_steps(streamer, device, monkeypatch)
        for _ in range(NUM_STEPS):
            (forward(batch_of(generator, device)) - 1).pow(2).mean().backward()
        streamer.flush()
        check(streamer, server)


def test_what_has_to_be_known_is_waited_for(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """An eviction, and a checkpoint, wait until no rows are on their way from the device."""
    fake = FakeDevice(trains_at_once=True)
    monkeypatch.setattr(delivery, "Flusher", functools.partial(Flusher, runtime_of=lambda device: fake))
    model = nn.ModuleDict({"waits": TorchModel(sparse=True)})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(2)
    with RawEmbeddingStreamer(
        server.address, run="waits", device_pipeline=True, freshness_s=0, max_cost_percent=100
    ) as streamer:
        streamer.attach(model, optimizer, publish="updated")
        pipeline, settle = streamer._delivery.flusher._device, streamer._delivery.settle
        assert pipeline is not None
        num_pending: list[int] = []

        def settle_at_last() -> None:
            num_pending.append(pipeline._num_pending)
            fake.gate.set()
            settle()
            num_pending.append(pipeline._num_pending)

        monkeypatch.setattr(streamer._delivery, "settle", settle_at_last)
        rows = torch.tensor([3, 4])
        for wait in (streamer.state_dict, lambda: streamer.evict("waits.bags.films.weight", rows)):
            fake.gate.clear()
            (model["waits"](batch_of(generator, torch.device("cpu"))) - 1).pow(2).mean().backward()
            optimizer.step()
            wait()
        assert num_pending == [1, 0, 1, 0]
        streamer.flush()
        comparison = compare_with_store(streamer.tables, server.address, only_present=True)
        assert comparison.is_equal, str(comparison)
