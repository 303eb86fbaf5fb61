"""The trainer of the soak: a process that trains a small torch model whose rows say what they are, and streams it."""

from __future__ import annotations

import logging
import traceback
import warnings
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np
import numpy.typing as npt
import torch
from evicting_training import VirtualTap
from soak_rows import FREE, IDLE_STEPS, PAIR, STORED_TYPES, TABLES, encode_rows
from torch import nn
from trainer_tables import VirtualRows

from headrace.streamer import RawEmbeddingStreamer

__all__ = ["Settled", "run_trainer"]

_Ids = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]

_WAIT_S = 120.0
_STEP_PAUSE_S = 0.008
_WINDOW_ROWS, _WINDOW_STEPS = 300, 40
_VIRTUAL_PLACES = 300


@dataclass(frozen=True, kw_only=True)
class Settled:
    """What the trainer says once all is sent and durable.

    Attributes:
        epoch: Of its run.
        step: Its last one.
        num_updates: Updates of all tables that it has made.
        stamps: By fqn, the stamp of each row's last update, 0 for none.
        must: By fqn, rows that must be in the store.
        must_not: By fqn, rows that must not be.
        free_rows: By fqn, of `FREE`, all rows as they are stored, float32.
        is_equal: Whether its audit found the store's rows to be its own.
        audit: What it said.
    """

    epoch: int
    step: int
    num_updates: int
    stamps: dict[str, _Ids]
    must: dict[str, _Mask]
    must_not: dict[str, _Mask]
    free_rows: dict[str, npt.NDArray[np.float32]]
    is_equal: bool
    audit: str


def run_trainer(address: str, seed: int, commands: Connection) -> None:
    """Train until told to settle; the process's main function.

    Sends ("ready",), then for each "settle" ("settled", `Settled`), or ("failed", traceback).
    """
    warnings.simplefilter("ignore")  # of torch, about its own sparse gradients
    logging.getLogger("headrace").setLevel(logging.ERROR)  # that a server is away is meant
    try:
        trainer = _Trainer(address, seed)
        for _ in range(IDLE_STEPS):  # so that rows expire from the start
            trainer.step()
        trainer.streamer.flush(_WAIT_S)
        commands.send(("ready",))
        while not commands.poll(_STEP_PAUSE_S):
            trainer.step()
        assert commands.recv() == "settle"
        commands.send(("settled", trainer.settle()))
        trainer.streamer.close()
    except (Exception, KeyboardInterrupt):
        commands.send(("failed", traceback.format_exc()))


def _stored(weights: torch.Tensor, dtype: torch.dtype | None) -> npt.NDArray[np.float32]:
    """Return rows as they are after they were stored in a type, None for their own."""
    return (weights if dtype is None else weights.to(dtype).float()).numpy()


