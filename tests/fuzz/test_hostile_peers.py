"""Peers that know a token and do their worst: readers and writers at a server, and a server that lies to its clients.

The long run: `HEADRACE_FUZZ_LIES=2000 HEADRACE_FUZZ_SEED=2 python -m pytest -s tests/fuzz/test_hostile_peers.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import threading
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import CommandLine
from frame_fuzzer import DEADLINE_S, memory_bytes
from hellos import hello_of_nobody, hello_of_writer
from hostile_clients import hostile_clients_at
from lying_server import LyingServer
from own_address import own_address
from peak_memory import peak_memory
from set_embeddings import delta_of, request_of
from waiting import scaled_s

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.security import Token
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import HeadraceError
from headrace.schemas.idl import idl
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

MIB = 2**20
TOKEN = "hostile-hostile-hostile"
# One lie an episode; a slow client gets a quarter of them.
SEED = int(os.environ.get("HEADRACE_FUZZ_SEED", "1"))
NUM_LIES = int(os.environ.get("HEADRACE_FUZZ_LIES", "120"))
TIMEOUT_S = 0.5
# Of a call, beyond its own deadline, on a machine that does other things as well.
LATE_S = 2.0
MAX_GROWN_BYTES = 512 * MIB  # torch and the commands are loaded meanwhile
STATES = (StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),)
LIES = TableSpec(fqn="lies.weight", num_rows=1000, dim=8, dtype=DType.FLOAT32, states=STATES, has_identities=False)
NAMED = TableSpec(fqn="named.weight", num_rows=1000, dim=8, dtype=DType.FLOAT32, states=(), has_identities=True)
DENSE = TableSpec.of_tensor("bias", [5, 7], DType.FLOAT32)
ROWS = np.arange(100)
STEADY = TableSpec(fqn="steady.weight", num_rows=1000, dim=16, dtype=DType.FLOAT32, states=(), has_identities=False)
TOKENS = {"": TOKEN, "WRITER_": "writer-" * 4, "READER_": "reader-" * 4}
NUM_ROUNDS, NUM_PAIRS = 3, 100


class Trap:
    """Listens beyond loopback, where false redirects lead, and notes what it is sent."""

    def __init__(self) -> None:
        self.received = b""
        self.num_connections = 0

    async def take(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Read what comes within a second."""
        self.num_connections += 1
        with contextlib.suppress(OSError, TimeoutError):
            async with asyncio.timeout(1.0):
                self.received += await reader.read(65_536)
        writer.transport.abort()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of one shard with a token, and rows of several kinds of tables."""
    environ = {**os.environ, "HEADRACE_TOKEN": TOKEN}
    with ServerProcess.start(tmp_path_factory.mktemp("hostile") / "data", environ=environ) as running:
        asyncio.run(_fill(parse_address(running.address)))
        yield running


async def _fill(address: tuple[str, int]) -> None:
    async with await ParamServerClient.connect(*address, timeout_s=DEADLINE_S) as client:
        await client.hello(hello_of_writer(LIES, NAMED, DENSE, token=TOKEN))
        dense = np.arange(DENSE.num_rows)
        scalar = idl.TableScalar(name="step", dtype=int(DType.INT64), data=np.int64(3).tobytes())
        deltas = [
            delta_of(LIES, ROWS, 1.0, scalars=[scalar]),
            delta_of(NAMED, ROWS, 1.0, identities=(ROWS + 7).tobytes()),
            delta_of(DENSE, dense, 1.0),
        ]
        await client.set_embeddings(request_of(*deltas))


@contextlib.contextmanager
def _listening(trap: Trap) -> Iterator[tuple[str, int]]:
    """Set a trap in a thread; yield where it is."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    listener = asyncio.run_coroutine_threadsafe(asyncio.start_server(trap.take, own_address(), 0), loop).result()
    try:
        yield listener.sockets[0].getsockname()
    finally:
        loop.call_soon_threadsafe(listener.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


class Episodes:
    """What clients did with lies: each call ended in time, in an answer or in an error of ours."""

    def __init__(self, lying: LyingServer) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self._lying = lying

    def note(self, what: str, began_s: float, error: BaseException | None, *, within_s: float) -> None:
        """Count how a client ended, which began then and may take so long."""
        spent_s = time.monotonic() - began_s
        self.counts[type(error).__name__ if error else "answered"] += 1
        how = None
        if error is not None and not isinstance(error, HeadraceError):
            how = "".join(traceback.format_exception(error))[-3500:]
        elif spent_s > scaled_s(within_s):
            how = f"took {spent_s:.1f} s: {error!r}"
        if how:
            self.faults.append(f"{what}: {self._lying.lies[-3:]}: {how}")


@contextlib.contextmanager
def _lies_about(server: ServerProcess) -> Iterator[tuple[LyingServer, Episodes]]:
    """Check at the end that clients of a lying server had no faults, took little memory, and kept the token."""
    trap = Trap()
    with _listening(trap) as elsewhere, LyingServer(parse_address(server.address), elsewhere=elsewhere) as lying:
        episodes = Episodes(lying)
        with peak_memory() as peak:
            yield lying, episodes
    shown = f"{peak.grown_bytes / MIB:.0f} MiB, {trap.num_connections} at the trap"
    print(f"seed {SEED}: {dict(episodes.counts)}, {shown}")
    assert TOKEN.encode() not in trap.received
    assert not episodes.faults, f"{len(episodes.faults)} faults\n" + "\n".join(episodes.faults[:12])
    assert peak.grown_bytes < MAX_GROWN_BYTES


READS: dict[str, tuple[str, Callable[[EmbeddingReader], Awaitable[Any]]]] = {
    "get": ("getEmbeddings", lambda reader: reader.get("lies.weight", ROWS, with_states=True, with_versions=True)),
    "get_many": ("getEmbeddings", lambda reader: reader.get_many([("lies.weight", ROWS), ("named.weight", ROWS)])),
    "find_rows": ("findRows", lambda reader: reader.find_rows("named.weight", ROWS)),
    "by identity": ("findRows", lambda reader: reader.get_by_identity("named.weight", ROWS, timeout_s=TIMEOUT_S)),
    "dense": ("status", lambda reader: reader.dense()),
    "dense rows": ("getEmbeddings", lambda reader: reader.dense(timeout_s=TIMEOUT_S)),
    "digest": ("digestRows", lambda reader: reader.digest("lies.weight", with_presence=True, timeout_s=TIMEOUT_S)),
    "scalars": ("status", lambda reader: reader.scalars("lies.weight")),
    "unknown": ("hello", lambda reader: reader.get("unknown.weight", ROWS, timeout_s=TIMEOUT_S)),
    "again": ("hello", lambda reader: reader._refresh()),
}


async def test_readers_of_a_lying_server(server: ServerProcess) -> None:
    """Whatever a server answers, a read ends in time, in rows or an error of ours."""
    with _lies_about(server) as (lying, episodes):
        for seed in range(SEED, SEED + NUM_LIES):
            name = random.Random(seed).choice([*READS])
            method, read = READS[name]
            lying.lie(method, seed=seed, rate=0.5 if method == "hello" else 1.0)
            began_s, error = time.monotonic(), None
            try:
                async with await EmbeddingReader.connect(
                    lying.address, timeout_s=TIMEOUT_S, token=Token(TOKEN)
                ) as reader:
                    await read(reader)
            except Exception as exc:
                error = exc
            episodes.note(f"seed {seed}, {name}", began_s, error, within_s=2 * TIMEOUT_S + LATE_S)


COMMANDS: dict[str, tuple[str, list[str]]] = {
    "status": ("status", ["status"]),
    "status --json": ("status", ["status", "--json"]),
    "status after hello": ("hello", ["status"]),
    "verify": ("digestRows", ["verify"]),
    "verify --json": ("digestRows", ["verify", "--json"]),
    "verify after hello": ("hello", ["verify"]),
    "verify of rows": ("getEmbeddings", ["verify", "--against"]),
}


def test_commands_at_a_lying_server(
    server: ServerProcess, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command ends in time, with a code, without a traceback, and sends no escapes to the terminal."""
    monkeypatch.setenv("HEADRACE_TOKEN", TOKEN)
    headrace = CommandLine(capsys)
    with _lies_about(server) as (lying, episodes):
        for seed in range(SEED, SEED + NUM_LIES):
            name = random.Random(seed).choice([*COMMANDS])
            method, arguments = COMMANDS[name]
            if arguments[-1] == "--against":
                arguments = [*arguments, server.address]
            lying.lie(method, seed=seed, rate=0.5 if method == "hello" else 1.0)
            began_s, error, out = time.monotonic(), None, ""
            try:
                out = headrace(*arguments, "--server", lying.address, "--timeout-s", TIMEOUT_S, code=None)
            except BaseException as exc:
                error = exc
            episodes.note(f"seed {seed}, {name}", began_s, error, within_s=2 * TIMEOUT_S + LATE_S)
            if "\x1b" in out + headrace.err or "Traceback" in headrace.err:
                episodes.faults.append(f"seed {seed}, {name}: {lying.lies[-3:]}: {out[:300]!r} {headrace.err[:300]!r}")


def test_replicas_of_a_lying_server(server: ServerProcess) -> None:
    """A replica opens and looks rows up, or fails with an error of ours, in time."""
    pytest.importorskip("torch")
    from headrace.paramserver.replica import EmbeddingReplica

    methods = ["hello", "fetchSnapshot", "fetchUpdates", "getEmbeddings", "status", "digestRows"]
    with _lies_about(server) as (lying, episodes):
        for seed in range(SEED, SEED + NUM_LIES // 4):
            method = random.Random(seed).choice(methods)
            lying.lie(method, seed=seed, rate=random.Random(seed).choice([0.3, 1.0]))
            began_s, error = time.monotonic(), None
            try:
                with EmbeddingReplica(
                    lying.address, token=Token(TOKEN), open_timeout_s=2 * TIMEOUT_S, timeout_s=TIMEOUT_S
                ) as replica:
                    replica.lookup("lies.weight", ROWS)
            except BaseException as exc:
                error = exc
            episodes.note(f"seed {seed}, {method}", began_s, error, within_s=4 * TIMEOUT_S + LATE_S)


def test_streamers_at_a_lying_server(server: ServerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training that is streamed and audited ends in time, if not well then with an error of ours."""
    pytest.importorskip("torch")
    from streamed_training import Training

    from headrace.streamer import RawEmbeddingStreamer

    monkeypatch.setenv("HEADRACE_TOKEN", TOKEN)
    methods = ["hello", "setEmbeddings", "status", "getEmbeddings", "digestRows"]
    settings: dict[str, Any] = {"freshness_s": 0, "max_cost_percent": 100, "retry_min_s": 0.01, "retry_max_s": 0.05}
    settings |= {f"{name}_timeout_s": TIMEOUT_S for name in ("connect", "flush", "request")}
    with _lies_about(server) as (lying, episodes):
        for seed in range(SEED, SEED + NUM_LIES // 4):
            method = random.Random(seed).choice(methods)
            lying.lie(method, seed=seed, rate=random.Random(seed).choice([0.3, 1.0]))
            began_s, error, training = time.monotonic(), None, Training()
            try:
                streamer = RawEmbeddingStreamer(lying.address, run=f"run{seed}", model=f"m{seed}", **settings)
                try:
                    streamer.attach(training.model, training.optimizer)
                    for _ in range(3):
                        training.step()
                    streamer.flush()
                    streamer.audit(timeout_s=TIMEOUT_S)
                finally:
                    streamer.close(flush=False)
            except BaseException as exc:
                error = exc
            episodes.note(f"seed {seed}, {method}", began_s, error, within_s=4 * TIMEOUT_S + LATE_S)


class GoodTrainer:
    """Writes and reads its table all the time, and checks that each read gives what was acked last."""

    def __init__(self, client: ParamServerClient) -> None:
        self._client, self.acked = client, 0

    async def p99_s(self, *, for_s: float = 0.0) -> float:
        """Return the 99th percentile of calls, one after the other, for some seconds at least."""
        spent_s: list[float] = []
        until_s = time.monotonic() + for_s
        while len(spent_s) < 2 * NUM_PAIRS or time.monotonic() < until_s:
            batch = request_of(delta_of(STEADY, ROWS, float(self.acked + 1)), run="steady", client_seq=self.acked + 1)
            spent_s.append(await _spent_s(self._client.set_embeddings(batch)))
            self.acked += 1
            began_s = time.perf_counter()
            await self.check(self._client)
            spent_s.append(time.perf_counter() - began_s)
            await asyncio.sleep(0.001)
        return sorted(spent_s)[len(spent_s) * 99 // 100]

    async def check(self, client: ParamServerClient) -> None:
        """Check that the rows are those that were acked last."""
        read = idl.GetEmbeddingsRequest(fqn=STEADY.fqn, row_ids=ROWS.tobytes(), with_states=False, with_versions=False)
        reply = await client.get_embeddings(read)
        assert (np.frombuffer(reply.weights, np.float32) == np.float32(self.acked)).all(), f"after batch {self.acked}"


async def _spent_s(call: Awaitable[Any]) -> float:
    began_s = time.perf_counter()
    await call
    return time.perf_counter() - began_s


@pytest.mark.parametrize("role", ["READER", "WRITER"])
async def test_hostile_clients_harm_nobody_else(tmp_path: Path, role: str) -> None:
    """While readers or writers send anything, a trainer's rows are right, its calls hardly slower, and memory bounded.

    They show no path of the server to readers, restart no shard, and leave no failure in its log. Nothing that was
    acked is lost when the server is killed afterwards, and another trainer can begin.
    """
    environ = {**os.environ, **{f"HEADRACE_{name}TOKEN": token for name, token in TOKENS.items()}}
    data = tmp_path / "data"
    with ServerProcess.start(data, environ=environ) as server:
        address, pid = parse_address(server.address), server.shard_pids[0]
        number = getattr(idl.Role, role)
        async with await ParamServerClient.connect(*address, timeout_s=DEADLINE_S) as client:
            await client.hello(hello_of_writer(STEADY, NAMED, run="steady", token=TOKENS["WRITER_"]))
            trainer = GoodTrainer(client)
            await trainer.p99_s()
            before_bytes = memory_bytes(pid)
            quiet_s, busy_s, codes, messages = [], [], Counter[str](), set[str]()
            for turn in range(NUM_ROUNDS):
                quiet_s.append(await trainer.p99_s())
                token = TOKENS[f"{role}_"]
                with hostile_clients_at(
                    address, role=number, token=token, number=12, seed=SEED + 100 * turn, known=[STEADY.fqn, NAMED.fqn]
                ) as worst:
                    busy_s.append(await trainer.p99_s(for_s=5.0))
                codes += worst.codes
                messages |= set(worst.messages)
            grown_bytes = memory_bytes(pid) - before_bytes
        shown = [" ".join(f"{1e3 * each:.1f}" for each in p99s) for p99s in (quiet_s, busy_s)]
        print(f"\nseed {SEED}, {role}: p99, ms: quiet {shown[0]}, busy {shown[1]}; {grown_bytes / MIB:.0f} MiB more")
        print(f"{codes.total()} calls", dict(sorted(codes.items())))
        assert server.shard_pids == [pid]
        log = server.read_log()
        assert not [fact for fact in log if fact.get("level") in ("error", "critical") or "Traceback" in str(fact)]
        server.kill()
    assert not [message for message in messages if str(data) in message]
    assert not [name for name in codes if name.endswith("INTERNAL")]
    with ServerProcess.start(data, environ=environ) as server:
        async with await ParamServerClient.connect(*parse_address(server.address), timeout_s=DEADLINE_S) as client:
            hello = await client.hello(hello_of_nobody(token=TOKENS["WRITER_"]))
            await trainer.check(client)
            late = {"run": "late", "epoch": hello.highest_epoch + 1, "token": TOKENS["WRITER_"]}
            await client.hello(hello_of_writer(LIES, **late))
    assert statistics.median(busy_s) <= 6 * statistics.median(quiet_s)
    assert grown_bytes < 256 * MIB
