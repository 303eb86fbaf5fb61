"""Tables of which flushes send a share of the changed rows: after a flush of all, every row equals the trainer's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from equality_tables import TorchModel, batch_of, table_batched
from torch import nn
from watched_server import WAIT_S

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.compare import compare_with_store

NUM_STEPS = 30
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path_factory.mktemp("server"), shards=2) as running:
        yield running


def streamed(address: str, name: str, make: Callable[[], tuple[Any, Any, Any]], **settings: Any) -> int:
    """Train a model, with its optimizer and step, and flush at times; return how many rows were sent.

    Every row is compared after each flush, and rows wait before it, if there is a share.
    """
    torch.manual_seed(3)
    model, optimizer, step = make()
    generator = torch.Generator().manual_seed(4)
    always = {"freshness_s": 0, "max_cost_percent": 100}
    with RawEmbeddingStreamer(address, run=name, model=name, **always) as streamer:
        streamer.attach(model, optimizer, publish="all", **settings)
        streamer.flush()
        for number in range(NUM_STEPS):
            step(batch_of(generator))
            if optimizer is None or number % 10 == 9:
                streamer.step()
            streamer._delivery.sender.wait_durable(WAIT_S)  # or a slow server would have steps share a flush
            if number % 10 == 9:
                stats = streamer.stats()
                assert bool(stats.num_waiting_rows) == bool(settings)
                assert ("waiting for at most 60 s" in repr(streamer)) == bool(settings)
                assert stats.acked_step < stats.step or not settings
                streamer.flush()
                assert streamer.stats().num_waiting_rows == 0
                assert streamer.audit(only_present=False).is_equal
                assert compare_with_store(streamer.tables, address).is_equal
        return streamer.stats().num_rows_sent


def _torch_model(optimizer_name: str) -> tuple[Any, Any, Any]:
    model = TorchModel(sparse=optimizer_name == "adagrad")
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())

    def step(batch: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        (model(batch) - 1).pow(2).mean().backward()
        optimizer.step()

    return model, optimizer, step


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
def test_torch_optimizers(server: ServerProcess, optimizer_name: str) -> None:
    """Fewer rows go out, and a flush makes the store equal, also of dense states of rows without a gradient."""
    make = lambda: _torch_model(optimizer_name)  # noqa: E731
    num_rows = streamed(server.address, f"share-{optimizer_name}", make, send_share=0.2)
    assert num_rows < 0.9 * streamed(server.address, f"all-{optimizer_name}", make)


@pytest.mark.torchrec
@pytest.mark.parametrize("precision", ["FP32", "FP16"])
def test_fused_tables(server: ServerProcess, precision: str) -> None:
    """So it is for tables of FBGEMM with a fused optimizer, with weights that are rounded or not."""

    def make() -> tuple[Any, Any, Any]:
        tbe, forward = table_batched("EXACT_ROWWISE_ADAGRAD", precision)
        return nn.ModuleDict({"tbe": tbe}), None, lambda batch: (forward(batch) - 1).pow(2).mean().backward()

    num_rows = streamed(
        server.address, f"fused-{precision}", make, send_share={"*films*": 0.1, "*": 1}, weights_dtype=torch.bfloat16
    )
    assert num_rows < streamed(server.address, f"fused-all-{precision}", make)


@pytest.mark.parametrize("share", [0, 1.5, -0.1, "0.2", True, float("nan")])
def test_a_share_is_above_0_and_at_most_1(server: ServerProcess, share: Any) -> None:
    """Anything else is refused, and nothing is attached."""
    with RawEmbeddingStreamer(server.address, run="refused") as streamer:
        model = TorchModel(sparse=True)
        with pytest.raises(ConfigError, match=r"send_share: .* above 0 and at most 1"):
            streamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), send_share={"one.weight": share})
        assert not streamer.tables


def test_an_unknown_name_is_an_error(server: ServerProcess) -> None:
    """It lists the nearest, and nothing is attached."""
    with RawEmbeddingStreamer(server.address, run="unknown") as streamer:
        model = TorchModel(sparse=True)
        with pytest.raises(ConfigError, match=r"send_share: .*bags.usrs.weight.*bags.users.weight"):
            streamer.attach(model, torch.optim.SGD(model.parameters(), lr=0.1), send_share={"bags.usrs.weight": 0.5})
        assert not streamer.tables


def test_a_checkpoint_with_waiting_rows_is_not_drained(server: ServerProcess) -> None:
    """A run that goes on from it compares its rows, and sends those that had waited."""
    model, optimizer, step = _torch_model("adagrad")
    generator = torch.Generator().manual_seed(4)
    with RawEmbeddingStreamer(server.address, run="resumed", freshness_s=0, max_cost_percent=100) as streamer:
        streamer.attach(model, optimizer, publish="all", send_share=0.2)
        streamer.flush()
        for _ in range(5):
            step(batch_of(generator))
        streamer.step()
        assert streamer.stats().num_waiting_rows
        while streamer.stats().num_inflight_flushes:
            streamer._delivery.sender.wait_durable(WAIT_S)
        state = streamer.state_dict()
        assert not state["is_drained"]
        streamer.close(flush=False)
    with RawEmbeddingStreamer(server.address, run="resumed") as streamer:
        streamer.attach(model, optimizer, send_share=0.2)
        assert streamer.load_state_dict(state) > 10
        streamer.flush()
        assert streamer.audit(only_present=False).is_equal
