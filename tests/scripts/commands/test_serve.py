"""`headrace serve` as its users meet it: real processes, signals, and one line for each mistake."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from command_line import CommandLine
from file_modes import open_to_others, open_umask
from hellos import hello_of_nobody

from headrace.paramserver.config.data_dir import MANIFEST_NAME, is_in_use
from headrace.paramserver.rpc.address import parse_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import UnauthorizedError, UnavailableError
from headrace.schemas.extras import install_command


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("HEADRACE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess.start(tmp_path / "data", shards=2) as running:
        yield running


def _ask(address: str, token: str | None = None) -> tuple[Any, Any]:
    """Return one shard's answers to hello and status."""

    async def ask() -> tuple[Any, Any]:
        async with await ParamServerClient.connect(*parse_address(address, default_port=0), timeout_s=60) as client:
            request = hello_of_nobody(token=token)
            return await client.hello(request, timeout_s=60), await client.status(timeout_s=60)

    return asyncio.run(ask())


def _addresses(server: ServerProcess) -> list[str]:
    return [f"{shard.host}:{shard.port}" for shard in _ask(server.address)[0].shards]


def _messages(server: ServerProcess) -> list[str]:
    return [fact["message"] for fact in server.read_log()]


def _processes(server: ServerProcess) -> list[psutil.Process]:
    return [psutil.Process(pid) for pid in (server.pid, *server.shard_pids)]


def _assert_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=60)
    # An orphan's new parent may take its time to reap it.
    assert all(process.status() == psutil.STATUS_ZOMBIE for process in alive)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_starts_and_stops(tmp_path: Path, number: signal.Signals) -> None:
    """A server answers hello on each shard with all addresses, and a signal ends it with exit code 0."""
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        manifest = json.loads((tmp_path / "data" / MANIFEST_NAME).read_text())
        for index, address in enumerate(_addresses(server)):
            hello, status = _ask(address)
            assert (hello.shard, hello.server_id, len(hello.shards)) == (index, manifest["server_id"], 2)
            assert status.pid == server.shard_pids[index]
        processes = _processes(server)
        os.kill(server.pid, number)
        assert server.wait() == 0
        _assert_gone(processes)
        assert _messages(server)[0] == "server starts"
        assert _messages(server)[-1] == "server has stopped"
        assert not [fact for fact in server.read_log() if fact["level"] in ("warning", "error", "critical")]
    assert not is_in_use(tmp_path / "data")


def test_serves_the_same_store_again(tmp_path: Path) -> None:
    """Started again without --shards, the server has the same store with the same shards."""
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        first, _ = _ask(server.address)
    with ServerProcess.start(tmp_path / "data") as server:
        again, _ = _ask(server.address)
    assert (again.server_id, len(again.shards)) == (first.server_id, 2)


def test_second_server_is_refused(server: ServerProcess, run: CommandLine) -> None:
    """A second server on the same directory is refused with one line, and the first goes on."""
    line = run.refused("serve", "--data", server.data_dir, "--port", 0)
    assert line == f"headrace: error: --data {server.data_dir}: in use by another server (pid {server.pid})\n"
    assert _ask(server.address)[0].shard == 0


