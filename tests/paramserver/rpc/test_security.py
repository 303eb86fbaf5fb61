"""TLS, tokens, roles and safe addresses."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
from pathlib import Path
from typing import Any

import pytest
from fake_service import WAIT_S, batch, hello_request, read, serve

from headrace.cli import main
from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.frame_writer import FrameWriter
from headrace.paramserver.rpc.security import (
    AccessPolicy,
    Protection,
    Token,
    check_bind,
    client_tls_context,
    load_token,
    server_tls_context,
)
from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.errors import ConfigError, HeadraceError, UnauthorizedError, UnavailableError
from headrace.schemas.idl import idl

TLS = Path(__file__).parents[1] / "tls"
CERTIFIED = {"tls_certificate": TLS / "server.pem", "tls_key": TLS / "server.key.pem"}
SECRET, OTHER = "correct-horse-battery", "staple-staple-staple"
READER, WRITER, ADMIN = idl.Role.READER, idl.Role.WRITER, idl.Role.ADMIN


def server_tls(*, mutual: bool = False) -> Any:
    """Return the test server's context."""
    authority = TLS / "authority.pem" if mutual else None
    return server_tls_context(certificate=TLS / "server.pem", key=TLS / "server.key.pem", client_authority=authority)


def client_tls(name: str | None = None) -> Any:
    """Return a client's context, with the certificate of that name."""
    own = {"certificate": TLS / f"{name}.pem", "key": TLS / f"{name}.key.pem"} if name else {}
    return client_tls_context(authority=TLS / "authority.pem", **own)


@pytest.mark.parametrize("size_bytes", [10, 3_000_000])
async def test_calls_over_tls(size_bytes: int) -> None:
    """Calls work over TLS as without, with long frames in both directions."""
    async with serve(ssl_context=server_tls()) as served:
        served.host = "localhost"
        async with await served.connect(ssl_context=client_tls()) as client:
            served.service.reply_bytes = size_bytes
            for n in range(5):
                await client.set_embeddings(batch(n, size_bytes=size_bytes))
                reply = await client.get_embeddings(read("t", bytes([n])))
                assert bytes(reply.weights) == bytes([n]) * size_bytes
        assert served.service.num_bytes == 5 * size_bytes


class _Writing(asyncio.Protocol):
    """A protocol that only writes."""

    def __init__(self) -> None:
        self.writer = FrameWriter(timeout_s=WAIT_S)
        self.connected = asyncio.Event()

    def connection_made(self, transport: Any) -> None:
        self.writer.attach(transport)
        self.connected.set()

    def pause_writing(self) -> None:
        self.writer.pause()

    def resume_writing(self) -> None:
        self.writer.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self.writer.detach()


async def test_a_reader_that_leaves_inside_a_frame(caplog: pytest.LogCaptureFixture) -> None:
    """After a TLS connection is lost no more is written, of which asyncio would warn."""
    protocol, loop = _Writing(), asyncio.get_running_loop()
    loop.slow_callback_duration = math.inf  # a slow machine is remarked on, too
    server = await loop.create_server(lambda: protocol, "127.0.0.1", 0, ssl=server_tls())
    port = server.sockets[0].getsockname()[1]
    _, leaver = await asyncio.open_connection("127.0.0.1", port, ssl=client_tls(), server_hostname="shard.test")
    await asyncio.wait_for(protocol.connected.wait(), WAIT_S)
    leaver.get_extra_info("socket").shutdown(socket.SHUT_RDWR)
    with caplog.at_level(logging.WARNING), pytest.raises(UnavailableError, match="lost"):
        await protocol.writer.send([bytes(16 << 20)])
    assert caplog.messages == []
    leaver.transport.abort()
    server.close()


@pytest.mark.parametrize("hangs", [False, True])
async def test_a_connection_over_tls_may_be_closed_twice(hangs: bool) -> None:
    """Concurrent and repeated calls of `close` end, even if the server hangs."""

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        if hangs:
            writer.transport.pause_reading()

    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(accept, "127.0.0.1", 0, ssl=server_tls())
    client = await ParamServerClient.connect(
        *server.sockets[0].getsockname(), ssl_context=client_tls(), server_hostname="shard.test"
    )
    async with asyncio.timeout(WAIT_S):
        await asyncio.gather(client.close(), client.close())
        await client.close()
    assert client.is_closed
    server.close()
    for writer in writers:
        writer.transport.abort()


