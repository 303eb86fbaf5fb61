"""Audits of real models against a real server: equal after training, and any changed row is named."""

from __future__ import annotations

import pytest
import torch
from audited_training import audit_on_rank
from ranks import run_ranks
from torch import nn

from headrace.paramserver.shard.launch import ServerProcess
from headrace.streamer import RawEmbeddingStreamer


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.user = nn.Embedding(150_000, 7, sparse=True, dtype=dtype)
        self.item = nn.Embedding(300, 6, sparse=True, dtype=dtype)

    def forward(self, users: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
        return self.user(users).pow(2).sum() + self.item(items).pow(2).sum()


def train(model: Model, optimizer: torch.optim.Optimizer, seed: int, num_steps: int = 3) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        optimizer.zero_grad()
        users = torch.randint(0, 150_000, (500,), generator=generator)
        model(users, torch.randint(0, 300, (50,), generator=generator)).backward()
        optimizer.step()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_audit_after_training(server: ServerProcess, dtype: torch.dtype, request: pytest.FixtureRequest) -> None:
    """After training the digests are equal; a value changed behind the streamer's back is found, to the row."""
    torch.manual_seed(0)
    holder = nn.Module()
    name = f"m_{str(dtype).removeprefix('torch.')}"
    holder.add_module(name, Model(dtype))
    model: Model = holder.get_submodule(name)  # type: ignore[assignment]
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run=name) as streamer:
        streamer.attach(holder, optimizer, publish="updated")
        train(model, optimizer, seed=1)
        report = streamer.audit()
        assert report.is_equal, str(report)
        # A sum in Adagrad's state changes wherever there is a gradient.
        touched = [int((optimizer.state[p]["sum"] != 0).any(dim=1).sum()) for p in model.parameters()]
        assert [table.num_rows for table in report.tables] == touched
        assert all(count > 40 for count in touched)
        assert report.num_rows == sum(touched)
        assert [table.is_steady for table in report.tables] == [True, True]
        assert [table.absent.num_not_sent for table in report.tables] == [table.num_missing for table in report.tables]

        rows = (optimizer.state[model.user.weight]["sum"] != 0).any(dim=1).nonzero().flatten()
        row = int(rows[rows > 70_000][0])
        # Through numpy, so that torch does not notice and the row is not marked.
        weights = model.user.weight.detach().view(torch.uint8).numpy()
        weights[row, 3] ^= 1
        spoiled = streamer.audit()
        assert not spoiled.is_equal
        assert [table.differing_row_ids for table in spoiled.tables] == [[row], []]
        assert spoiled.tables[0].differing_buckets == [row // 65_536]
        assert f"rows {row}" in str(spoiled)
        weights[row, 3] ^= 1
        state = optimizer.state[model.item.weight]["sum"].view(torch.uint8).numpy()
        item = int((optimizer.state[model.item.weight]["sum"] != 0).any(dim=1).nonzero()[0])
        state[item, 0] ^= 1
        assert [table.differing_row_ids for table in streamer.audit().tables] == [[], [item]]
        state[item, 0] ^= 1


def test_an_audit_says_that_rows_may_be_of_a_run_before(server: ServerProcess) -> None:
    """A run that goes on over the rows of one before, by its user's word, is told why its audit fails."""
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = Model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with RawEmbeddingStreamer(server.address, run="anew") as streamer:
            streamer.attach(model, optimizer, publish="auto" if seed == 1 else "updated")
            train(model, optimizer, seed=seed)
            for _ in range(2):
                report = streamer.audit()
                assert report.is_equal == (seed == 1)
                assert ("before this run" in str(report)) == (seed == 2)
    assert "publish='all'" in str(report)
    assert repr(report).startswith(f"<AuditReport of step {report.step}, different:\n")


def test_audit_of_all_ranks(server: ServerProcess) -> None:
    """Each rank answers for its own rows, every rank gets the report of all, and a fault of one is everybody's."""
    for parts, is_equal, differing in run_ranks(audit_on_rank, 2, server.address):
        assert is_equal
        assert [(rank, first) for rank, first, _ in parts] == [(0, 0), (1, 500)]
        assert all(num_rows > 100 for _, _, num_rows in parts)
        assert differing
        assert min(differing) >= 500
