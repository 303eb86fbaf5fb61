"""Writers of every kind of table to the shards of a server in this process, while another one is built from it."""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from hellos import hello_of_nobody, hello_of_writer
from offline_snapshot import snapshot_of
from set_embeddings import delta_of, request_of

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.reshard.new_server import build_server
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.schemas.errors import UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.predecessors import Predecessor
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.tables import ColumnShard, DType, StateKind, StateSpec, TableSpec

__all__ = ["ADMIN", "ITEMS", "LAYOUTS", "WIDE", "Writers", "build", "free_port", "rows_of"]

ADMIN = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=15.0, role=idl.Role.ADMIN)
_SUM = StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1)
_EXP = StateSpec(name="exp", kind=StateKind.POINTWISE, dtype=DType.FLOAT16)
ITEMS = TableSpec(fqn="items.weight", num_rows=200, dim=4, dtype=DType.FLOAT32, states=(_SUM,))
WIDE = TableSpec(fqn="wide.weight", num_rows=0, dim=6, dtype=DType.FLOAT32, states=(_SUM, _EXP))
LAYOUTS = (WIDE.whole, ColumnShard(offset=0, width=2), ColumnShard(offset=2, width=4), ColumnShard(offset=1, width=3))
_KNOWN = TableSpec(fqn="known.weight", num_rows=0, dim=4, dtype=DType.BFLOAT16, has_identities=True)
_DENSE = TableSpec(fqn="over.bias", num_rows=2, dim=3, dtype=DType.FLOAT32, shape=(2, 3))


