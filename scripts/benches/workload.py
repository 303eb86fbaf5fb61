"""The rows that benches of ingest move: the same ones for Headrace, its limits and its peers.

A batch is what one training step of 4096 lookups updates: each row once, sorted. The values are random bytes; nothing
compresses them, so their content makes no difference.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_to_idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.routing import shards_of_rows, table_seed
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

__all__ = ["WIRE_ROW_BYTES", "BenchRows", "RowsConfig", "draw_ids", "hello_request", "make_delta", "make_request"]
__all__ += ["zipf_ranks"]

_DIM = 128
_ZIPF_EXPONENT = 1.05
_STATE = StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1)
_STATE_BYTES = 4
WIRE_ROW_BYTES = 8 + 4 * _DIM + _STATE_BYTES  # of 128 columns, on the wire and in the update log
_RUN, _EPOCH = "bench", 1
# All batches take their values from one pool of this many batches, at different places: so values stay out of the
# caches, as a trainer's staging buffer does, without memory for every batch.
_POOL_BATCHES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsConfig:
    """Settings from which every process makes the same rows."""

    ids: str  # `uniform`, or `zipf` with exponent 1.05
    num_batches: int
    seed: int = 0
    dim: int = _DIM  # columns of a table, float32; a row also has a rowwise state
    num_rows: int = 10_000_000  # of each table
    num_lookups: int = 4096  # ids that a batch draws
    num_tables: int = 1  # each has an equal share of a batch's rows

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
        """Bytes of a row on the wire and in the update log, without a few bytes a batch."""
        return 8 + 4 * self.dim + _STATE_BYTES


class BenchRows:
    """The batches of a bench; `ids` are int64[n] for each batch, ascending, each once."""

    def __init__(self, config: RowsConfig) -> None:
        """Draw all ids."""
        rng = np.random.default_rng(config.seed)
        self.config, self.specs = config, config.specs
        self.ids = [
            np.unique(draw_ids(rng, config.ids, config.num_rows, config.num_lookups)) for _ in range(config.num_batches)
        ]
        self.num_rows = sum(ids.size for ids in self.ids)
        self._pool_rows = _POOL_BATCHES * config.num_lookups
        self._weights = np.frombuffer(rng.bytes(self._pool_rows * 4 * config.dim), f"V{4 * config.dim}")
        self._states = np.frombuffer(rng.bytes(self._pool_rows * _STATE_BYTES), f"V{_STATE_BYTES}")

    def records(self, number: int) -> list[bytes]:
        """Return the records that a store keeps for a batch's rows. REQUIRES: one table."""
        (spec,) = self.specs
        layout = RecordLayout(spec, spec.whole)
        return layout.encode(self._columns(number, self.ids[number].size), epoch=_EPOCH, step=number, time_us=number)

    def plain_values(self, number: int) -> list[bytes]:
        """Return weights and state of each row as one value, for a store without versions."""
        columns, dim = self._columns(number, self.ids[number].size), self.config.dim
        joined = np.empty(self.ids[number].size, [("weights", f"V{4 * dim}"), ("state", f"V{_STATE_BYTES}")])
        joined["weights"] = np.frombuffer(columns["weights"], f"V{4 * dim}")
        joined["state"] = np.frombuffer(columns["state:momentum1"], f"V{_STATE_BYTES}")
        values: list[bytes] = joined.view(f"V{4 * dim + _STATE_BYTES}").tolist()
        return values

    def request(self, number: int, *, client_seq: int, rank: int = 0, shard: int = 0, num_shards: int = 1) -> Any:
        """Return the request of a batch to a shard; `client_seq` is also its step."""
        deltas, skipped = [], 0
        for spec, ids in zip(self.specs, np.array_split(self.ids[number], len(self.specs)), strict=True):
            if num_shards > 1:
                ids = ids[shards_of_rows(table_seed(spec.fqn), ids, num_shards) == shard]
            if ids.size:
                # Which values a row gets makes no difference; that they are contiguous does.
                columns = self._columns(number, ids.size, skipped)
                skipped += ids.size
                deltas.append(make_delta(spec, ids, columns["weights"], columns["state:momentum1"]))
        return make_request(deltas, client_seq=client_seq, rank=rank, time_us=number)

    def _columns(self, number: int, num_rows: int, skipped: int = 0) -> dict[str, memoryview]:
        """Return views of weights and states, by field of the record's layout, of rows of a batch."""
        first = number * self.config.num_lookups % (self._pool_rows - self.ids[number].size) + skipped
        return {
            "weights": self._weights[first : first + num_rows].view(np.uint8).data,
            "state:momentum1": self._states[first : first + num_rows].view(np.uint8).data,
        }

    def message(self, number: int) -> bytes:
        """Return the message that carries a batch, which the update log keeps as it is."""
        args = idl.ParameterServer.setEmbeddings_args(request=self.request(number, client_seq=number + 1))
        return b"".join(encode_message("setEmbeddings", CALL, number, args))


def make_delta(spec: TableSpec, ids: npt.NDArray[np.int64], weights: Any, state: Any = None) -> Any:
    """Return rows of a table as an update carries them, perhaps with a rowwise state."""
    states = [idl.StateColumn(name=_STATE.name, dtype=int(_STATE.dtype), width=1, data=state)] if state else []
    return idl.TableDelta(
        fqn=spec.fqn,
        fingerprint=spec.fingerprint,
        column_offset=0,
        width=spec.dim,
        row_ids=ids.view(np.uint8).data,
        weights=weights,
        states=states,
    )


def make_request(deltas: Sequence[Any], *, client_seq: int = 1, rank: int = 0, time_us: int = 0) -> Any:
    """Return the request of a bench's writer for one step."""
    return idl.SetEmbeddingsRequest(
        run=_RUN,
        client=f"rank{rank}",
        epoch=_EPOCH,
        client_seq=client_seq,
        step=client_seq,
        time_us=time_us,
        ends_step=True,
        is_exact_cut=True,
        deltas=list(deltas),
    )


def hello_request(
    specs: Sequence[TableSpec] = (), *, rank: int = 0, world_size: int = 1, role: int = idl.Role.WRITER
) -> Any:
    """Return the hello of a bench's client."""
    return idl.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        role=role,
        run=_RUN,
        client=f"rank{rank}",
        epoch=_EPOCH,
        rank=rank,
        world_size=world_size,
        tables=[spec_to_idl(spec) for spec in specs],
    )


def draw_ids(rng: np.random.Generator, kind: str, num_rows: int, size: int) -> npt.NDArray[np.int64]:
    """Return int64[size], row ids that are `uniform`, or `zipf` with hot rows anywhere in the table."""
    if kind == "uniform":
        return rng.integers(0, num_rows, size)
    # A factor without a common divisor with the number of rows permutes all ids.
    ids: npt.NDArray[np.int64] = (zipf_ranks(rng, num_rows, size) * 7_368_787) % num_rows
    return ids


def zipf_ranks(rng: np.random.Generator, num_rows: int, size: int | tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return int64[size], ranks from 0 to num_rows - 1, Zipf-distributed with exponent 1.05."""
    return np.searchsorted(_zipf_cdf(num_rows), rng.random(size))


@functools.cache
def _zipf_cdf(num_rows: int) -> npt.NDArray[np.float64]:
    cdf: npt.NDArray[np.float64] = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -_ZIPF_EXPONENT)
    cdf /= cdf[-1]
    return cdf
