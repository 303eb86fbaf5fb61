"""The rows that benches move, the same ones for Headrace, its limits and its peers, and who sends them.

A batch is what one training step of 4096 lookups updates: each row once, sorted. The values are random bytes; nothing
compresses them, so their content makes no difference.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_to_idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.scripts.benches.child import Child, Worker

__all__ = ["WIRE_ROW_BYTES", "BenchRows", "RowsConfig", "WriteResult", "WriterProcess", "draw_ids"]
__all__ += ["hello_request", "make_delta", "make_request", "zipf_ranks"]

_DIM = 128
_ZIPF_EXPONENT = 1.05
_STATE = StateSpec(name="momentum1", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1)
_STATE_BYTES = 4
WIRE_ROW_BYTES = 8 + 4 * _DIM + _STATE_BYTES  # of 128 columns, on the wire and in the update log
_RUN, _CLIENT, _EPOCH = "bench", "rank0", 1
# All batches take their values from one pool of this many batches, at different places: so values stay out of the
# caches, as a trainer's staging buffer does, without memory for every batch.
_POOL_BATCHES = 16
_CALL_TIMEOUT_S, _POLL_S = 120.0, 0.01
_WINDOW_BATCHES = 16  # 32 MiB, which a streamer has in flight by default


@dataclass(frozen=True, kw_only=True, slots=True)
class RowsConfig:
    """Settings from which every process makes the same rows."""

    ids: str  # `uniform`; `zipf` with exponent 1.05; `each`: every row once, in order
    num_batches: int
    seed: int = 0
    dim: int = _DIM  # columns of the table, float32; a row also has a rowwise state
    num_rows: int = 10_000_000
    num_lookups: int = 4096  # ids that a batch draws

    @property
    def spec(self) -> TableSpec:
        """The table."""
        sizes: dict[str, Any] = {"num_rows": self.num_rows, "dim": self.dim}
        return TableSpec(fqn="bench.weight", dtype=DType.FLOAT32, states=(_STATE,), **sizes)


class BenchRows:
    """The batches of a bench; `ids` are int64[n] for each batch, ascending, each once."""

    def __init__(self, config: RowsConfig) -> None:
        """Draw all ids."""
        rng = np.random.default_rng(config.seed)
        self.config, self.spec = config, config.spec
        if config.ids == "each":
            self.ids = np.array_split(np.arange(config.num_rows), config.num_batches)
        else:
            draws = (draw_ids(rng, config.ids, config.num_rows, config.num_lookups) for _ in range(config.num_batches))
            self.ids = [np.unique(ids) for ids in draws]
        self.num_rows = sum(ids.size for ids in self.ids)
        self._pool_rows = _POOL_BATCHES * config.num_lookups
        self._weights = np.frombuffer(rng.bytes(self._pool_rows * 4 * config.dim), f"V{4 * config.dim}")
        self._states = np.frombuffer(rng.bytes(self._pool_rows * _STATE_BYTES), f"V{_STATE_BYTES}")

    def records(self, number: int) -> list[bytes]:
        """Return the records that a store keeps for a batch's rows."""
        columns = dict(zip(("weights", "state:momentum1"), self._columns(number), strict=True))
        layout = RecordLayout(self.spec, self.spec.whole)
        return layout.encode(columns, epoch=_EPOCH, step=number, time_us=number)

    def plain_values(self, number: int) -> list[bytes]:
        """Return weights and state of each row as one value, for a store without versions."""
        weights, states = self._columns(number)
        width = 4 * self.config.dim
        joined = np.empty(self.ids[number].size, [("weights", f"V{width}"), ("state", f"V{_STATE_BYTES}")])
        joined["weights"], joined["state"] = np.frombuffer(weights, f"V{width}"), np.frombuffer(states, "V4")
        values: list[bytes] = joined.view(f"V{width + _STATE_BYTES}").tolist()
        return values

    def request(self, number: int, *, client_seq: int) -> Any:
        """Return the request of a batch; `client_seq` is also its step."""
        delta = make_delta(self.spec, self.ids[number], *self._columns(number))
        return make_request([delta], client_seq=client_seq, time_us=number)

    def message(self, number: int) -> bytes:
        """Return the message that carries a batch, which the update log keeps as it is."""
        args = idl.ParameterServer.setEmbeddings_args(request=self.request(number, client_seq=number + 1))
        return b"".join(encode_message("setEmbeddings", CALL, number, args))

    def _columns(self, number: int) -> tuple[memoryview, memoryview]:
        """Return views of the weights and states of a batch's rows."""
        num_rows = self.ids[number].size
        first = number * self.config.num_lookups % (self._pool_rows - num_rows)
        weights, states = (column[first : first + num_rows] for column in (self._weights, self._states))
        return weights.view(np.uint8).data, states.view(np.uint8).data


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