async def test_certificate_name_is_checked() -> None:
    """A certificate for another name is refused; the expected name can be given."""
    async with serve(ssl_context=server_tls()) as served:
        with pytest.raises(UnauthorizedError, match=r"TLS with .*wrong\.test"):
            await served.connect(ssl_context=client_tls(), server_hostname="wrong.test")
        async with await served.connect(ssl_context=client_tls(), server_hostname="shard.test") as client:
            await client.status()


async def test_a_trailing_dot_is_not_in_the_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host may have a trailing dot, which spares a resolver its search domains."""
    look_up = socket.getaddrinfo

    def getaddrinfo(host: str, *args: Any, **kwargs: Any) -> Any:
        return look_up("127.0.0.1" if host == "shard.test." else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    async with (
        serve(ssl_context=server_tls()) as served,
        await ParamServerClient.connect("shard.test.", served.port, ssl_context=client_tls()) as client,
    ):
        await client.hello(hello_request())


async def test_certificate_of_an_unknown_authority_is_refused() -> None:
    """A server's certificate must be signed by the given authority."""
    async with serve(ssl_context=server_tls()) as served:
        context = client_tls_context(authority=TLS / "stranger.pem")
        with pytest.raises(UnauthorizedError, match="TLS with"):
            await served.connect(ssl_context=context)


async def test_mutual_tls() -> None:
    """With a client authority only clients with its certificates get in; the others are counted."""
    async with serve(ssl_context=server_tls(mutual=True)) as served:
        async with await served.connect(ssl_context=client_tls("client")) as client:
            await client.status()
        for name in (None, "stranger"):
            with pytest.raises(HeadraceError):  # TLS 1.3 tells the client only after its handshake
                stranger = await served.connect(says_hello=False, ssl_context=client_tls(name))
                async with stranger:
                    await stranger.status()
        assert served.server.stats.num_unauthorized + served.server.stats.num_malformed == 2
        assert served.server.num_connections == 0


async def test_a_client_that_hangs_up_in_a_handshake(caplog: pytest.LogCaptureFixture) -> None:
    """The log line has a reason, though asyncio's error has none."""
    async with serve(ssl_context=server_tls()) as served:
        reader, writer = await asyncio.open_connection(served.host, served.port)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
        await writer.wait_closed()
    assert "TLS handshake: the client hung up" in caplog.text


async def test_plaintext_to_a_tls_port_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A client without TLS gets an error of one line and does not hang; the server's log names what came."""
    async with serve(ssl_context=server_tls()) as served:
        with pytest.raises(UnavailableError, match="before any answer; it is stopping, speaks TLS, or is no Headrace"):
            await served.connect()
        assert served.server.stats.num_malformed == 1
    assert "TLS handshake: the peer does not speak TLS and this side does: turn it on or off on both" in caplog.text


async def test_http_to_a_tls_port_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """A browser, or a probe, that was given the port for Thrift."""
    async with serve(ssl_context=server_tls()) as served:
        reader, writer = await asyncio.open_connection(served.host, served.port)
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        assert await asyncio.wait_for(reader.read(), WAIT_S) == b""
        writer.close()
        await writer.wait_closed()
    assert "TLS handshake: the peer speaks HTTP: metrics and health have ports of their own" in caplog.text


