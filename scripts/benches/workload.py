"""The rows that benches of ingest move, the same ones for Headrace, its limits and its peers, and who sends them.

A batch is what one training step of 4096 lookups updates: each row once, sorted. The values are random bytes; nothing
compresses them, so their content makes no difference.

A writer is a process with pipelined connections to a server, as fast as it acks or on a fixed schedule. A schedule is
an *open loop*: each batch has its moment, and its delay counts from there, whether or not the writer could send then. A
writer that waited for the server would leave out just its delays (coordinated omission).
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.schemas.idl import PROTOCOL_VERSION, idl, spec_to_idl
from headrace.schemas.messages import CALL, encode_message
from headrace.schemas.routing import shards_of_rows
from headrace.schemas.row_records import RecordLayout
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.scripts.benches.child import Child, Worker

__all__ = ["WIRE_ROW_BYTES", "BenchRows", "RowsConfig", "WriteResult", "WriterProcess", "draw_ids"]
__all__ += ["due_times_ns", "hello_request", "make_delta", "make_request", "zipf_ranks"]

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

    # `uniform`; `zipf` with exponent 1.05; `each`: every row once, in order; `shuffled`: once, in any order; `hot`: the
    # hundredth of the rows that Zipf draws most, each once, and drawn so.
    ids: str
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
        if config.ids in ("each", "shuffled"):
            ids = np.arange(config.num_rows) if config.ids == "each" else rng.permutation(config.num_rows)
            self.ids = [np.sort(of_batch) for of_batch in np.array_split(ids, config.num_batches)]
        else:
            draws = (draw_ids(rng, config.ids, config.num_rows, config.num_lookups) for _ in range(config.num_batches))
            if config.ids == "hot":
                hot = _spread(np.arange(_num_hot(config.num_rows)), config.num_rows)
                once = np.array_split(hot, config.num_batches)
                draws = (np.concatenate(both) for both in zip(draws, once, strict=True))
            self.ids = [np.unique(ids) for ids in draws]
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
                ids = ids[shards_of_rows(spec.seed, ids, num_shards) == shard]
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
    """Return int64[size], row ids: `uniform`, `zipf`, or only the `hot` ones of these; hot rows are anywhere."""
    if kind == "uniform":
        return rng.integers(0, num_rows, size)
    # Draws of all ranks that are hot have the distribution of draws from the hot ranks alone.
    return _spread(zipf_ranks(rng, _num_hot(num_rows) if kind == "hot" else num_rows, size), num_rows)


def _spread(ranks: npt.NDArray[np.int64], num_rows: int) -> npt.NDArray[np.int64]:
    """Return the row id of each rank: a factor without a common divisor with the number of rows permutes all ids."""
    ids: npt.NDArray[np.int64] = (ranks * 7_368_787) % num_rows
    return ids


def _num_hot(num_rows: int) -> int:
    return max(1, num_rows // 100)


def zipf_ranks(rng: np.random.Generator, num_rows: int, size: int | tuple[int, ...]) -> npt.NDArray[np.int64]:
    """Return int64[size], ranks from 0 to num_rows - 1, Zipf-distributed with exponent 1.05."""
    return np.searchsorted(_zipf_cdf(num_rows), rng.random(size))


@functools.cache
def _zipf_cdf(num_rows: int) -> npt.NDArray[np.float64]:
    cdf: npt.NDArray[np.float64] = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -_ZIPF_EXPONENT)
    cdf /= cdf[-1]
    return cdf


_CALL_TIMEOUT_S = 120.0
_POLL_S = 0.01
# 32 MiB, which a streamer has in flight by default.
_WINDOW_BATCHES = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class WriteResult:
    """What the writers saw. Seconds count from the first byte, nanoseconds are the machine's monotonic clock."""

    num_rows: int
    wire_bytes: int
    acked_s: float  # the last batch was acked: it is on disk
    applied_s: float  # the stores have all batches too
    worst_loop_pause_ms: float  # of a shard
    cpu_s: float  # processor time of the writers' process
    first_step: int  # step of the first batch
    begin_ns: int  # when the first byte was sent
    # With a schedule:
    due_ns: list[int]  # when each batch was due
    ack_delays_ms: list[float]  # from due to acked, of each batch
    late_ms: float  # the median delay from due to sent


class WriterProcess(Child):
    """The process that writes; use it with `with`."""

    def __init__(self, rows: RowsConfig, *, num_clients: int = 1) -> None:
        """Start the process; `num_clients` take turns with batches, each with one connection to each shard."""
        super().__init__(f"{__name__}:_work", "the bench's writer", rows=asdict(rows), num_clients=num_clients)

    def write(self, address: str, *, num_batches: int, rows_per_s: float | None = None) -> WriteResult:
        """Write batches to a server, beginning again after the last one, and wait until it has applied them.

        `rows_per_s` is the rate of a schedule; without it batches are written as fast as they are acked.
        """
        return WriteResult(**self.ask(address=address, num_batches=num_batches, rows_per_s=rows_per_s))


def _work(rows: dict[str, Any], num_clients: int) -> Worker:
    of_process = BenchRows(RowsConfig(**rows))
    answer: dict[str, Any] = {}
    while True:
        order = yield answer
        answer = asdict(asyncio.run(_write(of_process, num_clients, **order)))


