"""Commands of scripts about training that is streamed to a real server: models, checkpoints and what is stored."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from stored_rows import read_rows
from text_scripts import Script, runs
from torch import nn

from headrace import restore
from headrace.schemas.row_records import PRESENT
from headrace.streamer import RawEmbeddingStreamer

__all__ = ["ScriptedTraining", "run_on"]


class _Model(nn.Module):
    """Tables a and perhaps b, with Adagrad's sums; b may be frozen at first."""

    def __init__(self, *, seed: int, rows: int, tables: str, frozen: str) -> None:
        super().__init__()
        torch.manual_seed(seed)
        for name in tables:
            self.add_module(name, nn.Embedding(rows, 4).requires_grad_(name != frozen))
        self.optimizer = torch.optim.Adagrad([each for each in self.parameters() if each.requires_grad], lr=0.1)


class ScriptedTraining:
    """Trainers of one run and model after one another, each with a streamer; a script's names are its own.

    Table names are those of modules, without `.weight`.
    """

    def __init__(self, address: str, name: str, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
        self._address, self._name, self._folder, self._caplog = address, name, folder, caplog
        self._models: dict[str, _Model] = {}
        self._saved: dict[str, tuple[Any, Any, Any]] = {}
        self._streamers: list[RawEmbeddingStreamer] = []

    def end(self) -> None:
        """Close what the script has left open."""
        for streamer in self._streamers:
            streamer.close(flush=False)

    def model(self, name: str, rows: int = 40, *, seed: int = 1, tables: str = "a", frozen: str = "") -> None:
        """Make a model, and train it from now on."""
        self._model = self._models[name] = _Model(seed=seed, rows=rows, tables=tables, frozen=frozen)

    def use(self, name: str) -> None:
        """Train another model from now on."""
        self._model = self._models[name]

    def unfreeze(self, table: str) -> None:
        """Train a table that was frozen."""
        self.thaw(table)
        self.optimize(table)

    def freeze(self, table: str) -> None:
        self._model.get_submodule(table).requires_grad_(False)

    def thaw(self, table: str) -> None:
        self._model.get_submodule(table).requires_grad_(True)

    def optimize(self, table: str) -> None:
        """Give a table to the optimizer."""
        self._model.optimizer.add_param_group({"params": [*self._model.get_submodule(table).parameters()]})

    def grow(self, table: str, *, max_norm: float | None = None) -> None:
        """Add a table to the model."""
        self._model.add_module(table, nn.Embedding(50, 4, max_norm=max_norm))

    def same(self, table: str, name: str) -> None:
        """Give the model a table's rows of another one."""
        self._model.get_submodule(table).load_state_dict(self._models[name].get_submodule(table).state_dict())

    def write(self) -> None:
        """Write to the model's rows, with no hook."""
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.clamp_(-0.1, 0.1)

    def start(self, *, run: str = "", records: bool = False, **settings: Any) -> None:
        """Start a streamer."""
        settings |= {"recordings": str(self._folder)} if records else {}
        self._streamer = RawEmbeddingStreamer(self._address, run=self._name + run, model=self._name, **settings)
        self._streamers.append(self._streamer)

    def attach(self, *, dtype: str = "", **how: Any) -> None:
        how |= {"weights_dtype": getattr(torch, dtype)} if dtype else {}
        if "tables" in how:
            how["tables"] = [f"{each}.weight" for each in how["tables"].split(",")]
        self._streamer.attach(self._model, self._model.optimizer, **how)

    def train(self, rows: int | list[int], *, tables: str = "a") -> None:
        """Make a step that trains rows of some tables."""
        ids = torch.tensor(_listed(rows))
        self._model.optimizer.zero_grad()
        torch.stack([self._model.get_submodule(name)(ids).pow(2).sum() for name in tables]).sum().backward()
        self._model.optimizer.step()

    def step(self, number: int | None = None) -> None:
        self._streamer.step(number)

    def flush(self) -> None:
        self._streamer.flush()

    def pause(self) -> None:
        self._streamer.pause()

    def resume(self) -> None:
        self._streamer.resume()

    def close(self, *, flush: bool = True) -> None:
        self._streamer.close(flush=flush)

    def record(self) -> None:
        self._streamer.record(torch.tensor([1]), self._model.get_submodule("a"))

    def evict(self, rows: int | list[int]) -> str:
        return f"{self._streamer.evict('a.weight', _listed(rows))} rows"

    def restore(self) -> None:
        """Load the model from the server."""
        restore(self._model, self._model.optimizer, self._address, model_name=self._name)

    def save(self, name: str) -> str:
        """Make a checkpoint of model, optimizer and streamer, and tell whether all was sent by then."""
        state = json.loads(json.dumps(self._streamer.state_dict()))
        parts = self._model.state_dict(), self._model.optimizer.state_dict()
        self._saved[name] = (*copy.deepcopy(parts), state)
        return f"drained={state['is_drained']} evicted={[*state['evicted'].values()]}"

    def load(self, name: str, *, optimizer: bool = True) -> None:
        """Load a checkpoint's model, and perhaps its optimizer."""
        model, of_optimizer, _ = self._saved[name]
        self._model.load_state_dict(model)
        if optimizer:
            self._model.optimizer.load_state_dict(of_optimizer)

    def load_state(self, name: str, **changes: Any) -> str:
        """Go on from a checkpoint, of which some fields are changed, and tell how many rows are sent again."""
        if "server_ids" in changes:
            changes["server_ids"] = [*map(str, changes["server_ids"])]
        if "place" in changes:
            changes["places"] = [changes.pop("place")] * 2  # of both shards
        return f"{self._streamer.load_state_dict(self._saved[name][2] | changes)} rows to send"

    def names(self) -> str:
        """Tell which tables are streamed."""
        return " ".join(sorted(table.path.removesuffix(".weight") for table in self._streamer.tables))

    def dirty(self) -> str:
        return f"{self._streamer.stats().num_dirty_rows} rows to send"

    def at(self) -> str:
        return f"step {self._streamer.stats().step}"

    def audit(self, *, only_present: bool | None = None) -> str:
        """Tell whether trainer and store are equal, or where not."""
        report = self._streamer.audit(only_present=only_present)
        rows = f", {report.num_rows} rows"
        if report.is_equal:
            return f"equal{rows}"
        differing = sorted({row for table in report.tables for row in table.differing_row_ids})
        missing = sum(table.absent.num_lost for table in report.tables)
        parts = [f"differs in {runs(differing)}"] if differing else []
        parts += [f"lacks {missing} rows"] if missing else []
        unknown = sum(table.absent.num_maybe_deleted for table in report.tables)
        parts += [f"may lack {unknown} rows"] if unknown else []
        return " | ".join([*parts, *(f"{name} is not streamed" for name in report.unstreamed)]) + rows

    def stored(self, rows: int | list[int], *, table: str = "a") -> str:
        """Tell of rows which are the trainer's in the store, which are others, or missing."""
        ids = _listed(rows)
        found = read_rows(self._address, f"{self._name}:{table}.weight", ids)
        weights = torch.from_numpy(found.weights)
        ours = self._model.get_submodule(table).get_parameter("weight").detach()[ids]
        kinds: dict[str, list[int]] = {"equal": [], "other": [], "missing": []}
        for at, (row, presence) in enumerate(zip(ids, found.presence.tolist(), strict=True)):
            if presence == PRESENT:
                kinds["equal" if torch.equal(weights[at], ours[at]) else "other"].append(row)
            else:
                kinds["missing"].append(row)
        return " | ".join(f"{kind} {runs(of_kind)}" for kind, of_kind in kinds.items() if of_kind)

    def log(self) -> str:
        """Tell of warnings and errors since the last time."""
        ours = [each for each in self._caplog.records if each.name.startswith("headrace.")]
        self._caplog.clear()
        lines = [each.getMessage() for each in ours if each.levelno >= logging.WARNING]
        return "\n".join(lines).replace(self._name, "MODEL")


def run_on(address: str, script: Script, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Run a script on a server that it shares with others."""
    training = ScriptedTraining(address, f"{script.path.stem}-{script.line}", folder, caplog)
    try:
        script.run(training)
    finally:
        training.end()


def _listed(rows: int | Iterable[int]) -> list[int]:
    return [rows] if isinstance(rows, int) else list(rows)
