"""The matrix of equality: models of every kind, trained on ranks in every way, streamed, and compared row by row.

A row of the matrix says what trains and how; `pairwise` makes rows of axes, so that each two of their values meet.
`train_row_on_rank` runs on a rank (see `ranks`), `check_row` where the server is.
"""

from __future__ import annotations

import asyncio
import itertools
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from equality_tables import TABLES, batch_of, table_batched
from plain_tables import PlainTables, optimizer_names
from sharded_training import BAG_TABLES, Job, ShardedTables, copied, everywhere, whole_tables
from stored_rows import read_tables
from torch import nn
from torchrec_models import FUSED

from headrace.kernels.dtypes import bits_of
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.schemas.idl import idl

__all__ = ["LOOPS", "SENT", "Row", "assert_equal_columns", "cells_job", "check_row", "pairwise", "train_row_on_rank"]
__all__ += ["train_rows_on_rank"]

NUM_STEPS = 6
SENT: dict[str, dict[str, Any]] = {
    "rows": {},
    "a share": {"send_share": 0.3},
    "rounded": {"weights_dtype": torch.bfloat16},
    "all said": {"dirty": "all"},
}
LOOPS = ("steps", "idle steps", "flushes alone", "pause")


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the matrix.

    Attributes:
        tables: `torch`, `fbgemm`, `torchrec`, or `torchrec and dense`, whose dense part and data-parallel tables have
            optimizers of torch.
        ranks: How many train.
        publish: As for `attach`.
        sent: Key of `SENT`.
        loop: In `idle steps` some batches are empty on all ranks, in `flushes alone` rank 0 flushes amid training, in a
            `pause` nothing is sent for some steps.
    """

    tables: str
    ranks: int
    publish: str = "all"
    sent: str = "rows"
    loop: str = "steps"

    @property
    def name(self) -> str:
        """Of the run; unlike any other row's."""
        return f"{self.tables}-{self.ranks}-{self.publish}-{self.sent}-{self.loop}".replace(" ", "_")