def test_port_in_use(tmp_path: Path, run: CommandLine) -> None:
    """A taken port is one line with the port and the flag, and nothing is written."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = run.refused("serve", "--data", tmp_path / "data", "--port", port)
    assert f"--port: port {port} of 127.0.0.1, which shard 0 would take, is in use" in line
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "--data is missing"),
        (["--data", "{file}"], "--data {file}: not a directory"),
        (["--data", "{file}/d"], "--data {file}/d: not a directory"),
        (["--data", "{foreign}"], "--data {foreign}: holds 'notes' and no headrace.json"),
        (["--data", "{new}", "--port", "70000"], "--port: 70000 is more than 65535"),
        (["--data", "{new}", "--shards", "0"], "--shards: 0 is less than 1"),
        (["--data", "{new}", "--host", "no-such-host.invalid"], "--host no-such-host.invalid: "),
        (["--data", "{new}", "--host", "192.0.2.1"], "refusing to listen on 192.0.2.1 without protection"),
        (["--data", "{new}", "--host", "192.0.2.1", "--insecure-bind"], "192.0.2.1 is not an address of this machine"),
        (["--data", "{new}", "--host", "0.0.0.0"], "say with --advertise-host"),
        (["--data", "{new}", "--config", "{file}x"], "--config {file}x: No such file or directory"),
        (["--data", "{new}", "--token-file", "{file}x"], "token file {file}x: "),
        (
            ["--data", "{new}", "--object-store", "s3://user:secret@bucket"],
            "headrace: error: the URL of an object store has a user or password: everybody",
        ),
        (["--data", "{new}", "--tls-key", "{file}"], "--tls-certificate and --tls-key go together"),
        (["--data", "{new}", "--tls-client-authority", "{file}"], "--tls-client-authority needs --tls-certificate"),
        (["--data", "{new}", "--ready-file", "{file}/r"], "--ready-file {file}/r: Not a directory"),
    ],
)
def test_mistakes(tmp_path: Path, run: CommandLine, arguments: list[str], problem: str) -> None:
    """Each mistake is one line that names the flag, and nothing is written."""
    places = {name: tmp_path / name for name in ("file", "foreign", "new")}
    places["file"].touch()
    places["foreign"].mkdir()
    (places["foreign"] / "notes").touch()
    line = run.refused("serve", *(argument.format(**places) for argument in arguments))
    assert problem.format(**places) in line
    assert not places["new"].exists()


def test_a_missing_client_of_nats_is_named(tmp_path: Path) -> None:
    """A replicated log without its extra is one line that says what to install."""
    code = "import sys\nsys.modules['nats'] = None\nfrom headrace.cli import main\nsys.exit(main(sys.argv[1:]))\n"
    arguments = ["serve", "--data", str(tmp_path / "data"), "--log", "nats://127.0.0.1:4222"]
    done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=100)
    assert done.returncode == 1 and done.stderr.count("\n") == 1
    assert install_command("nats") in done.stderr


def test_unknown_settings(tmp_path: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unknown key in the file or the environment is an error with the nearest name."""
    file = tmp_path / "server.yaml"
    file.write_text("data: d\nprot: 7601\n")
    monkeypatch.setenv("HEADRACE_SERVE_CONFIG", str(file))
    assert f"{file}:2: unknown key 'prot'; did you mean 'port'?" in run.refused("serve")
    monkeypatch.delenv("HEADRACE_SERVE_CONFIG")
    monkeypatch.setenv("HEADRACE_SERVE_SHARD", "2")
    assert "HEADRACE_SERVE_SHARD is no setting; did you mean HEADRACE_SERVE_SHARDS?" in run.refused("serve")