class _Trainer:
    def __init__(self, address: str, seed: int) -> None:
        torch.set_num_threads(1)
        self._random = np.random.default_rng(seed)
        tables = {fqn: table for fqn, table in TABLES.items() if not table.is_virtual}
        self._modules = {
            fqn: nn.Embedding(table.num_rows, table.dim, sparse=True, _weight=torch.zeros(table.num_rows, table.dim))
            for fqn, table in tables.items()
        }
        self._free = {fqn: nn.EmbeddingBag(*shape, mode="sum", sparse=True) for fqn, shape in FREE.items()}
        modules = self._modules | self._free
        model = nn.ModuleDict({fqn.partition(".")[0]: module for fqn, module in modules.items()})
        # With a rate of 1 and half the squared distance for a loss, a step takes a row to its target, exactly.
        self._to_targets = torch.optim.SGD([module.weight for module in self._modules.values()], lr=1.0)
        self._adagrad = torch.optim.Adagrad([bag.weight for bag in self._free.values()], lr=0.1)
        self._virtual = VirtualRows("virtual", _VIRTUAL_PLACES, TABLES["virtual"].dim)
        self.streamer = RawEmbeddingStreamer(
            address,
            run="soak",
            staging_bytes=4 << 20,
            retry_min_s=0.01,
            retry_max_s=0.2,
            connect_timeout_s=_WAIT_S,
        )
        self.streamer.attach(
            model,
            [self._adagrad, self._to_targets],
            publish="updated",
            weights_dtype=STORED_TYPES,
            states={fqn: fqn not in STORED_TYPES for fqn in modules},
        )
        self.streamer.attach_tap(lambda on_step: VirtualTap([self._virtual.tapped], on_step))
        self._stamp = self._num_updates = 0
        self._stamps = {fqn: np.zeros(table.num_rows, np.int64) for fqn, table in TABLES.items()}
        self._updated_at = {fqn: np.full(table.num_rows, -1, np.int64) for fqn, table in TABLES.items()}
        self._is_deleted = {fqn: np.zeros(table.num_rows, np.bool_) for fqn, table in TABLES.items()}

    def step(self) -> None:
        """Train one step of all tables."""
        self._stamp += 1
        self._evict()
        self._adagrad.zero_grad()
        for fqn, bag in self._free.items():
            ids = self._random.integers(0, FREE[fqn][0], (8, 3))
            (bag(torch.from_numpy(ids)) - 1).pow(2).mean().backward()
        self._adagrad.step()
        self._to_targets.zero_grad()
        loss = torch.zeros(())
        for fqn, numbers in self._choose().items():
            table = TABLES[fqn]
            rows = encode_rows(table, numbers, self._stamp)
            self._note(fqn, numbers)
            if table.is_virtual:
                for row_id, row in zip(table.ids_of(numbers).tolist(), torch.from_numpy(rows), strict=True):
                    self._virtual.update([row_id], row)
            else:
                distance = self._modules[fqn](torch.from_numpy(numbers)) - torch.from_numpy(rows)
                loss = loss + 0.5 * distance.pow(2).sum()
        loss.backward()
        self._to_targets.step()

    def settle(self) -> Settled:
        """End with a step behind everything, send all, and compare the store with the tables."""
        self.step()
        self.streamer.flush(_WAIT_S)
        report = self.streamer.audit(timeout_s=_WAIT_S)
        step = self.streamer.stats().step
        must, must_not = {}, {}
        for fqn, updated_at in self._updated_at.items():
            is_kept = (updated_at >= 0) & ~self._is_deleted[fqn]
            if fqn == "aging.weight":
                must_not[fqn] = updated_at < 0
                must[fqn] = is_kept & (updated_at > step - IDLE_STEPS)
            else:
                must[fqn], must_not[fqn] = is_kept, ~is_kept
        return Settled(
            epoch=self.streamer.epoch,
            step=step,
            num_updates=self._num_updates,
            stamps=self._stamps,
            must=must,
            must_not=must_not,
            free_rows={fqn: _stored(bag.weight.detach(), STORED_TYPES.get(fqn)) for fqn, bag in self._free.items()},
            is_equal=report.is_equal,
            audit=str(report),
        )

    def _choose(self) -> dict[str, _Ids]:
        """Return, by fqn, the numbers of the rows that this step updates."""

        def some(fqn: str, number: int, first: int = 0, end: int | None = None) -> _Ids:
            rows = np.arange(first, TABLES[fqn].num_rows if end is None else end)
            return np.sort(self._random.choice(rows, number, replace=False))

        counts = {"steady.weight": 16, "evicted.weight": 4, "halves.weight": 4}
        chosen = {fqn: some(fqn, count) for fqn, count in counts.items()}
        pair = some(PAIR[0], 8)
        chosen |= {fqn: pair for fqn in PAIR}
        # Aging rows are in use for a while, one window after the other; now and then an old one is used again.
        first = self._stamp // _WINDOW_STEPS * 50 % (TABLES["aging.weight"].num_rows - _WINDOW_ROWS)
        aging = some("aging.weight", 6, first, first + _WINDOW_ROWS)
        if self._random.random() < 0.2:
            aging = np.unique(np.append(aging, some("aging.weight", 2)))
        chosen["aging.weight"] = aging
        chosen["virtual"] = some("virtual", 4)
        return chosen

    def _evict(self) -> None:
        """Delete a few rows; of the virtual table as many as there are too many."""
        held = np.flatnonzero((self._stamps["virtual"] > 0) & ~self._is_deleted["virtual"])
        num_virtual = max(0, held.size - _VIRTUAL_PLACES + 20)
        going = {"evicted.weight": self._random.choice(500, 2, replace=False)}
        going["virtual"] = self._random.choice(held, num_virtual, replace=False)
        for fqn, numbers in going.items():
            numbers = np.sort(numbers).astype(np.int64)
            ids = TABLES[fqn].ids_of(numbers)
            self.streamer.evict(fqn, torch.from_numpy(ids))
            self._is_deleted[fqn][numbers] = True
            if TABLES[fqn].is_virtual:
                self._virtual.drop(ids.tolist())

    def _note(self, fqn: str, numbers: _Ids) -> None:
        self._stamps[fqn][numbers] = self._stamp
        self._updated_at[fqn][numbers] = self.streamer.stats().step
        self._is_deleted[fqn][numbers] = False
        self._num_updates += numbers.size
