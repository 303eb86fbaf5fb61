"""Plain tables of torch in one model, one for each pair of a placement and an optimizer, for `equality_matrix`.

A launch of ranks costs seconds, a table next to nothing.
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import itertools
import math
from typing import Any

import torch
import torch.distributed as dist
from replicated_training import PLACEMENTS, place_whole
from torch import nn
from whole_optimizers import Around, Decaying, Lion

from headrace.kernels.dtypes import bits_of

__all__ = ["WHOLE", "PlainTables", "go_on_with_plain_tables_on_rank", "optimizer_names", "optimizer_of"]

# Torch optimizers by a short name: the class, or its name in `torch.optim`, and its settings. The default eps is 0 in
# float16, and then 0 / 0 in rows without a gradient.
_OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "sgd": ("SGD", {}),
    "momentum": ("SGD", {"momentum": 0.9, "nesterov": True}),
    "adagrad": ("Adagrad", {"eps": 1e-4}),
    "adam": ("Adam", {"eps": 1e-4}),
    "amsgrad": ("AdamW", {"eps": 1e-4, "weight_decay": 0, "amsgrad": True}),
}
# Those that change every row, or are not known to change only some.
WHOLE: dict[str, tuple[Any, dict[str, Any]]] = {
    "decay": ("SGD", {"weight_decay": 0.01}),
    "adagrad-decay": ("Adagrad", {"eps": 1e-4, "weight_decay": 0.01}),
    "adam-decay": ("Adam", {"eps": 1e-4, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"eps": 1e-4, "weight_decay": 0.01}),
    "rmsprop": ("RMSprop", {"eps": 1e-2, "momentum": 0.9, "centered": True}),
    "nadam": ("NAdam", {"eps": 1e-4}),
    "radam": ("RAdam", {"eps": 1e-4}),
    "lion": (Lion, {}),
}
_ON_ONE_RANK: dict[str, tuple[Any, dict[str, Any]]] = {"derived": (Decaying, {"eps": 1e-4}), "wrapper": (Around, {})}
_SPARSE: dict[str, tuple[Any, dict[str, Any]]] = {"sparse-adam": ("SparseAdam", {})}
_SCALARS = {"step", "mu_product"}  # are no states of rows
_UNKNOWN = {"lion", *_ON_ONE_RANK}  # whose states are not streamed
_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "fp64": torch.float64}
# By the number of ranks: replicated, cut by `fully_shard`, and keys of `PLACEMENTS`.
_KINDS: dict[int, tuple[str, ...]] = {
    1: tuple(f"{kind}-{dtype}" for kind in ("dense", "sparse") for dtype in _DTYPES),
    2: ("ddp", "ddp-sparse", "fsdp", "S0", "S0-whole-gradient", "S1", "R"),
    4: ("ddp", "ddp-sparse", *(name for name, (shape, _) in PLACEMENTS.items() if math.prod(shape) == 4)),
}
_SIZES = ((101, 6), (57, 16), (7, 36))  # dims that are and are not multiples of 16 bytes, and a table of few rows
_BATCH = 6


def optimizer_names() -> list[str]:
    """Return short names of optimizers for dense gradients: torch's, and TorchRec's rowwise Adagrad if it is there."""
    return [*_OPTIMIZERS, *WHOLE, *(["rowwise"] if importlib.util.find_spec("torchrec") else [])]


def optimizer_of(name: str, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
    """Return one of `optimizer_names`, of some parameters."""
    if name == "rowwise":
        from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

        rowwise: torch.optim.Optimizer = RowWiseAdagrad(parameters, lr=0.1, eps=1e-4)
        return rowwise
    kind, settings = (_OPTIMIZERS | WHOLE | _ON_ONE_RANK | _SPARSE)[name]
    make: type[torch.optim.Optimizer] = getattr(torch.optim, kind) if isinstance(kind, str) else kind
    return make(parameters, lr=0.1, **settings)


def _cells(num_ranks: int, *, is_restored: bool) -> dict[str, tuple[str, str]]:
    """Return, by the table's name, all pairs of a kind and an optimizer that so many ranks can have."""
    dense = [name for name in optimizer_names() if not is_restored or name not in WHOLE]
    if num_ranks == 1 and not is_restored:
        dense += _ON_ONE_RANK
    return {
        f"{kind}_{name}": (kind, name)
        for kind in _KINDS[num_ranks]
        # DDP makes its buckets anew after a first step, which changes sums of more than two gradients.
        if not (is_restored and num_ranks > 2 and kind.startswith("ddp"))
        for name in (["sgd", "adagrad", *_SPARSE] if "sparse" in kind else dense)
        # Refused are rowwise states of columns, and a momentum that begins as a gradient that is placed otherwise.
        if not (name == "rowwise" and _is_by_columns(kind)) and (kind, name) != ("S0-whole-gradient", "momentum")
    }


