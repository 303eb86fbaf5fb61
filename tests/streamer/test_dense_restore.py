"""Dense parameters, buffers and their optimizer states, restored from a server or a snapshot, train on bit for bit."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from dense_model import DenseModel, train_dense
from dense_trainer import DenseTrainer, dense_specs, tensor_of
from safetensors.torch import load_file
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch_tables import assert_same_states

from headrace import RawEmbeddingStreamer, restore
from headrace.cli import main
from headrace.paramserver.reading import reader
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, SpecMismatchError, UnavailableError, UnsupportedModelError
from headrace.schemas.table_names import path_of
from headrace.streamer import StreamerConfig
from headrace.streamer.restore_source import restore_source

BEFORE, AFTER = range(4), range(4, 8)

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {}),
    "momentum": (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.01}),
    "adagrad": (torch.optim.Adagrad, {}),
    "adam": (torch.optim.Adam, {}),
    "adamw-fused": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
}


class Trainer:
    """A model with dense tensors of every kind and its optimizer, as a program builds them when it starts."""

    def __init__(self, kind: str = "adam", *, model: nn.Module | None = None, is_blank: bool = False) -> None:
        self.model = DenseModel() if model is None else model
        if is_blank:
            with torch.no_grad():
                for tensor in (*self.model.parameters(), *self.model.buffers()):
                    tensor.fill_(1)
        make, settings = OPTIMIZERS[kind]
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = make(trained, lr=0.01, **settings)  # type: ignore[call-arg]

    def stream(self, address: str, name: str, steps: Iterable[int] = BEFORE, **settings: Any) -> None:
        """Train and publish, flush and end."""
        with RawEmbeddingStreamer(address, run=name, model=name) as streamer:
            streamer.attach(
                self.model, self.optimizer, publish="all", **{"dense": True, "dense_states": True, **settings}
            )
            train_dense(self.model, self.optimizer, steps)


def assert_equal(ours: Trainer, theirs: Trainer) -> None:
    """Compare all parameters, buffers and optimizer states."""
    expected = theirs.model.state_dict()
    assert ours.model.state_dict().keys() == expected.keys()
    for name, value in ours.model.state_dict().items():
        assert torch.equal(value, expected[name]), name
    assert_same_states(ours.optimizer, theirs.optimizer)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_training_goes_on_as_if_it_had_never_stopped(server: ServerProcess, kind: str) -> None:
    """A new model gets every parameter, buffer, state and step count; then it trains as the old one does."""
    endless, restored = Trainer(kind), Trainer(kind, is_blank=True)
    endless.stream(server.address, f"dense-{kind}")
    report = restore(restored.model, restored.optimizer, server.address, model_name=f"dense-{kind}")
    assert_equal(restored, endless)
    for trainer in (restored, endless):
        train_dense(trainer.model, trainer.optimizer, AFTER)
    assert_equal(restored, endless)
    assert (report.step, report.dense.step, report.dense.without_states) == (len(BEFORE), len(BEFORE), ())
    assert {"bottom.0.weight", "bottom.1.num_batches_tracked", "of_bool", "frozen"} <= set(report.dense.tensors)
    assert f"dense: {len(report.dense.tensors)} tensors restored, step {len(BEFORE)}" in str(report)


def test_from_a_snapshot(tmp_path: Path) -> None:
    """A snapshot brings back one step, tables and dense tensors, though training has gone on since."""
    trained, at_cut, restored = Trainer(), Trainer(), Trainer(is_blank=True)
    with ServerProcess.start(tmp_path / "data", shards=3) as server:
        trained.stream(server.address, "a")
        assert main(["snapshot", "create", "--server", server.address, "--name", "one"]) == 0
        train_dense(at_cut.model, at_cut.optimizer, BEFORE)
        trained.stream(server.address, "a", AFTER)
    report = restore(restored.model, restored.optimizer, snapshot=tmp_path / "data", step=len(BEFORE))
    assert_equal(restored, at_cut)
    assert (report.epoch, report.dense.step) == (1, len(BEFORE))


def test_from_an_object_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL is fetched to the temporary directory, of which nothing stays; what is not there is one line."""
    (scratch := tmp_path / "scratch").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    trained, restored, url = Trainer(), Trainer(is_blank=True), f"file://{tmp_path}/bucket"
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        trained.stream(server.address, "a")
        assert main(["snapshot", "create", "--server", server.address, "--name", "one"]) == 0
    assert main(["snapshot", "upload", str(tmp_path / "data" / "snapshots" / "one"), url]) == 0
    (scratch / "others").touch()
    for step, text in ((3, "no snapshot is at step 3; there are one at step 4"), ("newest", "no snapshots")):
        with pytest.raises(ConfigError, match=text):
            place = url if step == 3 else f"file://{tmp_path}/empty"
            restore(restored.model, restored.optimizer, snapshot=place, step=step)  # type: ignore[arg-type]
    (model := DenseModel(dtypes=())).top = nn.Linear(16, 2)
    other = Trainer(model=model)
    with pytest.raises(SpecMismatchError, match=rf"does not fit the snapshot one of {url}, and nothing was changed"):
        restore(other.model, other.optimizer, snapshot=url)
    report = restore(restored.model, restored.optimizer, snapshot=url, step=len(BEFORE))
    assert_equal(restored, trained)
    assert report.step == report.dense.step == len(BEFORE)
    # As a rank on a machine that does not have rank 0's files.
    source = restore_source(None, url, None, StreamerConfig())
    folder = source.folder(dataclasses.replace(source.describe("newest"), folder=tmp_path / "elsewhere" / "one"))
    assert folder is not None and folder.parent.parent == scratch and (folder / "manifest.json").is_file()
    source.close()
    assert [path.name for path in scratch.iterdir()] == ["others"]


