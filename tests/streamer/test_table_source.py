"""Tables that user code holds in a dictionary: streamed, audited and restarted, on a real server."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from store_comparison import compare_with_store
from stored_rows import read_rows
from thread_ranks import Ranks, ThreadRank

from headrace import RawEmbeddingStreamer, SourceRows
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import (
    ConfigError,
    HeadraceError,
    RequestError,
    RowRangeError,
    SpecMismatchError,
    UnsupportedModelError,
)
from headrace.schemas.idl import idl

DIM = 6
MISSING, PRESENT = int(idl.RowPresence.MISSING), int(idl.RowPresence.PRESENT)


class Dictionary:
    """A table of vectors, an accumulator of each element, and a counter of each row."""

    def __init__(self, dim: int = DIM) -> None:
        self.dim = dim
        self.rows: dict[int, torch.Tensor] = {}  # float32[2 × dim + 1]

    def row_ids(self) -> torch.Tensor:
        return torch.tensor(list(self.rows), dtype=torch.int64)

    def read(self, row_ids: torch.Tensor) -> SourceRows:
        held = [row for row in row_ids.tolist() if row in self.rows]
        rows = torch.stack([self.rows[row] for row in held]) if held else torch.empty(0, 2 * self.dim + 1)
        return SourceRows(
            is_held=torch.tensor([row in self.rows for row in row_ids.tolist()], dtype=torch.bool),
            weights=rows[:, : self.dim],
            states={"sum": rows[:, self.dim : -1], "count": rows[:, -1:]},
        )

    def train(self, rows: Any, value: float) -> None:
        for row in rows:
            self.rows[int(row)] = torch.arange(2 * self.dim + 1, dtype=torch.float32) * value + float(row) % 97


def _presence(server: ServerProcess, name: str, rows: list[int]) -> list[int]:
    found: list[int] = read_rows(server.address, name, rows).presence.tolist()
    return found


def test_rows_of_a_dictionary_equal_the_store(server: ServerProcess) -> None:
    """Rows with ids up to 2^62 come, change and go, with their states; audits read them, and find what differs."""
    source, generator = Dictionary(), np.random.default_rng(0)
    ids = generator.integers(0, 2**62, 300)
    with RawEmbeddingStreamer(server.address, run="dictionary") as streamer:
        items = streamer.attach_source("items", source)
        for step in range(20):
            rows = generator.choice(ids, 40, replace=False)
            source.train(rows, float(step))
            items.mark(rows)
            if gone := generator.choice(list(source.rows), 5, replace=False).tolist():
                for row in gone:
                    del source.rows[row]
                items.mark(gone)
            streamer.step()
        streamer.flush()
        comparison = compare_with_store(streamer.tables, server.address)
        assert comparison.is_equal and comparison.num_compared == len(source.rows) > 100, str(comparison)
        assert _presence(server, "items", gone) == [MISSING] * 5
        report = streamer.audit(only_present=False)
        assert report.is_equal and report.num_rows == len(source.rows), str(report)
        assert report.tables[0].digest
        row = next(iter(source.rows))
        source.train([row], -1.0)  # and says nothing
        report = streamer.audit(only_present=False)
        assert not report.is_equal and report.tables[0].differing_row_ids == [row]
        fetched = streamer.fetch("items", [row])
        assert torch.equal(fetched.weights[0], source.rows[row][:DIM])
        assert fetched.states["count"].shape == (1, 1)


def test_a_source_beside_a_model(server: ServerProcess) -> None:
    """The model ends the steps; what is marked goes out with them, and whole tables at first if that is asked for."""
    source, model = Dictionary(), torch.nn.Embedding(10, 4)
    source.train(range(7), 1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="beside") as streamer:
        streamer.attach(model, optimizer, publish="updated")
        items = streamer.attach_source("items2", source, publish="all")
        for row in (2**40, 3):
            source.train([row], 2.0)
            items.mark([row])
            model(torch.tensor([1])).sum().backward()
            optimizer.step()
        streamer.flush()
        assert streamer.stats().step == 2
        assert _presence(server, "items2", [*range(7), 2**40, 8]) == [PRESENT] * 8 + [MISSING]
        assert streamer.audit().is_equal


def test_a_run_that_goes_on_sends_all_rows(server: ServerProcess) -> None:
    """A checkpoint does not know which rows differ, so a resumed run sends those that are held."""
    source = Dictionary()
    source.train(range(20), 1.0)
    with RawEmbeddingStreamer(server.address, run="goes-on") as streamer:
        streamer.attach_source("items3", source, publish="all")
        streamer.flush()
        state = streamer.state_dict()
    source.train([5], 9.0)
    with RawEmbeddingStreamer(server.address, run="goes-on") as streamer:
        streamer.attach_source("items3", source)
        assert streamer.load_state_dict(state) == 20
        streamer.flush()
        assert streamer.audit(only_present=False).is_equal


def test_wrong_sources_are_refused(server: ServerProcess) -> None:
    """Shapes and types that are none of a table's, and ids that are none, each with a line that says so."""
    with RawEmbeddingStreamer(server.address, run="wrong") as streamer:
        for weights, states, match in (
            (torch.empty(0), {}, r"weights of shape \[0\]"),
            (torch.empty(0, 4, dtype=torch.complex64), {}, "complex64 cannot be streamed"),
            (torch.empty(0, 4), {"m": torch.empty(0, 3)}, r"state 'm' of shape \[0, 3\]"),
        ):
            source = Dictionary()
            rows = SourceRows(is_held=torch.empty(0, dtype=torch.bool), weights=weights, states=states)
            source.read = lambda _, rows=rows: rows  # type: ignore[method-assign]
            with pytest.raises(UnsupportedModelError, match=match):
                streamer.attach_source("wrong", source)
        source = Dictionary()
        items = streamer.attach_source("wrong", source)
        with pytest.raises(RowRangeError):
            items.mark([-1])
        with pytest.raises(RequestError):
            items.mark(torch.tensor([True, False]))
        assert "0 rows to send" in repr(items)
        source.train([3], 1.0)
        read = source.read
        source.read = lambda ids: SourceRows(is_held=torch.ones_like(ids), weights=read(ids).weights)  # type: ignore[method-assign]
        items.mark([3])
        with pytest.raises(UnsupportedModelError, match=r"asked for 1 rows, it gave torch\.int64"):
            streamer.flush()
        source.read = read  # type: ignore[method-assign]
        streamer.flush()
        assert _presence(server, "wrong", [3]) == [PRESENT]
        with pytest.raises(SpecMismatchError):
            RawEmbeddingStreamer(server.address, run="wrong2", takes_over=True).attach_source("wrong", Dictionary(4))


def test_an_attach_that_one_rank_cannot_make_fails_on_all(server: ServerProcess) -> None:
    """None waits for it, none attaches the table, and all stream another one afterwards."""
    with RawEmbeddingStreamer(server.address, run="apart") as streamer:
        streamer.attach_source("wide", Dictionary(9000))
        streamer.flush()

    def attach(world: ThreadRank) -> tuple[Exception, int]:
        staging_bytes = 64 << 10 if world.rank else 64 << 20
        with RawEmbeddingStreamer(server.address, run="apart", world=world, staging_bytes=staging_bytes) as streamer:
            with pytest.raises(HeadraceError) as refused:
                streamer.attach_source("wide", Dictionary(9000))
            streamer.attach_source("narrow", Dictionary())
            streamer.step()
            streamer.flush()
            return refused.value, len(streamer.tables)

    (first, num_first), (second, num_second) = Ranks(2).run(attach)
    assert "rank 1 cannot attach: staging_bytes" in str(first)
    assert isinstance(second, ConfigError)
    assert (num_first, num_second) == (1, 1)