def test_full_disk(tmp_path: Path, run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk at the first start is one line and exit code 3."""

    def fail(_: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", fail)
    line = run.refused("serve", "--data", tmp_path / "data", "--port", 0, code=3)
    assert f"{tmp_path / 'data'}: the disk is full" in line


def test_killed_shard_is_restarted(server: ServerProcess) -> None:
    """A shard killed with SIGKILL is said so and replaced on the same port, while the other goes on."""
    address, other = _addresses(server)[1], _addresses(server)[0]
    killed, kept = server.shard_pids[1], server.shard_pids[0]
    os.kill(killed, signal.SIGKILL)
    hello, status = _ask(address)  # waits in the socket's backlog until somebody serves it
    assert hello.shard == 1
    assert status.pid != killed
    assert _ask(other)[1].pid == kept
    died = next(fact for fact in server.read_log() if fact["message"] == "shard has died and is restarted")
    assert (died["shard"], died["ended_by"]) == (1, "killed by SIGKILL")


def test_hung_shard_is_restarted(tmp_path: Path) -> None:
    """A shard that is stopped is replaced, and answers who has waited; one that runs is left alone."""
    # So long that on a busy machine, too, one that is not stopped has run before.
    with ServerProcess.start(tmp_path / "data", shards=2, hang_timeout_s=5) as server:
        running, hung = server.shard_pids
        addresses = _addresses(server)
        os.kill(hung, signal.SIGSTOP)
        assert _ask(addresses[1])[1].pid != hung
        assert _ask(addresses[0])[1].pid == running
        assert _messages(server).count("shard hangs and is killed") == 1


def test_shard_told_to_end_is_restarted(server: ServerProcess) -> None:
    """A shard that somebody else has ended with SIGTERM is restarted too."""
    told = server.shard_pids[0]
    process = psutil.Process(told)
    process.terminate()
    _assert_gone([process])
    assert _ask(server.address)[1].pid != told


def test_killed_supervisor_leaves_nothing_behind(tmp_path: Path) -> None:
    """When the supervisor is killed with SIGKILL its shards end, and the directory can be served at once."""
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        processes = _processes(server)
        server.kill()
        _assert_gone(processes)
        with ServerProcess.start(tmp_path / "data") as again:
            assert _ask(again.address)[0].shard == 0


def test_shards_hold_the_directory(tmp_path: Path, run: CommandLine) -> None:
    """While a shard of a killed supervisor is still there, no other server gets the directory."""
    with ServerProcess.start(tmp_path / "data") as server:
        shard = psutil.Process(server.shard_pids[0])
        shard.suspend()
        os.kill(server.pid, signal.SIGKILL)
        _assert_gone([psutil.Process(server.pid)])
        assert "in use by another server" in run.refused("serve", "--data", server.data_dir, "--port", 0)
        shard.resume()
        _assert_gone([shard])
        server.kill()


_STARTER = """
import sys, time
from pathlib import Path
from headrace.paramserver.shard.launch import ServerProcess
server = ServerProcess.start(Path(sys.argv[1]), shards=2)
print(server.pid, *server.shard_pids, flush=True)
sys.stdin.read()
"""


def test_server_ends_with_who_started_it(tmp_path: Path) -> None:
    """When the process that launched a server is killed with SIGKILL, nothing of the server remains."""
    starter = subprocess.Popen(
        [sys.executable, "-c", _STARTER, str(tmp_path / "data")], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with starter:
        assert starter.stdout is not None
        processes = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        assert len(processes) == 3
        starter.kill()
        _assert_gone(processes)
    assert not is_in_use(tmp_path / "data")


def test_damaged_store_stops_the_server(tmp_path: Path) -> None:
    """A store that cannot be opened is not retried: it is said, and the exit code is 3."""
    with ServerProcess.start(tmp_path / "data") as server:
        server.stop()
    for current in (tmp_path / "data").rglob("CURRENT"):
        current.write_text("nonsense")
    with pytest.raises(UnavailableError, match="exit code 3: shard's storage has failed; it stops"):
        ServerProcess.start(tmp_path / "data")


def test_token(tmp_path: Path) -> None:
    """With a token file only clients that show the token are answered."""
    file = tmp_path / "token"
    file.write_text("a-token-of-some-length\n")
    file.chmod(0o600)
    with ServerProcess.start(tmp_path / "data", token_file=file) as server:
        with pytest.raises(UnauthorizedError):
            _ask(server.address)
        assert _ask(server.address, "a-token-of-some-length")[0].shard == 0
        assert "a-token-of-some-length" not in server.log_path.read_text()


@pytest.mark.parametrize("is_there", [False, True])
def test_the_directory_is_the_servers_alone(is_there: bool, tmp_path: Path, run: CommandLine) -> None:
    """Other users of the machine reach nothing that a server makes, whatever the umask; what was there stays."""
    data = tmp_path / "data"
    with open_umask():
        if is_there:
            data.mkdir(mode=0o755)
        with ServerProcess.start(data) as server:
            run("snapshot", "create", "--server", server.address, "--now", "--name", "one")
            assert open_to_others(data) == ([f"0755 {data}"] if is_there else [])


def test_help_lists_every_setting(run: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """`headrace serve --help` has a flag for each setting."""
    from headrace.paramserver.config.server_settings import ServerConfig
    from headrace.paramserver.system.settings import flag_of, settings_of

    monkeypatch.setenv("COLUMNS", "200")
    text = run("serve", "--help")
    assert [field.name for field, _ in settings_of(ServerConfig) if flag_of(field.name) not in text] == []