def test_an_export_is_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A model loads its parameters and buffers from an export; torch's checkpoint brings optimizer states too."""
    trained, loaded = Trainer("adam"), Trainer("adam", is_blank=True)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        trained.stream(server.address, "a")
        for name in ("safetensors", "dcp"):
            to = tmp_path / f"out.{name}"
            assert main(["export", "--server", server.address, "--to", str(to), "--format", name, "--with-states"]) == 0
        assert main(["backfill", str(tmp_path / "out.safetensors"), "--server", server.address]) == 0
        captured = capsys.readouterr()
        assert "a:user.weight: 60 rows written" in captured.out
        assert "left out, for a trainer to load and publish: dense tensors bottom.0.bias" in captured.err
        for arguments, text in (
            (["out.safetensors", "--table", "top.weight"], "a dense tensor in"),
            (["model.pt", "--zero-states", "--table", "top.weight"], "would be 'a:top.weight', a dense tensor"),
        ):
            torch.save(trained.model.state_dict(), tmp_path / "model.pt")
            assert main(["backfill", str(tmp_path / arguments[0]), "--server", server.address, *arguments[1:]]) == 1
            assert text in capsys.readouterr().err
        # A checkpoint has the dense tensors too: the server's stay as they are.
        assert main(["backfill", str(tmp_path / "model.pt"), "--server", server.address, "--zero-states"]) == 0
        assert "a:user.weight: 60 rows written" in capsys.readouterr().out
    found = load_file(tmp_path / "out.safetensors")
    missing = loaded.model.load_state_dict(found, strict=False).missing_keys
    assert sorted(missing) == ["nothing", "tied.weight"]  # no elements; and the name of another's weight
    for name, value in loaded.model.state_dict().items():
        assert torch.equal(value, trained.model.state_dict()[name]), name
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    loaded = Trainer("adam", is_blank=True)
    wanted = get_optimizer_state_dict(loaded.model, loaded.optimizer, options=options)
    of_dense = {name: value for name, value in wanted.items() if name.startswith(("state.top.", "state.bottom."))}
    assert "state.top.weight.step" in of_dense
    checkpoint.load(of_dense, checkpoint_id=str(tmp_path / "out.dcp"), no_dist=True)
    set_optimizer_state_dict(loaded.model, loaded.optimizer, {**wanted, **of_dense}, options=options)
    states = _states_of_top(loaded)
    assert states["step"] == len(BEFORE)
    assert all(torch.equal(states[name], value) for name, value in _states_of_top(trained).items())


def _states_of_top(trainer: Trainer) -> dict[str, torch.Tensor]:
    states: dict[str, torch.Tensor] = trainer.optimizer.state[trainer.model.top.weight]  # type: ignore[union-attr]
    return states


def test_by_way_of_a_restored_server(tmp_path: Path) -> None:
    """Dense tensors come whole from a server that was made of a snapshot, or of a log."""
    trained = Trainer()
    with ServerProcess.start(tmp_path / "data", shards=3) as server:
        trained.stream(server.address, "a")
        assert main(["snapshot", "create", "--server", server.address, "--name", "one"]) == 0
    folder = str(tmp_path / "data" / "snapshots" / "one")
    assert main(["restore", folder, "--data", str(tmp_path / "of-snapshot"), "--shards", "2"]) == 0
    for path in [tmp_path / "data" / "snapshots", *(tmp_path / "data").glob("shard-*/store")]:
        shutil.rmtree(path)
    assert main(["restore", str(tmp_path / "data"), "--data", str(tmp_path / "of-log"), "--shards", "2"]) == 0
    for name in ("of-snapshot", "of-log"):
        restored = Trainer(is_blank=True)
        with ServerProcess.start(tmp_path / name, shards=2) as server:
            report = restore(restored.model, restored.optimizer, server.address, dense=True)
        assert_equal(restored, trained)
        assert report.dense.step == len(BEFORE)


