"""`headrace replica` as a process: reads over the wire, refusals, health, start and end."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from file_modes import open_to_others
from held_ports import hold_ports
from replica_answers import HALF, IDS, SPEC, call, told, values, write
from replica_endpoint import Endpoint, get, replica_endpoint
from stored_rows import read_rows
from watched_server import WAIT_S, wait_until

from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.replica.endpoint import replica_process
from headrace.paramserver.replica.endpoint.process_config import EndpointConfig
from headrace.paramserver.replica.endpoint.replica_process import ReplicaProcess
from headrace.paramserver.rpc.security import Token, client_tls_context
from headrace.paramserver.shard.launch import ServerProcess
from headrace.paramserver.system.durable import ReadyFile
from headrace.paramserver.system.log_lines import RepeatFilter
from headrace.paramserver.system.settings import flag_of, settings_of, show_default
from headrace.schemas.errors import UnauthorizedError, UnavailableError, UnknownTableError
from headrace.schemas.tables import TableSpec
from headrace.scripts.commands import replica as replica_command

TLS = Path(__file__).parents[2] / "paramserver" / "tls"
TOKEN = "a-token-of-some-length"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path_factory.mktemp("server") / "data") as running:
        write(running, 1, deleted=np.array([1, 3]))
        yield running


@pytest.fixture(scope="module")
def endpoint(server: ServerProcess, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoint]:
    folder = tmp_path_factory.mktemp("replica")
    with replica_endpoint(folder, server.address, "--max-frame-bytes=64KiB", "--max-client-bytes=256KiB") as running:
        yield running


def test_precision_and_disk(tmp_path: Path, server: ServerProcess) -> None:
    """Rows that are kept smaller, or on disk, are served in the table's own type."""
    arguments = ["--precision=fp16", f"--disk-tables={HALF.fqn}", "--disk-table-bytes=1MiB", f"--disk-dir={tmp_path}/d"]
    with replica_endpoint(tmp_path, server.address, *arguments) as endpoint:
        mine, theirs = (read_rows(address, SPEC.fqn, IDS).weights for address in (endpoint.address, server.address))
        assert mine.dtype == np.float32
        assert np.array_equal(mine, theirs.astype(np.float16).astype(np.float32))
        assert list((tmp_path / "d").rglob("CURRENT")), "no table is on disk"
        assert open_to_others(tmp_path / "d") == []
        half = read_rows(endpoint.address, HALF.fqn, np.arange(50)).weights
        assert half.tobytes() == read_rows(server.address, HALF.fqn, np.arange(50)).weights.tobytes()