def due_times_ns(begin_ns: int, num_batches: int, rows_per_batch: float, rows_per_s: float) -> list[int]:
    """Return when each batch of a schedule is due, nanoseconds; rounding does not accumulate."""
    interval_ns = rows_per_batch / rows_per_s * 1e9
    return [begin_ns + round(number * interval_ns) for number in range(num_batches)]


@dataclass(frozen=True, slots=True)
class _Client:
    """A connected client: one connection to each shard."""

    shards: list[ParamServerClient]
    last_seq: int
    max_requests: int

    @classmethod
    async def connect(cls, address: str, stack: AsyncExitStack, hello: Any) -> _Client:
        shards: list[ParamServerClient] = []
        replies, addresses = [], [address]
        while len(shards) < len(addresses):
            host, port = parse_address(addresses[len(shards)])
            shards.append(await stack.enter_async_context(await ParamServerClient.connect(host, port)))
            replies.append(await shards[-1].hello(hello))
            addresses = [address, *(f"{shard.host}:{shard.port}" for shard in replies[0].shards[1:])]
        return cls(shards, replies[0].last_client_seq, replies[0].limits.max_inflight_requests)


async def _write(
    rows: BenchRows, num_clients: int, address: str, num_batches: int, rows_per_s: float | None
) -> WriteResult:
    async with AsyncExitStack() as stack:
        hellos = [hello_request(rows.specs, rank=rank, world_size=num_clients) for rank in range(num_clients)]
        clients = [await _Client.connect(address, stack, hello) for hello in hellos]
        return await _write_all(rows, clients, num_batches, rows_per_s)


async def _write_all(
    rows: BenchRows, clients: list[_Client], num_batches: int, rows_per_s: float | None
) -> WriteResult:
    plan = [_requests(rows, clients, number) for number in range(num_batches)]
    window = max(_WINDOW_BATCHES // len(clients), 1) if rows_per_s is None else clients[0].max_requests
    slots = [asyncio.Semaphore(min(window, client.max_requests)) for client in clients]
    num_rows = sum(rows.ids[number % len(rows.ids)].size for number in range(num_batches))
    begin_s, begin_cpu_s = time.perf_counter(), time.process_time()
    begin_ns = time.monotonic_ns()
    due_ns = due_times_ns(begin_ns, num_batches, num_rows / num_batches, rows_per_s) if rows_per_s else []
    acked_ns, lates_ns, sending = [0] * num_batches, [], []

    async def send(number: int, rank: int) -> list[int]:
        calls = [
            shard.set_embeddings(request, timeout_s=_CALL_TIMEOUT_S)
            for shard, request in zip(clients[rank].shards, plan[number], strict=True)
        ]
        replies = await asyncio.gather(*calls)
        acked_ns[number] = time.monotonic_ns()
        slots[rank].release()
        return [reply.seq for reply in replies]

    async with asyncio.TaskGroup() as tasks:
        for number in range(num_batches):
            rank = number % len(clients)
            if due_ns:
                await asyncio.sleep(max(0, due_ns[number] - time.monotonic_ns()) / 1e9)
            await slots[rank].acquire()
            if due_ns:
                lates_ns.append(time.monotonic_ns() - due_ns[number])
            sending.append(tasks.create_task(send(number, rank)))
    acked_s, cpu_s = time.perf_counter() - begin_s, time.process_time() - begin_cpu_s
    last_seqs = np.max([task.result() for task in sending], axis=0).tolist()
    pauses_ms = [await _wait_applied(*pair) for pair in zip(clients[0].shards, last_seqs, strict=True)]
    return WriteResult(
        num_rows=num_rows,
        wire_bytes=num_rows * rows.config.row_bytes,
        acked_s=acked_s,
        applied_s=time.perf_counter() - begin_s,
        worst_loop_pause_ms=max(pauses_ms),
        cpu_s=cpu_s,
        first_step=clients[0].last_seq + 1,
        begin_ns=begin_ns,
        due_ns=due_ns,
        ack_delays_ms=[(acked - due) / 1e6 for acked, due in zip(acked_ns, due_ns, strict=False)],
        late_ms=float(np.median(lates_ns)) / 1e6 if lates_ns else 0.0,
    )


def _requests(rows: BenchRows, clients: list[_Client], number: int) -> list[Any]:
    """Return the request of a batch to each shard."""
    rank = number % len(clients)
    seq, shards = clients[rank].last_seq + number // len(clients) + 1, range(len(clients[rank].shards))
    facts = {"client_seq": seq, "rank": rank, "num_shards": len(shards)}
    return [rows.request(number % len(rows.ids), shard=shard, **facts) for shard in shards]


async def _wait_applied(client: ParamServerClient, seq: int) -> float:
    """Wait until a shard's store has a record; return the worst pause of the shard's event loop."""
    while (status := await client.status()).applied_seq < seq:  # noqa: ASYNC110 (another process)
        await asyncio.sleep(_POLL_S)
    pause_ms: float = status.worst_loop_pause_ms
    return pause_ms
