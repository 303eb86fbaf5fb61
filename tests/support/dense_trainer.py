"""A trainer of dense tensors and one table, made by hand: it says hello to all shards and publishes whole steps."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of
from torch import nn

from headrace.kernels.dtypes import DTYPES, TORCH_DTYPES
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.table_names import path_of, table_name
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

__all__ = ["NUM_ROWS", "DenseTrainer", "ModelTrainer", "dense_delta", "dense_specs", "table_spec", "tensor_of"]

NUM_ROWS, DIM = 20, 4
# Several rows, one short row, a single element, and elements that numpy lacks.
_SHAPES: dict[str, tuple[tuple[int, ...], DType]] = {
    "fc.weight": ((50, 60), DType.FLOAT32),
    "fc.bias": ((50,), DType.BFLOAT16),
    "norm.num_batches_tracked": ((), DType.INT64),
    "mask": ((3, 5), DType.BOOL),
}


def dense_specs(
    model: str = "ctr", *, shapes: Mapping[str, tuple[tuple[int, ...], DType]] = _SHAPES, state: str | None = None
) -> list[TableSpec]:
    """Return the specs of a model's dense tensors, with one optimizer state or none."""
    states = () if state is None else (StateSpec(name=state, kind=StateKind.POINTWISE, dtype=DType.FLOAT32),)
    return [
        TableSpec.of_tensor(table_name(model, path), shape, dtype, states=states)
        for path, (shape, dtype) in shapes.items()
    ]


def table_spec(model: str = "ctr") -> TableSpec:
    """Return the spec of the model's embedding table."""
    return TableSpec(fqn=table_name(model, "user.weight"), num_rows=NUM_ROWS, dim=DIM, dtype=DType.FLOAT32)


def tensor_of(spec: TableSpec, step: int) -> torch.Tensor:
    """Return a dense tensor as it is at a step: its elements tell their place, the step and the tensor."""
    numbers = (torch.arange(spec.num_elements) + 7 * step + len(path_of(spec.fqn))) % 251
    assert spec.shape is not None
    return (numbers % 2 if spec.dtype is DType.BOOL else numbers).to(TORCH_DTYPES[spec.dtype]).reshape(spec.shape)


def _rows_of(spec: TableSpec, tensor: torch.Tensor) -> npt.NDArray[Any]:
    values = tensor.detach().reshape(-1)
    bits = (values.view(torch.int16) if values.dtype is torch.bfloat16 else values).numpy().view(spec.dtype.numpy)
    rows = np.zeros(spec.num_rows * spec.dim, spec.dtype.numpy)
    rows[: bits.size] = bits
    return rows.reshape(spec.num_rows, spec.dim)


def dense_delta(spec: TableSpec, step: int, row_ids: Sequence[int] | npt.NDArray[np.int64]) -> Any:
    """Return the delta of some rows of a dense tensor, or of the table: its rows are the step."""
    ids = np.asarray(row_ids, np.int64)
    if not spec.is_dense:
        return delta_of(spec, ids, float(step))
    return delta_of(spec, ids, _rows_of(spec, tensor_of(spec, step))[ids], states=float(step))


class DenseTrainer:
    """Publishes steps to a running server over connections of its own; used on one thread."""

    def __init__(
        self,
        address: str,
        *,
        model: str = "ctr",
        run: str = "run",
        epoch: int = 1,
        specs: list[TableSpec] | None = None,
        tables: list[TableSpec] | None = None,
        takes_over: bool = False,
    ) -> None:
        """Say hello to each shard, naming the table and all dense tensors."""
        self.specs = dense_specs(model) if specs is None else specs
        self.tables = [table_spec(model)] if tables is None else tables
        self.epoch = epoch
        self._run = run
        self._seqs: list[int] = []
        self._runner = asyncio.Runner()
        self._clients = self._runner.run(self._connect(address, takes_over))

    async def _connect(self, address: str, takes_over: bool) -> list[ParamServerClient]:
        async with await EmbeddingReader.connect(address) as reader:
            places = [link.address.rpartition(":") for link in reader.links]
        clients = [await ParamServerClient.connect(host, int(port)) for host, _, port in places]
        hello = hello_of_writer(
            *self.tables, *self.specs, run=self._run, epoch=self.epoch, takes_over=takes_over or None
        )
        for client in clients:
            self._seqs.append((await client.hello(hello)).last_client_seq)
        return clients

    def publish(self, step: int, *, shards: Iterable[int] | None = None) -> None:
        """Write the table and all dense tensors as they are at a step, and end it; on some shards only."""
        for shard in range(len(self._clients)) if shards is None else shards:
            self.send(shard, step, [*self.tables, *self.specs], ends_step=True)

    def train(self, step: int) -> None:
        """Write the table alone, without an exact cut, as between two dense steps."""
        for shard in range(len(self._clients)):
            self.send(shard, step, self.tables, ends_step=True, is_exact_cut=False)

    def send(
        self, shard: int, step: int, specs: Iterable[TableSpec], *, ends_step: bool = False, **changes: Any
    ) -> None:
        """Write the rows of some tables that live on a shard."""
        deltas = []
        for spec in specs:
            ids = np.arange(spec.num_rows)
            ids = ids[shards_of_rows(table_seed(spec.fqn), ids, len(self._clients)) == shard]
            deltas.append(self._delta(spec, step, ids))
        self._seqs[shard] += 1
        fields = {"run": self._run, "epoch": self.epoch, "step": step, "time_us": step * 1000}
        request = request_of(*deltas, client_seq=self._seqs[shard], ends_step=ends_step, **(fields | changes))
        self._runner.run(self._clients[shard].set_embeddings(request))

    def _delta(self, spec: TableSpec, step: int, row_ids: npt.NDArray[np.int64]) -> Any:
        return dense_delta(spec, step, row_ids)

    def tensors(self, step: int) -> dict[str, torch.Tensor]:
        """Return the dense tensors at a step, by path."""
        return {path_of(spec.fqn): tensor_of(spec, step) for spec in self.specs}

    def close(self) -> None:
        """Close the connections, in the middle of a step or not; idempotent."""
        for client in self._clients:
            self._runner.run(client.close())
        self._clients = []
        self._runner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ModelTrainer(DenseTrainer):
    """Publishes a model as it is: the weights of `nn.Embedding` and `nn.EmbeddingBag` as tables, the rest as dense."""

    def __init__(self, address: str, module: nn.Module, *, model: str = "ctr", **settings: Any) -> None:
        """Name all that is in the model's `state_dict`."""
        self.module = module
        embeddings = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)}
        self._values: dict[str, torch.Tensor] = {}
        tables, specs = [], []
        for path, tensor in module.state_dict(keep_vars=True).items():
            if not tensor.numel() or any(tensor is known for known in self._values.values()):
                continue  # of tied ones, the first path counts
            name, dtype = table_name(model, path), DTYPES[tensor.dtype]
            self._values[name] = tensor
            if id(tensor) in embeddings:
                num_rows, dim = tensor.shape
                tables.append(TableSpec(fqn=name, num_rows=num_rows, dim=dim, dtype=dtype))
            else:
                specs.append(TableSpec.of_tensor(name, tensor.shape, dtype))
        super().__init__(address, model=model, tables=tables, specs=specs, **settings)

    def _delta(self, spec: TableSpec, step: int, row_ids: npt.NDArray[np.int64]) -> Any:
        tensor = self._values[spec.fqn].detach()
        rows = _rows_of(spec, tensor) if spec.is_dense else tensor.numpy()
        return delta_of(spec, row_ids, rows[row_ids])
