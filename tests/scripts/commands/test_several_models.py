"""Commands on a server of several models."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import CommandLine
from safetensors.numpy import load_file
from stored_rows import read_rows

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import OwnedError
from headrace.streamer import RawEmbeddingStreamer

ROWS = range(30)


def _train(server: ServerProcess, model: str, run: str, *, ends: bool = True) -> np.ndarray:
    """Publish a bare embedding, and return its weights; the run ends, or is away."""
    embedding = torch.nn.Embedding(len(ROWS), 4)
    streamer = RawEmbeddingStreamer(server.address, run=run, model=model)
    try:
        streamer.attach(embedding, torch.optim.SGD(embedding.parameters(), lr=0.1), publish="all")
        streamer.flush()
    finally:
        streamer.close(flush=ends)
    return embedding.weight.detach().numpy()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path / "data", shards=2) as process:
        yield process


def _rows(server: ServerProcess, fqn: str) -> np.ndarray:
    return read_rows(server.address, fqn, ROWS).weights


def test_export_and_backfill_choose_by_model(server: ServerProcess, tmp_path: Path, run: CommandLine) -> None:
    """One model's export has the names of its `state_dict`, and comes back under the model that is named."""
    ctr, cvr = _train(server, "ctr", "a"), _train(server, "cvr", "b")
    both, one = tmp_path / "both.safetensors", tmp_path / "one.safetensors"
    export = ("export", "--server", server.address, "--format", "safetensors", "--now", "--to")
    run(*export, both)
    run(*export, one, "--model", "ctr")
    assert {name: values.tolist() for name, values in load_file(both).items()} == {
        "ctr:weight": ctr.tolist(),
        "cvr:weight": cvr.tolist(),
    }
    assert {name: values.tolist() for name, values in load_file(one).items()} == {"weight": ctr.tolist()}
    with ServerProcess.start(tmp_path / "other") as other:
        run("backfill", one, "--server", other.address, "--model", "new")
        run("backfill", both, "--server", other.address)
        for name, rows in (("new:weight", ctr), ("ctr:weight", ctr), ("cvr:weight", cvr)):
            assert np.array_equal(_rows(other, name), rows)
        text = run.refused("backfill", one, "--server", other.address)
        assert "several models have a table 'weight' (ctr, cvr, new): name one" in text
        assert "model 'a:b' is empty" in run.refused("backfill", one, "--server", other.address, "--model", "a:b")
    text = run.refused(*export, tmp_path / "none.safetensors", "--model", "cv")
    assert "the snapshot has no tables of model 'cv'" in text


def test_verify_chooses_by_model_and_path(server: ServerProcess, run: CommandLine) -> None:
    """A path means the table of every model; a model narrows it."""
    for model in ("ctr", "cvr"):
        _train(server, model, model)
    for choice, names in (
        (("--table", "weight"), ["ctr:weight", "cvr:weight"]),
        (("--model", "cvr"), ["cvr:weight"]),
        (("--table", "weight", "--model", "ctr"), ["ctr:weight"]),
    ):
        told = run.json("verify", "--server", server.address, *choice)
        assert [table["fqn"] for table in told["tables"]] == names


def test_a_refused_trainer_is_not_waited_for(server: ServerProcess, run: CommandLine) -> None:
    """A snapshot is at a step of the run that has one, though a trainer of a later epoch was refused."""
    _train(server, "ctr", "a", ends=False)
    with pytest.raises(OwnedError):
        _train(server, "ctr", "b", ends=False)
    taken = run.json("snapshot", "create", "--server", server.address, "--timeout-s", 30)
    assert (taken["epoch"], taken["step"]) == (1, 0)
