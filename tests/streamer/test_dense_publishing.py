"""A streamer that publishes dense tensors: what its calls do with them, and what is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from dense_model import DenseModel, train_dense
from fake_shard import FakeStore
from streamed_training import FAST
from torch import nn
from torch_tables import hooks

from headrace.schemas.errors import ConfigError, NonFiniteError, UnknownTableError, UnsupportedModelError
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.flush.dense_schedule import Readiness


class TwoAlike:
    """Rank 0 of two, of which the other says the same.

    Attributes:
        said: What was exchanged, in order.
    """

    rank, size = 0, 2

    def __init__(self) -> None:
        self.said: list[list[int]] = []

    def share(self, value: Any) -> Any:
        return value

    def gather(self, value: Any) -> list[Any]:
        return [value, value]

    def exchange(self, values: Sequence[int]) -> list[list[int]]:
        self.said.append(list(values))
        return [list(values), list(values)]


def publishing(store: FakeStore, **settings: Any) -> tuple[RawEmbeddingStreamer, DenseModel, torch.optim.Optimizer]:
    """Return a streamer, its model with a table and dense tensors, and its optimizer."""
    model = DenseModel(dtypes=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streamer = RawEmbeddingStreamer(store.address, run="test", **{**FAST, **settings})
    streamer.attach(model, optimizer, dense=True, publish="updated")
    return streamer, model, optimizer


def stored(store: FakeStore, fqn: str) -> bytes:
    """Return the weights of all rows of a table in the store."""
    rows = {row: columns for shard in store.shards for row, columns in shard.rows.get(fqn, {}).items()}
    return b"".join(next(iter(rows[row].values())).weights for row in sorted(rows))


def test_only_tables_have_rows_that_can_be_named(store: FakeStore) -> None:
    """`tables` has no dense tensor, audits leave them out, and `fetch` and `evict` say what they are."""
    streamer, model, optimizer = publishing(store)
    with streamer:
        train_dense(model, optimizer, range(3))
        assert [table.path for table in streamer.tables] == ["user.weight"]
        for call in (streamer.fetch, streamer.evict):
            with pytest.raises(UnknownTableError, match=r"'top\.weight' is a dense tensor, which goes out whole"):
                call("top.weight", [0])
        streamer.flush()
        stats = streamer.stats()
        assert (stats.dense_step, stats.acked_step) == (3, 3)
        assert stats.dense_bytes > sum(p.numel() * 4 for n, p in model.named_parameters() if n != "user.weight")
        assert stored(store, "top.weight") == model.top.weight.detach().numpy().tobytes()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dense_states": True}, "dense_states: there is nothing to publish states of"),
        ({"dense": ["tpo.weight"]}, r"'tpo\.weight'; the nearest are 'top\.weight'"),
        ({"tables": []}, "tables is empty"),
    ],
)
def test_refused_with_a_reason_and_no_hooks(store: FakeStore, settings: dict[str, Any], message: str) -> None:
    """Wrong arguments are one line, and leave the model as it was."""
    model = DenseModel(dtypes=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        with pytest.raises(ConfigError, match=message):
            streamer.attach(model, optimizer, **settings)
        assert not hooks(model, optimizer)
        streamer.attach(model, optimizer, dense=True, publish="updated")


def test_without_tables_it_takes_dense(store: FakeStore) -> None:
    """A model without tables is refused, unless its dense tensors are published; two of them share no name."""
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(store.address, run="test", **FAST) as streamer:
        with pytest.raises(UnsupportedModelError, match=r"no embedding table .* say dense=True"):
            streamer.attach(model, optimizer, publish="updated")
        streamer.attach(model, optimizer, dense=True, publish="updated")
        other = nn.Linear(3, 1)
        with pytest.raises(UnsupportedModelError, match="dense tensor 'weight' of another model is streamed already"):
            streamer.attach(other, torch.optim.SGD(other.parameters(), lr=0.1), dense=True, publish="updated")


def test_pauses_and_failures_are_told_to_other_ranks(store: FakeStore) -> None:
    """A rank that is paused, or whose streaming has ended, keeps telling the others that it publishes nothing."""
    world = TwoAlike()
    streamer, model, optimizer = publishing(
        store, world=world, dense_interval_s=0.0, non_finite="reject", on_error="log"
    )
    ready, absent = int(Readiness.IS_READY), int(Readiness.IS_ABSENT)
    try:
        train_dense(model, optimizer, [0])
        streamer.pause()
        train_dense(model, optimizer, [1])
        streamer.resume()
        assert [said for said, _ in world.said] == [ready, absent]
        streamer.flush()
        model.bottom[1].running_mean[0] = float("nan")  # a buffer, so it is rank 0's to publish
        train_dense(model, optimizer, [2, 3, 4])
        assert [said for said, _ in world.said[2:]] == [ready, absent, absent]
        with pytest.raises(NonFiniteError, match=r"dense tensor 'bottom\.1\.running_mean': it has NaN"):
            streamer.flush()
    finally:
        streamer.close(flush=False)
