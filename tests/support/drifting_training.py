"""Ranks whose copies of a table should be equal and drift apart; importable, so that ranks can run them."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from headrace.streamer import RawEmbeddingStreamer

__all__ = ["Drift", "drift_of_dtensor_on_rank", "drift_on_rank", "thaw_on_rank"]

NUM_ROWS = 3_000


class Drift(NamedTuple):
    """What a rank has found.

    Attributes:
        equal: Whether an audit of equal copies says so.
        drifted: Whether one of copies that drifted does.
        copies: By difference: table, ranks, those that differ, and the first rows.
        text: The report.
        warnings: What the training logged.
    """

    equal: bool
    drifted: bool
    copies: list[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]
    text: str
    warnings: list[str]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.t = nn.Embedding(NUM_ROWS, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.t(ids).pow(2).sum()  # type: ignore[no-any-return]


class _Logged(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []
        logging.getLogger("headrace.streamer.copies").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def _audits(streamer: RawEmbeddingStreamer, drift: Any, logged: _Logged) -> Drift:
    equal = streamer.audit()
    drift()
    report = streamer.audit()
    copies = [(each.fqn, each.ranks, each.differing_ranks, each.differing_row_ids) for each in report.copies]
    return Drift(equal.is_equal and not equal.copies, report.is_equal, copies, str(report), logged.lines)


def drift_on_rank(rank: int, address: str) -> Drift:
    """Train with `DistributedDataParallel`, then call the module inside of it."""
    torch.manual_seed(0)
    ddp, logged = DistributedDataParallel(Net()), _Logged()
    optimizer = torch.optim.Adagrad(ddp.parameters(), lr=0.1)

    def train(model: Any, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(torch.arange(step % 7 + 1_000 + rank, NUM_ROWS, 2)).backward()
            optimizer.step()

    with RawEmbeddingStreamer(address, run="drift", model="drift") as streamer:
        streamer.attach(ddp, optimizer)
        train(ddp, range(1))
        return _audits(streamer, lambda: train(ddp.module, range(1, 16)), logged)


def drift_of_dtensor_on_rank(rank: int, address: str) -> Drift:
    """Spoil a row of a DTensor that two of four ranks hold, on one of them, behind torch's back."""
    torch.manual_seed(0)
    mesh, logged = init_device_mesh("cpu", (2, 2)), _Logged()
    net = Net()
    net.t.weight = nn.Parameter(distribute_tensor(net.t.weight.detach(), mesh, [Replicate(), Shard(0)]))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with RawEmbeddingStreamer(address, run="drift2", model="drift2") as streamer:
        streamer.attach(net, optimizer)
        weight: Any = net.t.weight

        def spoil() -> None:
            if rank == 3:
                assert isinstance(weight, DTensor)
                weight._local_tensor.detach().numpy()[7, 1] += 1

        return _audits(streamer, spoil, logged)


def thaw_on_rank(rank: int, address: str) -> tuple[list[str], bool]:
    """Unfreeze a table that several ranks have; return what is not streamed, and whether the audit is equal."""
    torch.manual_seed(0)
    net = nn.ModuleDict({"a": Net(), "b": Net()})
    net["b"].requires_grad_(False)
    ddp = DistributedDataParallel(net["a"])
    net["a"] = ddp
    optimizer = torch.optim.SGD([p for p in net.parameters()], lr=0.1)
    with RawEmbeddingStreamer(address, run="thaw", model="thaw", on_error="log") as streamer:
        streamer.attach(net, optimizer)
        net["b"].requires_grad_(True)
        optimizer.zero_grad()
        (net["a"](torch.tensor([rank])) + net["b"](torch.tensor([rank]))).backward()
        optimizer.step()
        report = streamer.audit()
        streamer.close(flush=False)
        return [*report.unstreamed], report.is_equal