def test_what_is_not_stored_is_reported(server: ServerProcess) -> None:
    """A store without a dense part, or with some of it, or without states, restores what it has, unless asked."""
    trained = Trainer()
    trained.stream(server.address, "none", dense=False, dense_states=False)
    restored = Trainer(is_blank=True)
    report = restore(restored.model, restored.optimizer, server.address, model_name="none")
    assert report.dense.tensors == () and "top.weight" in report.dense.kept
    assert "tensors are not stored and keep their values" in str(report)
    assert (restored.model.top.weight == 1).all()  # type: ignore[union-attr]
    with pytest.raises(SpecMismatchError, match=r"dense tensor 'bottom.0.bias' is not stored"):
        restore(restored.model, restored.optimizer, server.address, model_name="none", dense=True)
    trained.stream(server.address, "some", dense=["top.*"], dense_states=False)
    report = restore(restored.model, restored.optimizer, server.address, model_name="some")
    assert (report.dense.tensors, report.dense.without_states) == (("top.bias", "top.weight"),) * 2
    assert "without optimizer states: top.bias, top.weight" in str(report)
    assert not restored.optimizer.state.get(restored.model.top.weight)  # type: ignore[union-attr]
    report = restore(restored.model, restored.optimizer, server.address, model_name="some", dense=False)
    assert (report.dense.tensors, report.dense.kept) == ((), ())


def test_another_architecture_is_refused_before_anything_changes(server: ServerProcess) -> None:
    """One error names every tensor that is missing or differs; without `strict` these stay as they are."""
    Trainer().stream(server.address, "architecture")
    model = DenseModel(dtypes=())
    model.top = nn.Linear(16, 2)
    model.frozen = nn.Parameter(torch.randn(5, dtype=torch.float64), requires_grad=False)
    other = Trainer(model=model)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(SpecMismatchError) as error:
        restore(model, other.optimizer, server.address, model_name="architecture")
    for part in (
        "dense tensor 'top.weight' differs (model ≠ stored): shape [2, 16] ≠ [1, 16]",
        "dense tensor 'top.bias' differs (model ≠ stored): shape [2] ≠ [1]",
        "dense tensor 'frozen' differs (model ≠ stored): dtype FLOAT64 ≠ FLOAT32",
        "or pass strict=False",
    ):
        assert part in str(error.value)
    assert "'bottom" not in str(error.value) and "of_int8" not in str(error.value)  # the model has left that behind
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    report = restore(model, other.optimizer, server.address, model_name="architecture", strict=False)
    assert report.skipped.keys() == {"top.weight", "top.bias", "frozen"} and "bottom.0.weight" in report.dense.tensors
    model.renamed = nn.Parameter(torch.ones(3))
    with pytest.raises(
        SpecMismatchError, match="'renamed' is not stored, and the model lacks others that are: of_bfloat16"
    ):
        restore(model, other.optimizer, server.address, model_name="architecture")
    other = Trainer("adagrad")
    with pytest.raises(SpecMismatchError, match=r"'top.bias' differs .*states \[sum:FLOAT32\] ≠ \[exp_avg:FLOAT32"):
        restore(other.model, other.optimizer, server.address, model_name="architecture")
    report = restore(other.model, other.optimizer, server.address, model_name="architecture", states=False)
    assert report.dense.without_states == () and "top.weight" in report.dense.tensors


class Plain(nn.Module):
    """The dense tensors of `DenseTrainer`, and no table."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(60, 50)
        self.fc.bias = nn.Parameter(torch.zeros(50, dtype=torch.bfloat16))
        self.norm = nn.Module()
        self.norm.register_buffer("num_batches_tracked", torch.tensor(0))
        self.register_buffer("mask", torch.zeros(3, 5, dtype=torch.bool))


class _TwoPauses:
    """No pause between reads, and after two of them the deadline, however long the reads took."""

    def __init__(self, **_: object) -> None:
        self._pauses = iter((0.0, 0.0))

    def next_s(self) -> float:
        if (pause_s := next(self._pauses, None)) is None:
            raise TimeoutError
        return pause_s


def test_rows_of_two_steps_are_never_mixed(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """While rows of two steps are there it asks again until its deadline; then the error names the steps."""
    model = Plain()
    with DenseTrainer(server.address, model="torn", run="torn") as trainer:
        trainer.publish(1)
        restore(model, None, server.address, model_name="torn")
        trainer.publish(2, shards=[0])
        with (
            monkeypatch.context() as patch,
            pytest.raises(UnavailableError, match=r"not of one step .*step 1 of epoch .*step 2 of epoch"),
        ):
            patch.setattr(reader, "Backoff", _TwoPauses)
            restore(model, None, server.address, model_name="torn")
        for spec in dense_specs("torn"):
            assert torch.equal(model.state_dict()[path_of(spec.fqn)], tensor_of(spec, 1))
        trainer.publish(2, shards=[1])
        report = restore(model, None, server.address)
    assert {spec.fqn for spec in dense_specs("torn")} == {f"torn:{path}" for path in report.dense.tensors}
    assert (report.tables, report.step) == ((), 2)


def test_a_model_of_which_nothing_is_stored(server: ServerProcess) -> None:
    """Without tables and without a dense part there is nothing to restore."""
    with pytest.raises(UnsupportedModelError, match=r"has no dense tensors of model 'nobody'"):
        restore(Plain(), None, server.address, model_name="nobody")
    with pytest.raises(ConfigError, match="model 'a:b'"):
        restore(Plain(), None, server.address, model_name="a:b")