async def test_token_opens_its_role(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong or missing token is refused, counted and logged without the secret."""
    async with serve(access=AccessPolicy(Token(SECRET))) as served:
        client = await served.connect(says_hello=False)
        for shown in (None, OTHER, ""):
            with pytest.raises(UnauthorizedError) as error:
                await client.hello(hello_request(token=shown))
            assert not shown or shown not in str(error.value)
        with pytest.raises(UnauthorizedError, match="before hello"):
            await client.set_embeddings(batch(1))
        await client.hello(hello_request(token=SECRET))
        await client.set_embeddings(batch(2))
        await client.close()
        assert served.server.stats.num_unauthorized == 4
        assert served.service.begun == [2]
    text = caplog.text
    assert "unauthorized" in text
    assert "127.0.0.1:" in text
    assert SECRET not in text
    assert OTHER not in text


async def test_a_reader_may_not_write() -> None:
    """Roles are enforced with and without tokens."""
    async with serve() as served, await served.connect(says_hello=False) as client:
        await client.hello(hello_request(role=READER))
        await client.get_embeddings(read("t"))
        with pytest.raises(UnauthorizedError, match="setEmbeddings needs role writer"):
            await client.set_embeddings(batch(1))
        with pytest.raises(UnauthorizedError, match="no role 9"):
            await client.hello(hello_request(role=9))


def test_tokens_by_role() -> None:
    """A higher role's token opens the lower roles, and not vice versa."""
    policy = AccessPolicy({READER: Token(SECRET), ADMIN: Token(OTHER)})
    policy.check_hello(READER, SECRET)
    for role in (READER, WRITER, ADMIN):
        policy.check_hello(role, OTHER)
    for role in (WRITER, ADMIN):
        with pytest.raises(UnauthorizedError, match="wrong"):
            policy.check_hello(role, SECRET)
    with pytest.raises(UnauthorizedError):
        AccessPolicy({READER: Token(SECRET)}).check_hello(ADMIN, SECRET)


def test_unlisted_methods_need_an_admin() -> None:
    """A new method is closed until it is given a role."""
    policy = AccessPolicy(Token(SECRET))
    policy.check_call(ADMIN, "somethingNew")
    with pytest.raises(UnauthorizedError, match="admin"):
        policy.check_call(WRITER, "somethingNew")


def test_following_takes_the_role_of_a_reader() -> None:
    """A connection without a hello may not follow."""
    policy = AccessPolicy(Token(SECRET))
    policy.check_call(READER, "fetchUpdates")
    with pytest.raises(UnauthorizedError):
        policy.check_call(None, "fetchUpdates")


@pytest.mark.parametrize(
    "secret", ["short", "with a space in it", "tab\tin-the-middle-of", "ünicode-ünicode-ü", "x" * 5000]
)
def test_bad_tokens_are_refused_without_being_shown(secret: str) -> None:
    """The error about a bad token does not repeat it."""
    with pytest.raises(ConfigError) as error:
        Token(secret)
    assert secret not in str(error.value)


def test_token_stays_out_of_texts() -> None:
    """No representation of a token shows it."""
    token = Token(SECRET)
    assert all(SECRET not in text for text in (repr(token), str(token), f"{token}"))
    assert not token.matches("\ud800")


def test_token_comes_from_file_or_environment(tmp_path: Path) -> None:
    """A file wins over the environment, and is refused if others may read it."""
    path = tmp_path / "token"
    path.write_text(f"{SECRET}\n")
    path.chmod(0o600)
    loaded = load_token(path=path, environ={"HEADRACE_TOKEN": OTHER})
    assert loaded is not None
    assert loaded.matches(SECRET)
    from_environment = load_token(path=None, environ={"HEADRACE_TOKEN": OTHER})
    assert from_environment is not None
    assert from_environment.matches(OTHER)
    assert load_token(path=None, environ={}) is None
    path.chmod(0o644)
    with pytest.raises(ConfigError, match="chmod 600"):
        load_token(path=path, environ={})
    with pytest.raises(ConfigError, match="missing"):
        load_token(path=tmp_path / "missing", environ={})
    with pytest.raises(ConfigError, match=r"^HEADRACE_TOKEN: a token must have 16"):
        load_token(path=None, environ={"HEADRACE_TOKEN": "short"})


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost"])
def test_loopback_needs_no_protection(host: str) -> None:
    """Any server may listen on loopback."""
    check_bind(host, is_protected=False, allow_insecure=False)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "10.0.0.1", "shard.example"])
def test_other_addresses_need_protection_or_consent(host: str) -> None:
    """On other addresses a server needs protection, or the user's consent."""
    check_bind(host, is_protected=True, allow_insecure=False)
    check_bind(host, is_protected=False, allow_insecure=True)
    with pytest.raises(ConfigError, match="--insecure-bind"):
        check_bind(host, is_protected=False, allow_insecure=False)


