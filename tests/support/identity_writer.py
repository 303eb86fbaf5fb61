"""A writer of one table with identities, to all shards of a server: one call is one step."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

import numpy as np
from hellos import hello_of_writer
from set_embeddings import delta_of, request_of

from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.tables import RUNTIME_META, DType, StateKind, StateSpec, TableSpec

__all__ = ["IdentityWriter", "identity_spec", "weights_of"]


def identity_spec(fqn: str = "users.weight", *, num_rows: int = 64) -> TableSpec:
    """Return the spec of the table that is written; its states and runtime meta are the step of the write."""
    sums = StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1)
    meta = StateSpec(name=RUNTIME_META, kind=StateKind.ROWWISE, dtype=DType.INT64, width=2)
    return TableSpec(fqn=fqn, num_rows=num_rows, dim=4, dtype=DType.FLOAT32, states=(sums, meta), has_identities=True)


def weights_of(row: int, identity: int, step: int) -> list[float]:
    """Return the weights of a row: they tell its identity and when it was written."""
    return [float(row), float(identity % 1000), float(step), 1.0]


class IdentityWriter:
    """Writes rows over connections of its own. Use it on one event loop."""

    def __init__(self, spec: TableSpec, clients: list[ParamServerClient]) -> None:
        """Made by `connect`."""
        self.spec = spec
        self.step = 0
        self._clients = clients

    @classmethod
    async def connect(cls, ports: Sequence[int], spec: TableSpec | None = None) -> IdentityWriter:
        """Say hello to each shard."""
        spec = spec or identity_spec()
        clients = [await ParamServerClient.connect("127.0.0.1", port) for port in ports]
        hello = hello_of_writer(spec)
        for client in clients:
            await client.hello(hello)
        return cls(spec, clients)

    async def write(self, identity_of: Mapping[int, int], *, deleted: Sequence[int] = ()) -> None:
        """Write rows with their identities, and delete some, as the next step."""
        self.step += 1
        await asyncio.gather(*(self._write(shard, identity_of, deleted) for shard in range(len(self._clients))))

    async def _write(self, shard: int, identity_of: Mapping[int, int], deleted: Sequence[int]) -> None:
        rows = self._of(shard, list(identity_of))
        values = [weights_of(row, identity_of[row], self.step) for row in rows.tolist()]
        delta = delta_of(
            self.spec,
            rows,
            values,
            states=self.step,
            identities=np.array([identity_of[row] for row in rows.tolist()], "<i8"),
            deleted_row_ids=self._of(shard, list(deleted)),
        )
        await self._clients[shard].set_embeddings(request_of(delta, client_seq=self.step, time_us=self.step * 1000))

    def _of(self, shard: int, rows: list[int]) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
        ids = np.array(rows, "<i8")
        return ids[shards_of_rows(table_seed(self.spec.fqn), ids, len(self._clients)) == shard]

    async def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            await client.close()