def test_status(endpoint: Endpoint, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`headrace status` shows how fresh a replica is, and neither a log nor writers."""
    monkeypatch.setenv("COLUMNS", "160")
    text = run("status", "--server", endpoint.address)
    words = ("replica of store", "ready", "Replica", "Follows", "Tables", SPEC.fqn)
    absent = ("not ready", "Writers", "No writers", "rows written", "log seq")
    assert [word in text for word in (*words, *absent)] == [True] * len(words) + [False] * len(absent)
    reply = told(endpoint.address)
    replica, last_seq = reply.replica, reply.replica.shards[0].last_seq
    assert (replica.is_ready, replica.failure, replica.visible_epoch) == (True, None, 1)
    assert (reply.log_seq, reply.applied_seq) == (last_seq, last_seq)
    assert {table.spec.fqn: table.num_rows_estimate for table in reply.tables} == {SPEC.fqn: 500, HALF.fqn: 4}


def test_updates_become_visible(tmp_path: Path, server: ServerProcess) -> None:
    """Updates become visible while the replica runs, in whole steps."""
    with replica_endpoint(tmp_path, server.address, "--consistency=step", f"--tables={SPEC.fqn}, no.such") as endpoint:
        begun_at = told(endpoint.address).replica.visible_step
        write(server, begun_at + 1)
        wait_until(lambda: told(endpoint.address).replica.visible_step == begun_at + 1)
        assert read_rows(endpoint.address, SPEC.fqn, IDS).weights.tobytes() == values(begun_at + 1).tobytes()
        delay_s = told(endpoint.address).replica.shards[0].delay_p50_s
        assert 0 < delay_s < WAIT_S
        with pytest.raises(UnknownTableError):
            read_rows(endpoint.address, HALF.fqn, [1])
        (warning,) = (fact["message"] for fact in endpoint.facts() if fact["level"] == "warning")
        known = "there are 'item.weight', 'user.weight'"
        assert warning == f"replica: tables: 'no.such' is no table of the server yet; {known}"


def test_readiness_follows_known_and_missing_updates(tmp_path: Path, run: CommandLine) -> None:
    """An unfinished step makes the replica unready, over HTTP and the wire, until it ends."""
    port = hold_ports()
    with ServerProcess.start(tmp_path / "data", port=port) as server:
        write(server, 1)
        with replica_endpoint(tmp_path, server.address, "--consistency=step", "--max-lag-s=300ms") as endpoint:
            assert get(endpoint.health, "/readyz") == (200, "ready: epoch 1, step 1, 0.000 s behind\n")
            write(server, 2, ends_step=False)
            wait_until(lambda: get(endpoint.health, "/readyz")[0] == 503)
            assert "that are not visible, the bound is 0.3 s" in get(endpoint.health, "/readyz")[1]
            assert get(endpoint.health, "/healthz") == (200, "alive\n")
            replica = told(endpoint.address).replica
            assert (replica.is_ready, replica.visible_step, replica.lag_steps) == (False, 1, 1)
            assert replica.lag_s > 0.3 and "that are not visible" in replica.failure
            # Lookups are answered all the same.
            assert read_rows(endpoint.address, SPEC.fqn, IDS).weights.tobytes() == values(1).tobytes()
            # The server goes away: what is known to be missing stays known.
            server.kill()
            assert get(endpoint.health, "/readyz")[0] == 503
            with ServerProcess.start(tmp_path / "data", port=port) as server:
                write(server, 3)
                wait_until(lambda: get(endpoint.health, "/readyz")[0] == 200)
                assert told(endpoint.address).replica.visible_step == 3
                wait_until(lambda: endpoint.facts()[-1]["message"] == "replica is ready again")
                server.kill()
                # Nothing is known to be missing now. A request to the ending server may first fail in another way.
                refused = f"no connection to {server.address}: Connection refused"
                wait_until(lambda: refused in get(endpoint.health, "/readyz")[1])
                assert get(endpoint.health, "/readyz")[0] == 200
                away = told(endpoint.address).replica
                assert away.is_ready and refused in away.failure
                shown = run("status", "--server", endpoint.address)
                assert "\nready\n" in shown and f"{server.address} has not been reached for" in shown
                assert "headrace_replica_up_to_date 0.0" in get(endpoint.health, "/metrics")[1]


def test_it_waits_for_the_server(tmp_path: Path) -> None:
    """Started before its server, a replica is alive and not ready, says why, and becomes ready."""
    port, own, health = hold_ports(), hold_ports(), hold_ports()
    arguments = [f"--port={own}", f"--metrics-port={health}"]
    with replica_endpoint(tmp_path, f"127.0.0.1:{port}", *arguments, wait=False) as endpoint:
        endpoint.wait_logged("is tried again")
        assert get(f"127.0.0.1:{health}", "/healthz")[0] == 200
        status, text = get(f"127.0.0.1:{health}", "/readyz")
        assert status == 503 and "not ready: starting" in text
        assert f"no connection to 127.0.0.1:{port}: Connection refused" in text
        with pytest.raises(UnavailableError, match="this replica has not begun to serve: starting"):
            call(f"127.0.0.1:{own}", "")
        with ServerProcess.start(tmp_path / "data", port=port) as server:
            write(server, 1)
            endpoint.wait_ready()
            # It may have reached the server before the first rows, and then it has begun without a table.
            wait_until(lambda: get(endpoint.health, "/readyz")[0] == 200)
            # Not later: a server that ends slowly is away again.
            away, back = (fact["message"] for fact in endpoint.facts() if fact["level"] == "warning")
    assert f"127.0.0.1:{port} has not been reached for " in away and f"{port} is reached again, after " in back


def test_stopped_before_it_has_begun(tmp_path: Path) -> None:
    """A signal ends a replica that still waits for its server, without an error."""
    with replica_endpoint(tmp_path, f"127.0.0.1:{hold_ports()}", wait=False) as endpoint:
        endpoint.wait_logged("is tried again")
        endpoint.process.send_signal(signal.SIGTERM)
        assert endpoint.process.wait(WAIT_S) == 0


def test_a_server_that_never_comes(tmp_path: Path) -> None:
    """After its timeout the replica gives up with one line that says what was tried."""
    address = f"127.0.0.1:{hold_ports()}"
    # Long enough for the first attempt on a busy machine, which must fail before the deadline.
    with replica_endpoint(tmp_path, address, "--start-timeout-s=3", wait=False) as endpoint:
        assert endpoint.process.wait(WAIT_S) == 1
        log = endpoint.log.read_text()
        last = log.splitlines()[-1]
        assert last.startswith("headrace: error: given up after 3 s (--start-timeout-s): ")
        assert f"no connection to {address}: Connection refused" in last and "Traceback" not in log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, None], ids=str)
def test_drains_and_stops(server: ServerProcess, tmp_path: Path, number: signal.Signals | None) -> None:
    """A signal, or with --watch-stdin the end of stdin, ends it with 0, and no file stays."""
    with replica_endpoint(tmp_path, server.address) as endpoint:
        read_rows(endpoint.address, SPEC.fqn, IDS)
        if number is None:
            assert endpoint.process.stdin is not None
            endpoint.process.stdin.close()
        else:
            endpoint.process.send_signal(number)
        assert endpoint.process.wait(WAIT_S) == 0
        assert not endpoint.ready_file.exists()
        assert [fact["message"] for fact in endpoint.facts()] == ["replica starts", "replica is ready", "replica stops"]
        assert endpoint.facts()[1]["address"] == endpoint.address


async def test_a_second_signal_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first signal drains; the second ends the process at once and removes the ready file."""
    path, ended = tmp_path / "ready.json", []
    ready_file = ReadyFile(path)
    ready_file.write({})
    monkeypatch.setattr(replica_process.os, "_exit", ended.append)
    process = ReplicaProcess(EndpointConfig(server="h"), environ={}, ready_file=ready_file)
    process._on_signal(signal.SIGTERM)
    assert process._stopping.is_set() and path.exists() and not ended
    process._on_signal(signal.SIGINT)
    assert ended == [130] and not path.exists()


def test_tls_and_token(tmp_path: Path) -> None:
    """A replica shows its token to the server, and requires one of its own readers, over TLS."""
    file = tmp_path / "token"
    file.write_text(TOKEN)
    file.chmod(0o600)
    tls = [f"--tls-certificate={TLS / 'server.pem'}", f"--tls-key={TLS / 'server.key.pem'}"]
    with ServerProcess.start(tmp_path / "data", token_file=file) as server:
        arguments = [*tls, f"--token-file={file}", f"--server-token-file={file}"]
        with replica_endpoint(tmp_path, server.address, *arguments) as endpoint:
            context = client_tls_context(authority=TLS / "authority.pem")

            async def hello_with(token: Token | None) -> dict[str, TableSpec]:
                security = {"ssl_context": context, "token": token}
                async with await EmbeddingReader.connect(endpoint.address, **security, timeout_s=WAIT_S) as reader:
                    return reader.tables

            assert asyncio.run(hello_with(Token(TOKEN))) == {}
            with pytest.raises(UnauthorizedError, match="a token is required for role reader"):
                asyncio.run(hello_with(None))
            assert TOKEN not in endpoint.log.read_text()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "--server is missing"),
        (["--server=a b"], "server: 'a b' is not an address"),
        (["--server=h", "--consistency=loose"], "--consistency: 'loose' is not one of latest, step"),
        (["--server=h", "--port=7", "--metrics-port=7"], "metrics_port: 7 is the port for Thrift clients too"),
        (["--server=h", "--tables=a,,b"], "tables: 'a,,b' has an empty name"),
        (["--server=h", "--host=0.0.0.0"], "say with --advertise-host"),
        (["--server=h", "--host=0.0.0.0", "--advertise-host=me"], "refusing to listen on 0.0.0.0 without protection"),
        (["--server=h", "--max-frame-bytes=1GiB"], "max_client_bytes is less than max_frame_bytes"),
        (["--server=h", "--tls-key=/k"], "--tls-certificate and --tls-key go together"),
        (["--server=h", "--server-tls-key=/k"], "a client's TLS certificate and key go together"),
        (["--server=h", "--server-token-file=/absent"], "token file /absent"),
        (["--server=h", "--ready-file=/absent/x"], "--ready-file /absent/x"),
        (["--server=h", "--config=/absent"], "--config /absent"),
    ],
)
def test_mistakes(arguments: list[str], problem: str, run: CommandLine) -> None:
    """Each mistake is one line that names the setting."""
    assert problem in run.refused("replica", *arguments)


