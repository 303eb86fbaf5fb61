"""The rows that the benches of ingest move: the same ones for Headrace, for its limits and for its peers.

A batch is what one training step of 4096 lookups updates: each row once, sorted. The values are random bytes; how they
look makes no difference to anyone, because nothing compresses them.
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
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

__all__ = ["DIM", "SPEC", "WIRE_ROW_BYTES", "BenchRows", "RowsConfig", "hello_request", "median", "reader_hello"]

DIM = 128
_NUM_ROWS = 10_000_000
_LOOKUPS_PER_STEP = 4096
_ZIPF_EXPONENT = 1.05
SPEC = TableSpec(
    fqn="bench.weight",
    num_rows=_NUM_ROWS,
    dim=DIM,
    dtype=DType.FLOAT32,
    states=(StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),),
)
_WEIGHT_BYTES, _STATE_BYTES = 4 * DIM, 4
WIRE_ROW_BYTES = 8 + _WEIGHT_BYTES + _STATE_BYTES
"""What a row is on the wire and in the update log, but for some bytes a batch."""
_RUN, _CLIENT, _EPOCH = "bench", "rank0", 1
# Batches take their values from one pool of this many rows, at different places: it stays out of the caches as a
# trainer's staging buffer does, and a bench needs no memory for more.
_POOL_ROWS = 16 * _LOOKUPS_PER_STEP


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsConfig:
    """What decides the rows of a bench, so that processes can make the same ones.

    Attributes:
        ids: `uniform`, or `zipf` with exponent 1.05.
        num_batches: Batches of 4096 lookups each.
        seed: Of the random numbers.
    """

    ids: str
    num_batches: int
    seed: int = 0


class BenchRows:
    """The batches of a bench.

    Attributes:
        ids: int64[n] for each batch, ascending, each once.
        num_rows: Rows of all batches.
    """

    def __init__(self, config: RowsConfig) -> None:
        """Draw them."""
        rng = np.random.default_rng(config.seed)
        draw = _draw_uniform if config.ids == "uniform" else _draw_zipf
        self.ids: list[npt.NDArray[np.int64]] = [np.unique(draw(rng)) for _ in range(config.num_batches)]
        self.num_rows = sum(ids.size for ids in self.ids)
        self._weights = np.frombuffer(rng.bytes(_POOL_ROWS * _WEIGHT_BYTES), f"V{_WEIGHT_BYTES}")
        self._states = np.frombuffer(rng.bytes(_POOL_ROWS * _STATE_BYTES), f"V{_STATE_BYTES}")

    @property
    def wire_bytes(self) -> int:
        """Bytes of all rows as they travel."""
        return self.num_rows * WIRE_ROW_BYTES

    def columns(self, number: int) -> dict[str, memoryview]:
        """Return weights and states of a batch, by field of the record's layout, as views."""
        size = self.ids[number].size
        first = number * _LOOKUPS_PER_STEP % (_POOL_ROWS - size)
        return {
            "weights": self._weights[first : first + size].view(np.uint8).data,
            "state:momentum1": self._states[first : first + size].view(np.uint8).data,
        }

    def records(self, number: int) -> list[bytes]:
        """Return the values that a store keeps for a batch's rows."""
        layout = RecordLayout(SPEC, SPEC.whole)
        return layout.encode(self.columns(number), epoch=_EPOCH, step=number, time_us=number)

    def plain_values(self, number: int) -> list[bytes]:
        """Return weights and state of each row, 516 bytes, for a store that knows no versions."""
        columns = self.columns(number)
        size = self.ids[number].size
        joined = np.empty(size, [("weights", f"V{_WEIGHT_BYTES}"), ("state", f"V{_STATE_BYTES}")])
        joined["weights"] = np.frombuffer(columns["weights"], f"V{_WEIGHT_BYTES}")
        joined["state"] = np.frombuffer(columns["state:momentum1"], f"V{_STATE_BYTES}")
        values: list[bytes] = joined.view(f"V{_WEIGHT_BYTES + _STATE_BYTES}").tolist()
        return values

    def request(self, number: int, *, client_seq: int) -> Any:
        """Return the `idl.SetEmbeddingsRequest` of a batch."""
        columns = self.columns(number)
        state = idl.StateColumn(name="momentum1", dtype=int(DType.FLOAT32), width=1, data=columns["state:momentum1"])
        delta = idl.TableDelta(
            fqn=SPEC.fqn,
            fingerprint=SPEC.fingerprint,
            column_offset=0,
            width=DIM,
            row_ids=self.ids[number].view(np.uint8).data,
            weights=columns["weights"],
            states=[state],
        )
        return idl.SetEmbeddingsRequest(
            run=_RUN,
            client=_CLIENT,
            epoch=_EPOCH,
            client_seq=client_seq,
            step=number,
            time_us=number,
            ends_step=True,
            is_exact_cut=True,
            deltas=[delta],
        )

    def message(self, number: int) -> bytes:
        """Return the whole message that carries a batch, which is what the update log keeps of it."""
        args = idl.ParameterServer.setEmbeddings_args(request=self.request(number, client_seq=number + 1))
        return b"".join(encode_message("setEmbeddings", CALL, number, args))


def hello_request() -> Any:
    """Return the hello of the bench's writer."""
    return idl.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        role=idl.Role.WRITER,
        run=_RUN,
        client=_CLIENT,
        epoch=_EPOCH,
        rank=0,
        world_size=1,
        tables=[spec_to_idl(SPEC)],
    )


def reader_hello() -> Any:
    """Return the hello of one who only looks."""
    return idl.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        role=idl.Role.READER,
        run="",
        client="",
        epoch=0,
        rank=0,
        world_size=1,
        tables=[],
    )


def _draw_uniform(rng: np.random.Generator) -> npt.NDArray[np.int64]:
    return rng.integers(0, _NUM_ROWS, _LOOKUPS_PER_STEP)


def _draw_zipf(rng: np.random.Generator) -> npt.NDArray[np.int64]:
    ranks = np.searchsorted(_zipf_cdf(), rng.random(_LOOKUPS_PER_STEP))
    # Hot rows lie anywhere in a table: an odd factor without a common one with the size permutes all ids.
    ids: npt.NDArray[np.int64] = (ranks * 7_368_787) % _NUM_ROWS
    return ids


@functools.cache
def _zipf_cdf() -> npt.NDArray[np.float64]:
    weights = np.arange(1, _NUM_ROWS + 1, dtype=np.float64) ** -_ZIPF_EXPONENT
    cdf: npt.NDArray[np.float64] = np.cumsum(weights)
    cdf /= cdf[-1]
    return cdf


def median(values: Sequence[float]) -> float:
    """Return the median of at least one value."""
    return float(np.median(values))