def free_port() -> int:
    """Return a port on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


async def build(ports: Sequence[int], target: Path, num_shards: int, port: int) -> Predecessor:
    """Build a server that will be at a port, from the one of which a shard is at each of some ports."""
    seeds = [("127.0.0.1", port) for port in ports]
    return await build_server(seeds, ADMIN, target, num_shards=num_shards, address=f"127.0.0.1:{port}")


def rows_of(data: Path, folder: Path) -> dict[str, dict[int, bytes]]:
    """Return the bytes of every row of a server that does not run, by table; `folder` gets a snapshot of it."""
    with SnapshotReader(snapshot_of(data, folder)) as reader:
        return {
            fqn: {
                row: record.tobytes()
                for ids, records in reader.rows(fqn)
                for row, record in zip(ids.tolist(), records, strict=True)
            }
            for fqn in sorted(reader.tables)
        }


class Writers:
    """Two ranks that write to all shards, and who drops tables. What they do follows from a seed.

    Attributes:
        num_acked: Batches.
    """

    def __init__(self, ports: Sequence[int], seed: int) -> None:
        """Use `connect`."""
        self.num_acked = 0
        self._random = random.Random(seed)
        self._ports = list(ports)
        self._epoch, self._step, self._items = 1, 0, ITEMS
        self._clients: list[list[ParamServerClient]] = []
        self._client_seqs: dict[tuple[int, int], int] = {}

    @classmethod
    async def connect(cls, ports: Sequence[int], seed: int) -> Self:
        """Say hello to each shard."""
        writers = cls(ports, seed)
        for _ in range(2):
            writers._clients.append([await ParamServerClient.connect("127.0.0.1", port) for port in ports])
        await writers._begin()
        return writers

    async def close(self) -> None:
        """Close the connections."""
        for client in [client for of_rank in self._clients for client in of_rank]:
            await client.close()

    async def some(self, number: int) -> None:
        """Make some steps."""
        for _ in range(number):
            await self._act()

    async def until(self, building: asyncio.Task[Any]) -> None:
        """Go on until the server takes nothing more, or the build ends."""
        while not building.done():
            try:
                await self._act()
            except UnavailableError:
                return
            await asyncio.sleep(0)

    async def end_step(self) -> int:
        """Let both ranks end one step, the only ones that write; later steps are above it. Return the step."""
        self._step += 10
        step = self._step
        for rank in range(2):
            await self._write(rank, step=step)
        self._step += 10
        return step

    async def reconnect(self, ports: Sequence[int]) -> None:
        """Go on where the shards are now, in a later epoch."""
        await self.close()
        self._ports = list(ports)
        self._clients = [[await ParamServerClient.connect("127.0.0.1", port) for port in ports] for _ in range(2)]
        await self.begin_anew()

    async def begin_anew(self) -> None:
        """Start again, in a later epoch."""
        self._epoch += 2
        self._client_seqs.clear()
        await self._begin()

    async def _begin(self, *, shards: Sequence[int] | None = None) -> None:
        """Say hello as both ranks, in the present epoch."""
        for rank, clients in enumerate(self._clients):
            for shard in range(len(self._ports)) if shards is None else shards:
                specs = (self._items, WIDE, _KNOWN, _DENSE)
                place = {"client": f"rank{rank}", "rank": rank, "world_size": 2}
                await clients[shard].hello(hello_of_writer(*specs, epoch=self._epoch, takes_over=True, **place))

    async def _act(self) -> None:
        kind = self._random.random()
        if kind < 0.05:
            await self._drop()
        elif kind < 0.1 and self._items.num_rows < 1000:
            await self._grow()
        else:
            await self._write(self._random.randrange(2))

    async def _write(self, rank: int, *, shards: Sequence[int] | None = None, step: int | None = None) -> None:
        """Write some rows of each table as a rank, in a step of which the other one is behind, or in this one."""
        self._step += self._random.randrange(2)
        step = max(self._step - 3 * rank, 0) if step is None else step
        wide = self._random.choice(LAYOUTS)
        deltas = []
        for spec, shard in ((self._items, None), (WIDE, wide), (_KNOWN, None), (_DENSE, None)):
            ids = np.array(self._random.sample(range(spec.num_rows or 150), 2 if spec.is_dense else 20), "<i8")
            some = ids[:0] if spec.is_dense else ids[: self._random.randrange(6)]
            deltas.append((spec, shard, ids[some.size :], some))
        for shard in range(len(self._ports)) if shards is None else shards:
            key = rank, shard
            self._client_seqs[key] = number = self._client_seqs.get(key, 0) + 1
            place = {"client": f"rank{rank}", "epoch": self._epoch, "step": step}
            request = request_of(*(self._delta(shard, *each) for each in deltas), client_seq=number, **place)
            await self._clients[rank][shard].set_embeddings(request)
            self.num_acked += 1

    def _delta(self, shard: int, spec: TableSpec, columns: ColumnShard | None, ids: Any, deleted: Any) -> Any:
        ids, deleted = self._home(spec, ids, shard), self._home(spec, deleted, shard)
        more: dict[str, Any] = {"deleted_row_ids": deleted} if deleted.size else {}
        if spec.has_identities:
            more["identities"] = ids * 1000 + self._step
        value = self._random.randrange(1000)
        return delta_of(spec, ids, value, states=value, shard=columns, **more)

    def _home(self, spec: TableSpec, ids: npt.NDArray[np.int64], shard: int) -> npt.NDArray[np.int64]:
        return ids[shards_of_rows(spec.seed, ids, len(self._ports)) == shard]

    async def _grow(self) -> None:
        """Give a table more rows, at one shard after the other, with writes in between."""
        self._items = TableSpec(**{**_fields(self._items), "num_rows": self._items.num_rows + 50})
        self._epoch += 1
        self._client_seqs.clear()
        for shard in range(len(self._ports)):
            await self._begin(shards=[shard])
            await self._write(0, shards=[shard])

    async def _drop(self) -> None:
        """Drop a table at one shard after the other, with writes of the old one in between; then make it anew."""
        name = self._random.choice([ITEMS.fqn, WIDE.fqn, _DENSE.fqn])
        self._epoch += 1
        hello = {"run": "admin", "client": "drop", "epoch": self._epoch, "world_size": 0, "dropped_tables": [name]}
        for shard, port in enumerate(self._ports):
            async with await ParamServerClient.connect("127.0.0.1", port) as client:
                await client.hello(hello_of_nobody(idl.Role.ADMIN, **hello))
            self._epoch -= 1
            if shard + 1 < len(self._ports):
                await self._write(0, shards=[shard + 1])
            self._epoch += 1
        self._items = ITEMS if name == ITEMS.fqn else self._items
        await self.begin_anew()


def _fields(spec: TableSpec) -> dict[str, Any]:
    return {name: getattr(spec, name) for name in ("fqn", "dim", "dtype", "states")}
