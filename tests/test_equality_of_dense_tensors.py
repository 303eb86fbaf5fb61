"""After a flush, every dense tensor in the store equals the trainer's, bit for bit, with its optimizer's states.

Each case streams to a real server of two shards, reads the rows of every dense tensor and puts them together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from dense_model import DenseModel, tensor_from, train_dense
from dense_training import (
    dense_refusal_on_rank,
    lonely_flush_on_rank,
    lonely_record_on_rank,
    train_dense_on_rank,
    values_of,
)
from ranks import run_ranks
from restored_dense_training import WholeJob
from store_comparison import compare_with_store
from torch import nn
from waiting import wait_until

from headrace.kernels.dtypes import bits_of
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replica.api.embedding_replica import EmbeddingReplica
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import SpecMismatchError
from headrace.schemas.idl import idl
from headrace.schemas.tables import TableSpec
from headrace.streamer import RawEmbeddingStreamer

Columns = dict[str, npt.NDArray[Any]]


def stored(address: str, model: str) -> tuple[dict[str, Columns], dict[str, dict[str, float]]]:
    """Return by path the bits of each dense tensor of a model, whole, with its states; and its scalars."""

    async def read() -> tuple[dict[str, Columns], dict[str, dict[str, float]]]:
        columns: dict[str, Columns] = {}
        scalars: dict[str, dict[str, float]] = {}
        async with await EmbeddingReader.connect(address, model=model, timeout_s=60.0) as reader:
            for fqn, spec in reader.tables.items():
                if not spec.is_dense:
                    continue
                path = fqn.partition(":")[2]
                rows = await reader.get(fqn, np.arange(spec.num_rows), with_states=True, with_versions=True)
                assert (rows.presence == idl.RowPresence.PRESENT).all()
                assert len(set(rows.steps.tolist())) == 1
                columns[path] = {"weights": _bits(rows.weights, spec)}
                for state in spec.states:
                    of_state = TableSpec.of_tensor(state.name, spec.shape or (), state.dtype)
                    columns[path][state.name] = _bits(rows.states[state.name], of_state)
                scalars[path] = {name: float(value) for name, value in (await reader.scalars(fqn)).items()}
        return columns, scalars

    return asyncio.run(read())


def _bits(rows: npt.NDArray[Any], spec: TableSpec) -> npt.NDArray[Any]:
    return bits_of(tensor_from(np.ascontiguousarray(rows).tobytes(), spec))


def check_equal(found: dict[str, Columns], trained: dict[str, Columns]) -> None:
    assert found.keys() == trained.keys()
    for path, columns in trained.items():
        assert found[path].keys() == columns.keys(), path
        for name, values in columns.items():
            assert found[path][name].shape == values.shape, f"{path} {name}"
            assert found[path][name].tobytes() == np.ascontiguousarray(values).tobytes(), f"{path} {name}"


def dense_values(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Columns]:
    """Return what a `DenseModel` publishes."""
    tensors = dict(model.named_parameters()) | {
        name: tensor for name, tensor in model.named_buffers() if name in model.state_dict()
    }
    return values_of({n: t for n, t in tensors.items() if n != "user.weight" and t.numel()}, optimizer)


CASES: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True),
}


@pytest.mark.parametrize("case", CASES)
def test_dense_tensors_of_every_type(server: ServerProcess, case: str) -> None:
    """Parameters and buffers of all types arrive whole, with states and step counts; and so does the table."""
    model, name = DenseModel(), f"dense_{case}"
    optimizer = CASES[case](model.parameters())
    with RawEmbeddingStreamer(server.address, run=case, model=name) as streamer:
        streamer.attach(model, optimizer, publish="all", dense=True, dense_states=True)
        train_dense(model, optimizer, range(7))
        streamer.flush()
        comparison = compare_with_store(streamer.tables, server.address)
        assert comparison.is_equal, str(comparison)
        assert streamer.stats().dense_step == 7
        found, scalars = stored(server.address, name)
        check_equal(found, dense_values(model, optimizer))
        counted = {"step": 7.0} if case in ("adagrad", "adam") else {}
        assert scalars["top.weight"] == counted
        assert scalars["bottom.1.running_mean"] == {}
        # And again, over an earlier one.
        train_dense(model, optimizer, range(7, 9))
    check_equal(stored(server.address, name)[0], dense_values(model, optimizer))


def test_a_changed_dense_part_is_replaced(server: ServerProcess) -> None:
    """A start with other layers names all that differ and sends nothing; with publish="all" replicas get them whole."""

    def changed() -> tuple[DenseModel, torch.optim.Optimizer]:
        model = DenseModel(dtypes=())
        model.top = nn.Linear(16, 2)
        model.turned = nn.Parameter(torch.randn(3).half().float())
        model.renamed, model.frozen = model.frozen, None
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def stream(model: DenseModel, optimizer: torch.optim.Optimizer, publish: Any) -> None:
        with RawEmbeddingStreamer(server.address, run="relayered", model="relayered") as streamer:
            streamer.attach(model, optimizer, dense=True, publish=publish)
            train_dense(model, optimizer, range(2))
            assert streamer.audit().is_equal

    old = DenseModel(dtypes=())
    stream(old, torch.optim.SGD(old.parameters(), lr=0.1), "all")
    model, optimizer = changed()
    with EmbeddingReplica(server.address, model="relayered") as replica:
        served = replica.dense().tensors
        with pytest.raises(SpecMismatchError, match=r"3 dense tensors .*'relayered:turned'.*'relayered:top\.weight'"):
            stream(model, optimizer, "updated")
        assert served["top.weight"].shape == (1, 16)
        for _ in range(2):  # a second start finds nothing to replace
            stream(model, optimizer, "all")
            expected = dense_values(model, optimizer)
            found, _ = stored(server.address, "relayered")
            assert found.pop("frozen", None) is not None, "left behind, and shown to nobody"
            check_equal(found, expected)
            wait_until(lambda: torch.equal(replica.dense().tensors["top.weight"], model.top.weight.detach()))
            assert replica.dense().tensors.keys() == expected.keys()


def test_a_model_without_tables(server: ServerProcess) -> None:
    """With `tables=[]`, or where there is no table, the dense part goes out alone; without states by default."""
    model = nn.Sequential(nn.Linear(40, 50), nn.Linear(50, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with RawEmbeddingStreamer(server.address, run="alone", model="alone") as streamer:
        streamer.attach(model, optimizer, dense=["0.*", "1.weight"], publish="updated")
        model(torch.ones(1, 40)).sum().backward()
        optimizer.step()
    found, scalars = stored(server.address, "alone")
    assert found.keys() == {"0.weight", "0.bias", "1.weight"}
    check_equal(found, {path: {"weights": bits_of(model.state_dict()[path])} for path in found})
    assert not any(scalars.values())
    both = DenseModel(dtypes=())
    with RawEmbeddingStreamer(server.address, run="both", model="both") as streamer:
        streamer.attach(
            both,
            torch.optim.SGD(both.parameters(), lr=0.1),
            tables=[],
            dense=["top.*", "user.weight"],
            publish="updated",
        )
        assert streamer.tables == []
    assert stored(server.address, "both")[0].keys() == {"top.weight", "top.bias", "user.weight"}


@pytest.mark.parametrize("kind", ["ddp", "fsdp", pytest.param("dmp", marks=pytest.mark.torchrec)])
def test_dense_tensors_of_ranks(server: ServerProcess, kind: str) -> None:
    """On two ranks each tensor comes from one of them, both publish at the same steps, and all arrives whole."""
    shardings: dict[str, Any] = {"users": ("row_wise", {}), "shops": ("table_wise", {"rank": 1})}
    job = WholeJob(address=server.address, name=f"ranks-{kind}", kind=kind, shardings=shardings)
    first, second = run_ranks(train_dense_on_rank, 2, job)
    assert first["published"] == second["published"]
    assert first["published"] == [1, 2, 3, 4, 5, 6]
    assert first["dense_step"] == second["dense_step"] == 6
    assert first["dense_bytes"] and second["dense_bytes"]
    found, scalars = stored(server.address, job.name)
    check_equal(found, first["values"])
    assert not set(found) & {*first["tables"], *second["tables"]}
    trained = [path for path, columns in first["values"].items() if len(columns) > 1]
    assert trained
    assert all(scalars[path] == {"step": 6.0} for path in trained)
    for path in trained:  # of the buffers, rank 0's count
        assert all((first["values"][path][name] == second["values"][path][name]).all() for name in found[path])


@pytest.mark.parametrize(
    ("case", "messages"),
    [
        ("different", ["ranks 0 and 1 have different dense tensors"] * 2),
        ("unknown", ["rank 1 cannot publish tensors: dense: no dense tensor", "matches 'nowhere'"]),
        ("flattened", ["'layer._flat_param' is inside FullyShardedDataParallel"] * 2),
    ],
)
def test_refused_on_all_ranks(server: ServerProcess, case: str, messages: list[str]) -> None:
    """What ranks cannot publish together is refused with its reason, on every rank."""
    errors = run_ranks(dense_refusal_on_rank, 2, server.address, case)
    for error, message in zip(errors, messages, strict=True):
        assert message in error


def test_a_flush_of_one_rank_alone_ends(server: ServerProcess) -> None:
    """A flush of DTensors that another rank does not join ends in time and names it; the next one of both succeeds."""
    errors = run_ranks(lonely_flush_on_rank, 2, server.address)
    for found in errors:
        (message,) = found
        assert (
            "flush() at step 0 of run 'lonely' in epoch " in message and "rank 0 of 2 did not come in time" in message
        )


def test_ranks_that_read_tensors_together_record_a_step_together(server: ServerProcess, tmp_path: Path) -> None:
    """Or no rank does: if one does not come or cannot, no other reads alone, and their next flush is in order."""
    (first, told), (second, _) = run_ranks(lonely_record_on_rank, 2, server.address, str(tmp_path))
    assert first == [False, True, False]
    assert second == [True, False]
    assert "record() at step 1" in told[0] and "rank 1 of 2 did not come in time" in told[0]
    assert told[1:] == ["step 4 is not recorded: rank 1 cannot record it"]
