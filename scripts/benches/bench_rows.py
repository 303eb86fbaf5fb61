"""The rows that the benches of ingest move: the same ones for Headrace, for its limits and for its peers.

A batch is what one training step of 4096 lookups updates: each row once, sorted. The values are random bytes; how they
look makes no difference to anyone, because nothing compresses them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_to_idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

__all__ = ["WIRE_ROW_BYTES", "BenchRows", "RowsConfig", "hello_request", "zipf_ids", "zipf_ranks"]

_DIM = 128
_NUM_ROWS = 10_000_000
_LOOKUPS_PER_STEP = 4096
_ZIPF_EXPONENT = 1.05
_STATE = StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1)
_STATE_BYTES = 4
WIRE_ROW_BYTES = 8 + 4 * _DIM + _STATE_BYTES
"""What a row of 128 columns is on the wire and in the update log, but for some bytes a batch."""
_RUN, _EPOCH = "bench", 1
# Batches take their values from one pool of this many batches, at different places: it stays out of the caches as a
# trainer's staging buffer does, and a bench needs no memory for more.
_POOL_BATCHES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsConfig:
    """What decides the rows of a bench, so that processes can make the same ones.

    Attributes:
        ids: `uniform`, or `zipf` with exponent 1.05.
        num_batches: Batches.
        seed: Of the random numbers.
        dim: Columns of a table, float32, beside which a row has a rowwise state.
        num_rows: Rows of each table.
        num_lookups: Ids that a batch draws.
        num_tables: Tables; a batch has an equal share of its rows in each.
    """

    ids: str
    num_batches: int
    seed: int = 0
    dim: int = _DIM
    num_rows: int = _NUM_ROWS
    num_lookups: int = _LOOKUPS_PER_STEP
    num_tables: int = 1

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The tables."""
        names = ["bench.weight"] if self.num_tables == 1 else [f"bench{n}.weight" for n in range(self.num_tables)]
        return tuple(
            TableSpec(fqn=fqn, num_rows=self.num_rows, dim=self.dim, dtype=DType.FLOAT32, states=(_STATE,))
            for fqn in names
        )

    @property
    def row_bytes(self) -> int:
        """What a row is on the wire and in the update log, but for some bytes a batch."""
        return 8 + 4 * self.dim + _STATE_BYTES