def _is_by_columns(kind: str) -> bool:
    return any(word[0] != "R" and word[1] == "1" for word in PLACEMENTS.get(kind, ((), ""))[1].split())


def _loss(rows: torch.Tensor) -> torch.Tensor:
    return (rows.float() - 1).pow(2).sum() / 8


class _Group(nn.Module):
    """Tables of one kind, and their loss."""

    def __init__(self, tables: dict[str, nn.Module]) -> None:
        super().__init__()
        self.tables = nn.ModuleDict(tables)

    def forward(self, ids: dict[str, torch.Tensor]) -> torch.Tensor:
        return torch.stack([_loss(table(ids[name])) for name, table in self.tables.items()]).sum()


class PlainTables:
    """Trains all tables that some ranks can have.

    Replicas that torch makes equal get batches of their own on each rank. A DTensor gets the gradient of a table that
    is trained beside it, whole and alone on each rank: that one is what the store is compared with, for what torch puts
    together of strided shards is not right in every version.

    Attributes:
        model, optimizers: As `attach` takes them.
        touched: Rows in batches so far, by table.
        whole: Tables of which a step may change every row.
    """

    def __init__(self, run: str, *, is_blank: bool = False, is_restored: bool = False) -> None:
        torch.manual_seed(3)
        num_ranks = dist.get_world_size() if dist.is_initialized() else 1
        self._rank = dist.get_rank() if dist.is_initialized() else 0
        self._cells = _cells(num_ranks, is_restored=is_restored)
        self._tables = {name: self._table(kind, i) for i, (name, (kind, _)) in enumerate(self._cells.items())}
        if is_blank:
            for table in self._tables.values():
                nn.init.constant_(table.weight, 5)
        self._wholes: dict[str, torch.Tensor] = {}
        self._groups: dict[str, nn.Module] = {}
        root = nn.Module()
        for kind in dict.fromkeys(kind for kind, _ in self._cells.values()):
            group: nn.Module = _Group({n: table for n, table in self._tables.items() if self._cells[n][0] == kind})
            if kind.startswith("ddp"):
                group = nn.parallel.DistributedDataParallel(group)
            elif kind == "fsdp":
                from torch.distributed.fsdp import fully_shard

                fully_shard(group)
            elif num_ranks > 1:
                self._place(kind)
            root.add_module(kind, group)
            self._groups[kind] = group
        self.model = nn.Sequential()
        self.model.add_module(run, root)
        self._fqns = {name: f"{run}.{kind}.tables.{name}.weight" for name, (kind, _) in self._cells.items()}
        self._of = {name: optimizer_of(self._cells[name][1], [t.weight]) for name, t in self._tables.items()}
        self._beside = {name: optimizer_of(self._cells[name][1], [whole]) for name, whole in self._wholes.items()}
        self.optimizers = list(self._of.values())
        self.touched: dict[str, set[int]] = {fqn: set() for fqn in self._fqns.values()}
        self.whole = {self._fqns[name] for name, (_, of) in self._cells.items() if of in WHOLE | _ON_ONE_RANK}

    def _table(self, kind: str, index: int) -> Any:
        rows, dim = _SIZES[index % 3]
        dtype = _DTYPES.get(kind.split("-")[-1], torch.float32)
        if index % 3 == 2:
            return nn.Embedding(rows, dim, sparse="sparse" in kind, dtype=dtype)
        return nn.EmbeddingBag(rows, dim, mode="sum", sparse="sparse" in kind, dtype=dtype)

    def _place(self, kind: str) -> None:
        for name, table in self._tables.items():
            if self._cells[name][0] == kind:
                self._wholes[name] = table.weight.detach().clone().requires_grad_()
                table.weight = nn.Parameter(place_whole(table.weight.detach(), kind.removesuffix("-whole-gradient")))

    def train(self, step: int, *, is_idle: bool = False) -> float:
        """Train on the batch of a step and rank, which is empty in an idle one; return the loss of this rank's own."""
        for optimizer in itertools.chain(self.optimizers, self._beside.values()):
            optimizer.zero_grad()
        loss = torch.zeros(())
        own, shared = (self._batch(1000 * step + 1 + self._rank, is_idle), self._batch(1000 * step, is_idle))
        for kind, group in self._groups.items():
            if not any(name in self._wholes for name, (of, _) in self._cells.items() if of == kind):
                loss = loss + group(own)
        if loss.requires_grad:
            loss.backward()
        for name, whole in self._wholes.items():
            _loss(self._whole_rows(name, whole, shared[name])).backward()
            assert whole.grad is not None
            kind = self._cells[name][0]
            self._tables[name].weight.grad = place_whole(
                whole.grad.clone(), "R" if kind.endswith("-whole-gradient") else kind
            )
        for name, fqn in self._fqns.items():
            self.touched[fqn] |= set((shared if name in self._wholes else own)[name].flatten().tolist())
        for optimizer in itertools.chain(self.optimizers, self._beside.values()):
            optimizer.step()
        return float(loss.detach())

    def _whole_rows(self, name: str, whole: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        is_bag = isinstance(self._tables[name], nn.EmbeddingBag)
        look_up = functools.partial(nn.functional.embedding_bag, mode="sum") if is_bag else nn.functional.embedding
        return look_up(ids, whole)

    def _batch(self, seed: int, is_empty: bool) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(seed)
        size = 0 if is_empty else _BATCH
        return {
            name: (torch.rand(size, 2, generator=generator) ** 2 * table.num_embeddings).long()
            for name, table in self._tables.items()
        }

    def shards(self) -> dict[str, dict[str, list[tuple[int, int, torch.Tensor]]]]:
        """Return every table whole, in the form of `sharded_training.live_shards`; a call of all ranks."""
        found = {}
        for name, table in self._tables.items():
            kind, optimizer = self._cells[name]
            values, of = table.weight, self._of[name]
            if name in self._wholes:
                values, of = self._wholes[name], self._beside[name]
                placed = place_whole(values.detach(), kind.removesuffix("-whole-gradient"))
                assert torch.equal(table.weight.to_local(), placed.to_local()), name
            states = {} if optimizer in _UNKNOWN else of.state.get(values, {})
            found[self._fqns[name]] = {
                key: [(0, 0, _full(value))]
                for key, value in [("weights", values), *states.items()]
                if key not in _SCALARS
            }
        return found

    def take_wholes(self, other: PlainTables) -> None:
        """Train on what another trainer has trained beside its DTensors."""
        self._wholes, self._beside = copy.deepcopy((other._wholes, other._beside))

    def local_values(self) -> list[Any]:
        """Return this rank's part of all weights, states and scalars, in order."""
        values = [
            (name, key, value)
            for name, table in self._tables.items()
            for key, value in [("weights", table.weight), *sorted(self._of[name].state[table.weight].items())]
        ]
        return [(*where, bits_of(_local(value)).tobytes()) for *where, value in values]


def go_on_with_plain_tables_on_rank(rank: int, address: str, run: str) -> dict[str, Any]:
    """Stream a model, restore another one from it, and train both on; return losses and values of both."""
    from headrace import RawEmbeddingStreamer, restore

    endless, restored = PlainTables(run, is_restored=True), PlainTables(run, is_blank=True, is_restored=True)
    with RawEmbeddingStreamer(address, run=run, model=run) as streamer:
        streamer.attach(endless.model, endless.optimizers, publish="all")
        for step in range(4):
            endless.train(step)
        streamer.flush()
        dist.barrier()
    report = restore(restored.model, restored.optimizers, address, model_name=run)
    result: dict[str, Any] = {"report": report, "start": (restored.local_values(), endless.local_values())}
    restored.take_wholes(endless)
    result["losses"] = tuple([each.train(step) for step in range(4, 8)] for each in (restored, endless))
    return result | {"end": (restored.local_values(), endless.local_values())}


def _full(tensor: Any) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor  # type: ignore[no-any-return]


def _local(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else torch.as_tensor(tensor)
