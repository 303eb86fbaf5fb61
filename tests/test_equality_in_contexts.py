"""Whatever mode or default the user's program has set, what is stored, served and restored is what was trained."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from store_comparison import compare_with_store
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from watched_server import WAIT_S

from headrace.paramserver.replica import EmbeddingReplica, serve_model
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.restore import restore

ROWS = 200
IDS = torch.tensor([[3, 4, 5], [7, 7, 199]])


class AsHalf(TorchFunctionMode):
    """A user's mode that makes all tensors of torch's factories in another type, on no device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.empty, torch.zeros, torch.full, torch.arange, torch.tensor):
            kwargs.update(dtype=torch.float16, device="meta")
        return func(*args, **kwargs)


class Watching(TorchDispatchMode):
    """A user's mode that looks at each operation, as a counter of FLOPs does."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@contextlib.contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


CONTEXTS: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
    "inference_mode": torch.inference_mode,
    "no_grad": torch.no_grad,
    "device": lambda: torch.device("meta"),
    "default_device": lambda: default_device("meta"),
    "float64": lambda: default_dtype(torch.float64),
    "bfloat16": lambda: default_dtype(torch.bfloat16),
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "function_mode": AsHalf,
    "dispatch_mode": Watching,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "share": {"send_share": 0.5},
    "rounded": {"weights_dtype": torch.bfloat16, "states": False},
}


class Model(nn.ModuleDict):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__({"t": nn.EmbeddingBag(ROWS, 8, mode="sum", sparse=True, device=device, dtype=torch.float32)})
        self.add_module("top", nn.Linear(8, 1, device=device, dtype=torch.float32))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self["top"](self["t"](ids))
        return scores


def train(model: Model, optimizer: torch.optim.Optimizer, num_steps: int = 3) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randint(ROWS, (16, 3), device="cpu")).pow(2).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("context", "settings"),
    [
        *((context, "share") for context in CONTEXTS),
        *(("inference_mode", each) for each in SETTINGS if each != "share"),
    ],
)
def test_whole_trip(server: ServerProcess, context: str, settings: str) -> None:
    """Attach, flush, audit, a replica, a served model and a restore in a context; what they make works outside."""

    def inside(work: Callable[[], Any]) -> Any:
        with CONTEXTS[context]():
            return work()

    torch.manual_seed(0)
    model, bare = Model(), Model(device="meta")
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    at_once = {"freshness_s": 0, "max_cost_percent": 100}
    streamer = inside(lambda: RawEmbeddingStreamer(server.address, run="r", model=f"{context}-{settings}", **at_once))
    with streamer:
        inside(lambda: streamer.attach(model, optimizer, dense=True, **SETTINGS[settings]))
        for _ in range(3):
            train(model, optimizer)
            inside(lambda: streamer.flush(WAIT_S))
            assert inside(streamer.audit).is_equal
            assert compare_with_store(streamer.tables, server.address).is_equal
        fetched = inside(lambda: streamer.fetch("t.weight", range(ROWS)))
        inside(streamer.state_dict)
        for precision in (None, "int8"):
            replica, served = inside(
                lambda precision=precision: serving(server.address, streamer.model, precision, bare)
            )
            with replica:
                train(model, optimizer)
                streamer.flush(WAIT_S)
                replica.wait_for(streamer.stats().step, WAIT_S, epoch=streamer.epoch)
                ours = streamer.fetch("t.weight", range(ROWS))
                found = inside(partial(replica.lookup, "t.weight", range(ROWS)))
                if precision is None:
                    assert torch.equal(found, torch.as_tensor(ours.weights))
                    with torch.no_grad():
                        assert settings == "rounded" or torch.equal(served(IDS), model(IDS))
                else:
                    assert (found - model["t"].weight).abs().max() < 0.1
                assert found.device.type == "cpu"
                assert found.dtype == ours.weights.dtype
                assert not found.is_inference()
                assert not any(each.is_inference() or each.is_meta for each in served.parameters())
        assert fetched.weights is not None
        if settings != "rounded":
            check_restore(server.address, model, optimizer, streamer, inside)


def serving(address: str, name: str, precision: Any, bare: Model) -> tuple[EmbeddingReplica, nn.Module]:
    # By step, so that rows and dense part are of the same one.
    replica = EmbeddingReplica(address, precision=precision, model=name, consistency="step")
    return replica, serve_model(bare, replica, model=name)


def check_restore(
    address: str, model: Model, optimizer: Any, streamer: RawEmbeddingStreamer, inside: Callable[..., Any]
) -> None:
    """A new model gets every bit back in the context, and trains on outside of it."""
    other = Model()
    its_optimizer = torch.optim.Adagrad(other.parameters(), lr=0.1)
    inside(lambda: restore(other, its_optimizer, address, model_name=streamer.model))
    assert torch.equal(other["t"].weight, model["t"].weight)
    assert torch.equal(its_optimizer.state[other["t"].weight]["sum"], optimizer.state[model["t"].weight]["sum"])
    assert torch.equal(other["top"].weight, model["top"].weight)
    train(other, its_optimizer, num_steps=1)


def test_a_step_in_inference_mode_is_streamed(server: ServerProcess) -> None:
    """An optimizer may step in inference mode, and its rows go out like others."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="r", model="inference-step") as streamer:
        streamer.attach(model, optimizer)
        for _ in range(3):
            optimizer.zero_grad()
            model(torch.randint(ROWS, (16, 3))).pow(2).sum().backward()
            with torch.inference_mode():
                optimizer.step()
        assert streamer.audit().is_equal
        assert compare_with_store(streamer.tables, server.address).is_equal


def test_tensors_without_values_are_refused(server: ServerProcess) -> None:
    """In a FakeTensorMode or a transform a method refuses, and the streamer works on outside of it."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="r", model="fake") as streamer:
        with FakeTensorMode(), pytest.raises(ConfigError, match="FakeTensorMode is on"):
            streamer.attach(model, optimizer)
        streamer.attach(model, optimizer)
        train(model, optimizer)
        with FakeTensorMode(), pytest.raises(ConfigError, match="FakeTensorMode is on"):
            streamer.flush()

        def loss(x: torch.Tensor) -> torch.Tensor:
            with pytest.raises(ConfigError, match=r"transform of torch\.func"):
                streamer.flush()
            return x.sum()

        torch.func.grad(loss)(torch.ones(3))
        assert streamer.audit().is_equal
