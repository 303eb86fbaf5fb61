"""A streamer, a reader and commands against a real server with mutual TLS and a token."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from command_line import CommandLine
from own_address import own_address
from watched_server import wait_until

torch = pytest.importorskip("torch")

from spent_deadline import spent_deadline  # noqa: E402 (these need torch)

from headrace.cli import main  # noqa: E402
from headrace.paramserver.reading.reader import EmbeddingReader  # noqa: E402
from headrace.paramserver.rpc.address import parse_address  # noqa: E402
from headrace.paramserver.rpc.security import Token, client_tls_context, load_token  # noqa: E402
from headrace.paramserver.shard.launch import ServerProcess  # noqa: E402
from headrace.schemas.errors import HeadraceError, UnauthorizedError, UnavailableError  # noqa: E402
from headrace.streamer.api import RawEmbeddingStreamer  # noqa: E402

TLS = Path(__file__).parent / "paramserver" / "tls"
SECRET, OTHER = "correct-horse-battery", "staple-staple-staple"
CLIENT = {"tls_certificate": TLS / "client.pem", "tls_key": TLS / "client.key.pem"}
STRANGER = {"tls_certificate": TLS / "stranger.pem", "tls_key": TLS / "stranger.key.pem"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of two shards that asks for a certificate and a token, and has a table."""
    folder = tmp_path_factory.mktemp("protected")
    token = secret_file(folder / "token", SECRET)
    with ServerProcess.start(
        folder / "data",
        shards=2,
        tls_certificate=TLS / "server.pem",
        tls_key=TLS / "server.key.pem",
        tls_client_authority=TLS / "authority.pem",
        token_file=token,
        environ={name: value for name, value in os.environ.items() if name != "HEADRACE_TOKEN"},
    ) as running:
        with streamer(running, **CLIENT, token_file=token) as writer:
            model = torch.nn.ModuleDict({"rows": torch.nn.EmbeddingBag(100, 8, mode="sum", sparse=True)})
            writer.attach(model, torch.optim.Adagrad(model.parameters(), lr=0.1), publish="updated")
        yield running


@pytest.fixture(autouse=True)
def no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Begin each test without a token in the environment."""
    monkeypatch.delenv("HEADRACE_TOKEN", raising=False)


def secret_file(path: Path, secret: str) -> Path:
    path.touch(mode=0o600)
    path.write_text(secret + "\n")
    return path


def streamer(server: ServerProcess, **settings: Any) -> RawEmbeddingStreamer:
    """Return a streamer that speaks TLS; `settings` say what it shows."""
    defaults = {"tls": True, "tls_authority": TLS / "authority.pem", "connect_timeout_s": 60.0}
    return RawEmbeddingStreamer(server.address, run="protected", **(defaults | settings))


async def connected(server: ServerProcess, token: Token | None) -> EmbeddingReader:
    """Return a reader that shows a certificate and a token."""
    context = client_tls_context(
        authority=TLS / "authority.pem", certificate=CLIENT["tls_certificate"], key=CLIENT["tls_key"]
    )
    return await EmbeddingReader.connect(server.address, ssl_context=context, token=token)


async def refused_by(server: ServerProcess) -> int:
    """Return how often the shards say that they have refused somebody."""
    async with await connected(server, Token(SECRET)) as reader:
        return sum(status.num_refused for status in await reader.status())


@pytest.mark.parametrize("source", ["file", "environment"])
def test_rows_travel_with_certificate_and_token(
    server: ServerProcess, source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the right ones a trainer streams over TLS, and a reader gets back what it has trained."""
    file = secret_file(tmp_path / "token", SECRET)
    if source == "environment":
        monkeypatch.setenv("HEADRACE_TOKEN", SECRET)
    shown = {"token_file": file} if source == "file" else {}
    model = torch.nn.ModuleDict({f"{source}_rows": torch.nn.EmbeddingBag(100, 8, mode="sum", sparse=True)})
    table = model[f"{source}_rows"]
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)
    with streamer(server, **CLIENT, **shown) as running:
        running.attach(model, optimizer, publish="updated")
        for _ in range(3):
            optimizer.zero_grad()
            table(torch.arange(100).reshape(10, 10)).sum().backward()
            optimizer.step()
        running.flush()

    async def read() -> Any:
        async with await connected(server, load_token(path=file, environ={})) as reader:
            return await reader.get(f"{source}_rows.weight", list(range(100)))

    assert (asyncio.run(read()).weights == table.weight.detach().numpy()).all()