def make_request(deltas: Sequence[Any], *, client_seq: int = 1, time_us: int = 0) -> Any:
    """Return the request of a bench's writer for one step."""
    return idl.SetEmbeddingsRequest(
        run=_RUN,
        client=_CLIENT,
        epoch=_EPOCH,
        client_seq=client_seq,
        step=client_seq,
        time_us=time_us,
        ends_step=True,
        is_exact_cut=True,
        deltas=list(deltas),
    )


def hello_request(specs: Sequence[TableSpec] = ()) -> Any:
    """Return the hello of a bench's writer."""
    return idl.HelloRequest(
        protocol_version=PROTOCOL_VERSION,
        role=idl.Role.WRITER,
        run=_RUN,
        client=_CLIENT,
        epoch=_EPOCH,
        rank=0,
        world_size=1,
        tables=[spec_to_idl(spec) for spec in specs],
    )


def draw_ids(rng: np.random.Generator, kind: str, num_rows: int, size: int) -> npt.NDArray[np.int64]:
    """Return int64[size], row ids: `uniform` or `zipf`; hot rows are anywhere, and the same for all seeds."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteResult:
    """What the writer saw. Seconds count from the first byte."""

    num_rows: int
    acked_s: float  # the last batch was acked: it is on disk
    applied_s: float  # the store has all batches too
    worst_loop_pause_ms: float  # of the shard


class WriterProcess(Child):
    """The process that writes, with one pipelined connection to a server of one shard; use it with `with`."""

    def __init__(self, rows: RowsConfig) -> None:
        """Start the process."""
        super().__init__(f"{__name__}:_work", "the bench's writer", **asdict(rows))

    def write(self, address: str, *, num_batches: int, rows_per_s: float | None = None) -> WriteResult:
        """Write batches to a server, beginning again after the last one, and wait until it has applied them.

        `rows_per_s` is the pace; without it batches are written as fast as they are acked.
        """
        return WriteResult(**self.ask(address=address, num_batches=num_batches, rows_per_s=rows_per_s))


def _work(**rows: Any) -> Worker:
    of_process = BenchRows(RowsConfig(**rows))
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        answer = asdict(asyncio.run(_write(of_process, **order)))


async def _write(rows: BenchRows, address: str, num_batches: int, rows_per_s: float | None) -> WriteResult:
    async with await ParamServerClient.connect(*parse_address(address)) as client:
        first_seq = (await client.hello(hello_request([rows.spec]))).last_client_seq + 1
        places = [number % len(rows.ids) for number in range(num_batches)]
        requests = [rows.request(place, client_seq=first_seq + number) for number, place in enumerate(places)]
        num_rows, slots = sum(rows.ids[place].size for place in places), asyncio.Semaphore(_WINDOW_BATCHES)
        interval_s = num_rows / num_batches / rows_per_s if rows_per_s else 0.0
        begin_s = time.perf_counter()

        async def send(request: Any) -> int:
            reply = await client.set_embeddings(request, timeout_s=_CALL_TIMEOUT_S)
            slots.release()
            return int(reply.seq)

        async with asyncio.TaskGroup() as tasks:
            sending = []
            for number, request in enumerate(requests):
                if interval_s:
                    await asyncio.sleep(max(0.0, begin_s + number * interval_s - time.perf_counter()))
                await slots.acquire()
                sending.append(tasks.create_task(send(request)))
        acked_s = time.perf_counter() - begin_s
        while (status := await client.status()).applied_seq < sending[-1].result():  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return WriteResult(
            num_rows=num_rows,
            acked_s=acked_s,
            applied_s=time.perf_counter() - begin_s,
            worst_loop_pause_ms=status.worst_loop_pause_ms,
        )