def test_bad_tls_files_are_named(tmp_path: Path) -> None:
    """The error names a file that is missing or not PEM."""
    with pytest.raises(ConfigError, match=r"nothing\.pem"):
        server_tls_context(certificate=tmp_path / "nothing.pem", key=TLS / "server.key.pem")
    with pytest.raises(ConfigError, match=r"client\.key\.pem"):
        server_tls_context(certificate=TLS / "server.pem", key=TLS / "client.key.pem")
    bad = tmp_path / "bad.pem"
    bad.write_text("not a certificate")
    with pytest.raises(ConfigError, match=r"bad\.pem"):
        client_tls_context(authority=bad)
    with pytest.raises(ConfigError, match="go together"):
        client_tls_context(certificate=TLS / "client.pem")


def protection(secret: str | None = None, **settings: Path) -> Protection:
    """Load the protection of a server, with a token in the environment if there is a secret."""
    environ = {} if secret is None else {"HEADRACE_TOKEN": secret}
    return Protection.load(ServerConfig(data=Path("d"), **settings), environ)  # type: ignore[arg-type]


def token_file(path: Path, secret: str) -> Path:
    """Write a file that only its owner may read."""
    path.touch(mode=0o600)
    path.write_text(secret)
    return path


def test_what_is_complete() -> None:
    """Only TLS with a token or with client certificates lets other machines in; settings may ask for nothing."""
    assert (protection().ssl_context, protection().is_complete) == (None, False)
    assert not protection(SECRET).is_complete  # it can be read on its way
    assert not protection(**CERTIFIED).is_complete
    assert protection(SECRET, **CERTIFIED).is_complete
    assert protection(**CERTIFIED, tls_client_authority=TLS / "authority.pem").is_complete


@pytest.mark.parametrize("name", ["writer_token_file", "reader_token_file"])
def test_a_roles_token_is_its_own(name: str, tmp_path: Path) -> None:
    """A role's token needs the token that opens every role, and must differ from it."""
    file = token_file(tmp_path / "token", SECRET)
    flag = "--" + name.replace("_", "-")
    with pytest.raises(ConfigError, match=f"{flag} needs --token-file or HEADRACE_TOKEN"):
        protection(**{name: file})
    with pytest.raises(ConfigError, match=f"{flag} {file}: holds a token that opens a higher role too") as caught:
        protection(SECRET, **{name: file})
    assert SECRET not in str(caught.value)
    protection(OTHER, **{name: file})


def test_readers_have_another_token_than_writers(tmp_path: Path) -> None:
    """A reader's token that is also the writers' is refused: every reader could write."""
    writer, reader = (token_file(tmp_path / name, SECRET) for name in ("writer", "reader"))
    with pytest.raises(ConfigError, match=f"--reader-token-file {reader}: holds a token that opens a higher role too"):
        protection(OTHER, writer_token_file=writer, reader_token_file=reader)
    reader.write_text("a-third-token-of-some-length")
    protection(OTHER, writer_token_file=writer, reader_token_file=reader)


def test_half_a_pair() -> None:
    """A certificate without its key, and an authority without both, are errors."""
    with pytest.raises(ConfigError, match="go together"):
        protection(tls_certificate=TLS / "server.pem")
    with pytest.raises(ConfigError, match="needs --tls-certificate"):
        protection(tls_client_authority=TLS / "authority.pem")


def test_server_with_tls(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A protected server may listen on every address, and answers only TLS clients with the token."""
    monkeypatch.setenv("HEADRACE_TOKEN", SECRET)
    with ServerProcess.start(tmp_path / "data", host="0.0.0.0", advertise_host="127.0.0.1", **CERTIFIED) as server:
        trusting = ["status", "--server", server.address, "--tls-authority", str(TLS / "authority.pem")]
        assert main(trusting) == 0
        assert main(["status", "--server", server.address, "--timeout-s", "2"]) == 1
        monkeypatch.delenv("HEADRACE_TOKEN")
        assert main(trusting) == 1
        assert "a token is required" in capfd.readouterr().err