def test_a_token_does_not_follow_a_redirect_to_where_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server on loopback names an address beyond it: without TLS no client shows its token there, unless told to."""
    token = secret_file(tmp_path / "token", SECRET)
    beyond, run = own_address(), CommandLine(capsys)
    with ServerProcess.start(
        tmp_path / "data", shards=2, host="0.0.0.0", advertise_host=beyond, insecure_bind=True, token_file=token
    ) as server:
        seed = f"127.0.0.1:{parse_address(server.address)[1]}"
        plain = {"token_file": token, "connect_timeout_s": 60.0}
        with pytest.raises(UnauthorizedError, match=f"not sent to {beyond}:.* --insecure-token"):
            RawEmbeddingStreamer(seed, run="protected", **plain).close()
        RawEmbeddingStreamer(seed, run="protected", **plain, insecure_token=True).close()
        monkeypatch.setenv("HEADRACE_TOKEN", SECRET)

        async def read(*, insecure: bool) -> None:
            shown = load_token(path=None, environ=os.environ, insecure_token=insecure)
            async with await EmbeddingReader.connect(seed, token=shown) as reader:
                await reader.status()

        with pytest.raises(UnauthorizedError, match="--insecure-token"):
            asyncio.run(read(insecure=False))
        asyncio.run(read(insecure=True))
        assert "--insecure-token" in run.refused("table", "list", "--server", seed)
        run("table", "list", "--server", seed, "--insecure-token")


@pytest.mark.parametrize(
    ("settings", "secret", "kind", "words"),
    [
        pytest.param(CLIENT, OTHER, UnauthorizedError, "the token is wrong", id="wrong token"),
        pytest.param(CLIENT, None, UnauthorizedError, "a token is required", id="no token"),
        pytest.param({}, SECRET, UnavailableError, "may ask for a client certificate", id="no certificate"),
        pytest.param(STRANGER, SECRET, UnavailableError, "may ask for a client certificate", id="another certificate"),
        pytest.param(
            CLIENT | {"tls_authority": TLS / "stranger.pem"}, SECRET, UnauthorizedError, "TLS", id="another server"
        ),
        pytest.param({"tls": False, "tls_authority": None}, SECRET, UnavailableError, "no param", id="no TLS"),
    ],
)
def test_who_may_not_is_told_so_in_one_line(
    server: ServerProcess,
    settings: dict[str, Any],
    secret: str | None,
    kind: type[HeadraceError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A trainer with the wrong ones fails at its start with a clear line; the server counts it and logs who it was."""
    caplog.set_level(logging.DEBUG)
    before = asyncio.run(refused_by(server))
    if secret is not None:
        monkeypatch.setenv("HEADRACE_TOKEN", secret)
    with spent_deadline(), pytest.raises(kind, match=words) as error:
        streamer(server, **settings).close()
    assert "\n" not in str(error.value)
    # A client that hangs up knows of it before the server does.
    wait_until(lambda: asyncio.run(refused_by(server)) > before, "what the server counts")
    warnings = [fact["message"] for fact in server.read_log() if fact.get("level") == "warning"]
    assert any(line.startswith("127.0.0.1:") for line in warnings)
    log = server.log_path.read_text()
    for text in (caplog.text, str(error.value), log):
        assert SECRET not in text
        assert OTHER not in text


@pytest.mark.parametrize(
    "command", ["status", "verify", "expire --dry-run --policy=max_rows=1", "snapshot create --now"]
)
def test_commands_show_their_credentials(
    server: ServerProcess, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command takes them from its flags; with the wrong ones it is one line and exit code 1."""
    flags = ["--tls-authority", str(TLS / "authority.pem")]
    own = ["--tls-certificate", str(TLS / "client.pem"), "--tls-key", str(TLS / "client.key.pem")]
    right = ["--token-file", str(secret_file(tmp_path / "right", SECRET))]
    wrong = ["--token-file", str(secret_file(tmp_path / "wrong", OTHER))]
    words = [*command.split(), "--server", server.address]
    assert main([*words, *flags, *own, *right]) == 0
    capsys.readouterr()
    for arguments in ([*flags, *own, *wrong], [*flags, *own], [*flags, *right]):
        assert main([*words, *arguments]) == 1
        printed = capsys.readouterr()
        assert printed.err.count("\n") == 1
        assert printed.err.startswith("headrace: error: ")
        assert OTHER not in printed.err + printed.out


def test_each_role_has_its_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A reader's token opens nothing to write with, a writer's nothing to administer with, the first one everything."""
    secrets = {"reader": SECRET, "writer": OTHER, "admin": "clip-clip-clip-clip"}
    files = {role: secret_file(tmp_path / role, secret) for role, secret in secrets.items()}
    tokens = {
        "token_file": files["admin"],
        "writer_token_file": files["writer"],
        "reader_token_file": files["reader"],
    }
    with ServerProcess.start(tmp_path / "data", **tokens) as server:
        for number, role in enumerate(secrets):
            shown = ["--token-file", str(files[role])]
            assert main(["status", "--server", server.address, *shown]) == 0
            try:
                RawEmbeddingStreamer(server.address, run=role, token_file=files[role]).close()
                is_let_in = True
            except UnauthorizedError as exc:
                assert "the token is wrong for role writer: give that role's" in str(exc)
                is_let_in = False
            assert is_let_in == (number >= 1)
            capsys.readouterr()
            is_let_in = main(["snapshot", "create", "--server", server.address, "--now", *shown]) == 0
            assert is_let_in == (number >= 2)
            assert is_let_in or "the token is wrong for role admin" in capsys.readouterr().err
        log = server.log_path.read_text()
        assert not [secret for secret in secrets.values() if secret in log]