class BenchRows:
    """The batches of a bench.

    Attributes:
        config: What they were drawn by.
        specs: The tables.
        ids: int64[n] for each batch, ascending, each once.
        num_rows: Rows of all batches.
    """

    def __init__(self, config: RowsConfig) -> None:
        """Draw them."""
        rng = np.random.default_rng(config.seed)
        draw = _uniform_ids if config.ids == "uniform" else zipf_ids
        self.config, self.specs = config, config.specs
        self.ids: list[npt.NDArray[np.int64]] = [
            np.unique(draw(rng, config.num_rows, config.num_lookups)) for _ in range(config.num_batches)
        ]
        self.num_rows = sum(ids.size for ids in self.ids)
        self._pool_rows = _POOL_BATCHES * config.num_lookups
        self._weights = np.frombuffer(rng.bytes(self._pool_rows * 4 * config.dim), f"V{4 * config.dim}")
        self._states = np.frombuffer(rng.bytes(self._pool_rows * _STATE_BYTES), f"V{_STATE_BYTES}")

    @property
    def wire_bytes(self) -> int:
        """Bytes of all rows as they travel."""
        return self.num_rows * self.config.row_bytes

    def columns(self, number: int) -> dict[str, memoryview]:
        """Return weights and states of a batch, by field of the record's layout, as views."""
        size = self.ids[number].size
        first = number * self.config.num_lookups % (self._pool_rows - size)
        return self._columns(first, first + size)

    def records(self, number: int) -> list[bytes]:
        """Return the values that a store keeps for a batch's rows. REQUIRES: one table."""
        (spec,) = self.specs
        layout = RecordLayout(spec, spec.whole)
        return layout.encode(self.columns(number), epoch=_EPOCH, step=number, time_us=number)

    def plain_values(self, number: int) -> list[bytes]:
        """Return weights and state of each row as one value, for a store that knows no versions."""
        columns, dim = self.columns(number), self.config.dim
        joined = np.empty(self.ids[number].size, [("weights", f"V{4 * dim}"), ("state", f"V{_STATE_BYTES}")])
        joined["weights"] = np.frombuffer(columns["weights"], f"V{4 * dim}")
        joined["state"] = np.frombuffer(columns["state:momentum1"], f"V{_STATE_BYTES}")
        values: list[bytes] = joined.view(f"V{4 * dim + _STATE_BYTES}").tolist()
        return values

    def request(self, number: int, *, client_seq: int, rank: int = 0, shard: int = 0, num_shards: int = 1) -> Any:
        """Return the `idl.SetEmbeddingsRequest` of a batch, or of its rows that are a shard's.

        Args:
            number: Of the batch.
            client_seq: Of the request, on its shard; also its step.
            rank: Of the client.
            shard: Where it goes.
            num_shards: Of the server.
        """
        return idl.SetEmbeddingsRequest(
            run=_RUN,
            client=f"rank{rank}",
            epoch=_EPOCH,
            client_seq=client_seq,
            step=client_seq,
            time_us=number,
            ends_step=True,
            is_exact_cut=True,
            deltas=list(self._deltas(number, shard, num_shards)),
        )

    def _deltas(self, number: int, shard: int, num_shards: int) -> Iterator[Any]:
        first = number * self.config.num_lookups % (self._pool_rows - self.ids[number].size)
        for spec, ids in zip(self.specs, np.array_split(self.ids[number], len(self.specs)), strict=True):
            if num_shards > 1:
                ids = ids[shards_of_rows(table_seed(spec.fqn), ids, num_shards) == shard]
            if not ids.size:
                continue
            # Which values a row gets makes no difference; that they lie side by side does.
            columns = self._columns(first, first + ids.size)
            first += ids.size
            data = columns["state:momentum1"]
            yield idl.TableDelta(
                fqn=spec.fqn,
                fingerprint=spec.fingerprint,
                column_offset=0,
                width=spec.dim,
                row_ids=ids.view(np.uint8).data,
                weights=columns["weights"],
                states=[idl.StateColumn(name=_STATE.name, dtype=int(_STATE.dtype), width=1, data=data)],
            )

    def _columns(self, first: int, last: int) -> dict[str, memoryview]:
        return {
            "weights": self._weights[first:last].view(np.uint8).data,
            "state:momentum1": self._states[first:last].view(np.uint8).data,
        }

    def message(self, number: int) -> bytes:
        """Return the whole message that carries a batch, which is what the update log keeps of it."""
        args = idl.ParameterServer.setEmbeddings_args(request=self.request(number, client_seq=number + 1))
        return b"".join(encode_message("setEmbeddings", CALL, number, args))


def hello_request(specs: Sequence[TableSpec], *, rank: int = 0, world_size: int = 1) -> Any:
    """Return the hello of one of a bench's writers."""
    return idl.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        role=idl.Role.WRITER,
        run=_RUN,
        client=f"rank{rank}",
        epoch=_EPOCH,
        rank=rank,
        world_size=world_size,
        tables=[spec_to_idl(spec) for spec in specs],
    )


def _uniform_ids(rng: np.random.Generator, num_rows: int, size: int) -> npt.NDArray[np.int64]:
    return rng.integers(0, num_rows, size)


def zipf_ids(rng: np.random.Generator, num_rows: int, size: int) -> npt.NDArray[np.int64]:
    """Return int64[size], row ids whose ranks are Zipf's with exponent 1.05; hot rows lie anywhere in a table."""
    # An odd factor without a common one with the size permutes all ids.
    ids: npt.NDArray[np.int64] = (zipf_ranks(rng, num_rows, size) * 7_368_787) % num_rows
    return ids


def zipf_ranks(rng: np.random.Generator, num_rows: int, size: int | tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return int64[size], ranks from 0 to num_rows - 1, Zipf's with exponent 1.05."""
    return np.searchsorted(_zipf_cdf(num_rows), rng.random(size))


@functools.cache
def _zipf_cdf(num_rows: int) -> npt.NDArray[np.float64]:
    weights = np.arange(1, num_rows + 1, dtype=np.float64) ** -_ZIPF_EXPONENT
    cdf: npt.NDArray[np.float64] = np.cumsum(weights)
    cdf /= cdf[-1]
    return cdf