def test_ports_that_are_taken(run: CommandLine) -> None:
    """A port in use is one line with the port and its flag, before anything is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for flags in ([f"--port={port}"], ["--port=0", f"--metrics-port={port}"]):
            problem = f"port {port} of 127.0.0.1, which the replica would take, is in use"
            assert f"{flags[-1].partition('=')[0]}: {problem}" in run.refused("replica", "--server=h", *flags)


def test_repeated_warnings_are_counted(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A replica throttles repeated log lines, as a server does."""

    async def end(*_: object) -> int:
        return 0

    root = logging.getLogger()
    for name, value in (("handlers", root.handlers[:]), ("level", root.level)):
        monkeypatch.setattr(root, name, value)
    monkeypatch.setattr(replica_command, "_run", end)
    run("replica", "--server=h")
    (handler,) = root.handlers
    assert any(isinstance(each, RepeatFilter) for each in handler.filters)


def test_unknown_settings(tmp_path: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unknown keys in file and environment are one line with the nearest known one."""
    (tmp_path / "replica.yaml").write_text("server: h\nmax_lag: 3\n")
    line = run.refused("replica", f"--config={tmp_path / 'replica.yaml'}")
    assert "unknown key 'max_lag'; did you mean 'max_lag_s'?" in line
    monkeypatch.setenv("HEADRACE_REPLICA_PROT", "1")
    line = run.refused("replica", "--server=h")
    assert "HEADRACE_REPLICA_PROT is no setting; did you mean HEADRACE_REPLICA_PORT?" in line


def test_help_lists_every_setting(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`--help` has a flag for each setting, and `docs/operations.md` a row."""
    monkeypatch.setenv("COLUMNS", "200")
    text = run("replica", "--help")
    assert [field.name for field, _ in settings_of(EndpointConfig) if flag_of(field.name) not in text] == []
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text("utf-8")
    for field, known in settings_of(EndpointConfig):
        value = ", ".join(known.choices) or known.kind.value
        assert f"| `{flag_of(field.name)}` | {value} | {show_default(field, known)} | {known.help} |" in page