def pairwise(
    axes: Mapping[str, Sequence[Any]], is_possible: Callable[..., bool], chosen: Iterable[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return rows, with a value of each axis, such that each two values that some possible row has meet in one.

    Rows that were chosen before come first.
    """
    rows = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    pairs = [frozenset(itertools.combinations(row.items(), 2)) for row in rows if is_possible(**row)]
    chosen = [{axis: row[axis] for axis in axes} for row in chosen]
    missing = set().union(*pairs).difference(*(itertools.combinations(row.items(), 2) for row in chosen))
    while missing:
        best = max(pairs, key=lambda of_row: len(of_row & missing))
        chosen.append(dict(itertools.chain.from_iterable(best)))
        missing -= best
    return [{axis: row[axis] for axis in axes} for row in chosen]


# By ranks, which are of nodes of two: the shardings of tables, and which of them are column-wise on one node.
_SHARDINGS: dict[int, dict[str, tuple[str, dict[str, Any]]]] = {
    1: {"table": ("table_wise", {"rank": 0}), "row": ("row_wise", {}), "column": ("column_wise", {"ranks": [0, 0]})},
    2: {
        "table": ("table_wise", {"rank": 1}),
        "row": ("row_wise", {}),
        "column": ("column_wise", {"ranks": [1, 0]}),
        "columns": ("column_wise", {"ranks": [1, 0, 1, 0]}),
    },
    3: {"row": ("row_wise", {}), "column": ("column_wise", {"ranks": [2, 0]})},
    4: {
        "row": ("row_wise", {}),
        "column": ("column_wise", {"ranks": [3, 1]}),
        "table-row": ("table_row_wise", {"host_index": 1}),
        "table-column": ("column_wise", {"ranks": [2, 2, 3, 3]}),
        "grid": ("grid_shard", {"host_indexes": [1, 0]}),
    },
}


def cells_job(
    run: str, ranks: int, optimizers: Sequence[str], data_parallel: Sequence[str] = (), *, turn: int = 0
) -> Job:
    """Return a job of tables for all pairs of a sharding of some ranks and a fused optimizer, and data-parallel ones.

    Tables have the same names and sizes on any number of ranks; with another turn they have other shardings.
    """
    shardings = _SHARDINGS[ranks]
    cells = {f"{place}-{name}": name for place in range(5) for name in optimizers}
    kinds = {name: list(shardings)[(int(name[0]) + turn) % len(shardings)] for name in cells}
    replicated = {f"all-{name}": ("data_parallel", {}) for name in data_parallel}
    return Job(
        run=run,
        module=run,
        shardings={
            **everywhere("row_wise", "shops", "users"),  # shops have fewer rows than ranks, so that a rank has none
            **{name: shardings[kind] for name, kind in kinds.items()},
            **replicated,
            "clicks": ("row_wise", {}) if turn % 2 else shardings["column"],
        },
        optimizers=cells
        | {f"all-{name}": f"torch-{name}" for name in data_parallel}
        | {"shops": "sgd", "users": "sgd"},
        # A grid's columns are enough for two nodes: TorchRec cuts them by 128.
        bag_tables=BAG_TABLES | dict.fromkeys(cells, (101, 256)) | dict.fromkeys(replicated, (101, 32)),
        table_column_wise=tuple(name for name, kind in kinds.items() if kind == "table-column"),
        has_dense_optimizer=bool(data_parallel),
    )


class _FusedTables:
    """Trains modules of FBGEMM with the fused optimizers of its CPU build; its Adam and others need a GPU."""

    def __init__(self, run: str) -> None:
        from fbgemm_gpu import split_table_batched_embeddings_ops_training as ops

        torch.manual_seed(3)
        rowwise = "EXACT_ROWWISE_ADAGRAD"
        cowclip = {"weight_decay": 0.1, "weight_decay_mode": ops.WeightDecayMode.COWCLIP}
        cowclip |= {"cowclip_regularization": ops.CowClipDefinition(lower_bound=0.01)}
        averages = ops.EmainplaceModeDefinition(step_ema=3, step_start=0, step_ema_coef=0.5)
        made = {
            f"{name}-{precision}": table_batched(name, precision)
            for name in ("EXACT_SGD", "EXACT_ADAGRAD", rowwise)
            for precision in ("FP32", "FP16")
        }
        made["cowclip"] = table_batched(rowwise, **cowclip)
        made["averages"] = table_batched("EMAINPLACE_ROWWISE_ADAGRAD", emainplace_mode=averages)
        self._modules = {name: tbe for name, (tbe, _) in made.items()}
        self._forward = {name: forward for name, (_, forward) in made.items()}
        self.model = nn.Sequential(OrderedDict({run: _Fused(self._modules, self._forward)}))
        self.optimizers: list[torch.optim.Optimizer] = []
        self._fqns = {name: [f"{run}.tables.{name}.{table}" for table, _, _ in TABLES] for name in made}
        self.touched: dict[str, set[int]] = {fqn: set() for fqns in self._fqns.values() for fqn in fqns}
        self.whole = {*self._fqns["averages"]}

    def train(self, step: int, *, is_idle: bool = False) -> float:
        batch = batch_of(torch.Generator().manual_seed(step))
        if is_idle:
            batch = {table: ids[:0] for table, ids in batch.items()}
        loss = self.model(batch)
        loss.backward()
        for fqns in self._fqns.values():
            for fqn, ids in zip(fqns, batch.values(), strict=True):
                self.touched[fqn] |= set(ids.flatten().tolist())
        return float(loss.detach())

    def shards(self) -> dict[str, dict[str, list[tuple[int, int, torch.Tensor]]]]:
        found = {}
        for name, tbe in self._modules.items():
            states = tbe.split_optimizer_states()
            for table, (fqn, weights) in enumerate(zip(self._fqns[name], tbe.split_embedding_weights(), strict=True)):
                columns = {"weights": weights}
                columns |= {f"state{i}": state for i, state in enumerate(states[table] if states else ())}
                found[fqn] = {key: [(0, 0, value)] for key, value in columns.items()}
        return found


class _Fused(nn.Module):
    """All modules, and their loss; a forward begins a step."""

    def __init__(self, tables: dict[str, nn.Module], forward: dict[str, Callable[..., torch.Tensor]]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(tables)
        self._forward = forward

    def forward(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([(of(batch) - 1).pow(2).sum() / 48 for of in self._forward.values()]).sum()


def trainer_of(row: Row) -> Any:
    """Return what trains the tables of a row, on this rank."""
    if row.tables == "torch":
        return PlainTables(row.name)
    if row.tables == "fbgemm":
        return _FusedTables(row.name)
    data_parallel = optimizer_names() if "dense" in row.tables else ()
    return ShardedTables(cells_job(row.name, row.ranks, (*FUSED, "averages"), data_parallel))


def train_row_on_rank(rank: int, address: str, row: Row) -> dict[str, Any]:
    """Train and stream on one rank; return its shards, its step, the rows it owns and those that it looked up."""
    from headrace.streamer import RawEmbeddingStreamer

    trainer, num_waiting = trainer_of(row), 0
    # Each step sends its rows, so that one that is missed is not sent by another step.
    with RawEmbeddingStreamer(address, run=row.name, freshness_s=0, max_cost_percent=100) as streamer:
        streamer.attach(trainer.model, trainer.optimizers or None, publish=row.publish, **SENT[row.sent])  # type: ignore[arg-type]
        for step in range(NUM_STEPS):
            if row.loop == "pause" and step in (2, 4):
                (streamer.pause if step == 2 else streamer.resume)()
            trainer.train(step, is_idle=row.loop == "idle steps" and step in (2, 3, 5))
            num_waiting = max(num_waiting, streamer.stats().num_waiting_rows)
            if row.loop == "flushes alone" and rank == 0 and step % 2 == 0:
                streamer.flush()
        streamer.flush()
        if row.ranks > 1:
            dist.barrier()
        parts = [(t.spec.fqn, t.row_offset, t.num_local_rows, t.shard.offset, t.shard.width) for t in streamer.tables]
        num_steps = streamer.stats().step
    return {
        "shards": copied(trainer.shards()),  # FBGEMM gives its weights out, which may be a write to all of them
        "step": num_steps,
        "parts": parts,
        "touched": trainer.touched,
        "whole": trainer.whole,
        "num_waiting": num_waiting,
    }


def train_rows_on_rank(rank: int, address: str, rows: list[Row]) -> list[dict[str, Any]]:
    """Train one row after the other; of one that fails return the `traceback`."""
    results = []
    for row in rows:
        try:
            results.append(train_row_on_rank(rank, address, row))
        except Exception:
            results.append({"traceback": traceback.format_exc()})
    return results


def check_row(address: str, row: Row, results: list[dict[str, Any]]) -> None:
    """Compare every row of the store with what the ranks have, and how many rows and steps they have sent."""
    trained = whole_tables(results)
    _check_owners(trained, results)
    _check_steps(address, row, results)
    assert row.sent != "a share" or any(result["num_waiting"] for result in results)
    for fqn, rows in read_tables(address, trained, with_states=True).items():
        columns, is_there = trained[fqn], rows.presence == idl.RowPresence.PRESENT
        if row.publish == "all" or row.sent == "all said" or fqn in results[0]["whole"]:
            assert is_there.all(), f"{fqn}: rows are missing"
        else:
            touched = set().union(*(result["touched"][fqn] for result in results))
            found = set(is_there.nonzero()[0].tolist())
            assert found == touched, (
                f"{fqn}: rows {touched - found} are missing, and {found - touched} have not changed"
            )
        assert_equal_columns(fqn, columns, rows, is_there, is_rounded=row.sent == "rounded")


def assert_equal_columns(
    fqn: str, columns: dict[str, npt.NDArray[Any]], rows: Any, is_there: Any = slice(None), *, is_rounded: bool = False
) -> None:
    """Compare weights and states bit by bit."""
    states = {name: values for name, values in columns.items() if name != "weights"}
    assert len(states) == len(rows.states), f"{fqn}: {list(states)} and {list(rows.states)}"
    weights = columns["weights"]
    if is_rounded and weights.dtype.itemsize > 2:
        weights = bits_of(torch.from_numpy(weights).bfloat16())
    # States have other names in FBGEMM and TorchRec than in the store, and their order.
    names = states if states.keys() == rows.states.keys() else rows.states
    pairs = {name: (values, rows.states[found]) for (name, values), found in zip(states.items(), names, strict=True)}
    pairs["weights"] = (weights, rows.weights)
    for name, (values, found) in pairs.items():
        assert not np.isnan(values).any(), f"{fqn} {name}"
        assert found.shape == values.shape, f"{fqn} {name}"
        different = (_bits(found[is_there]) != _bits(values[is_there])).any(axis=1).nonzero()[0]
        assert not different.size, f"{fqn} {name}: rows {different[:8].tolist()} of those that are there differ"


def _bits(values: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return np.ascontiguousarray(values).view(np.uint8).reshape(values.shape[0], -1)


def _check_owners(trained: dict[str, dict[str, Any]], results: list[dict[str, Any]]) -> None:
    """Every cell of every table is streamed by exactly one rank."""
    counts = {fqn: np.zeros(columns["weights"].shape, np.int64) for fqn, columns in trained.items()}
    for result in results:
        for fqn, row, num_rows, column, width in result["parts"]:
            counts[fqn][row : row + num_rows, column : column + width] += 1
    for fqn, count in counts.items():
        assert (count == 1).all(), fqn


def _check_steps(address: str, row: Row, results: list[dict[str, Any]]) -> None:
    """All ranks have counted the same steps, and every shard says so of each."""

    async def steps() -> list[list[int]]:
        async with await EmbeddingReader.connect(address) as reader:
            return [[c.step for c in shard.clients if c.run == row.name] for shard in await reader.status()]

    assert [result["step"] for result in results] == [NUM_STEPS] * row.ranks
    assert all(of_shard == [NUM_STEPS] * row.ranks for of_shard in asyncio.run(steps()))
