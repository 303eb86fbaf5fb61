"""TLS, tokens, roles and safe addresses."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import os
import socket
import ssl
from pathlib import Path
from typing import Any

import pytest
from fake_service import WAIT_S, Served, batch, hello_request, read, serve
from own_address import own_address
from raw_peer import LIMITS, MIB, Raw, call_frame, dial
from waiting import until

from headrace.cli import main
from headrace.paramserver.config.server_settings import ServerConfig
from headrace.paramserver.rpc import door
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.frame_writer import FrameWriter
from headrace.paramserver.rpc.security import (
    AccessPolicy,
    Protection,
    Token,
    check_bind,
    client_tls_context,
    is_loopback,
    load_token,
    node_credentials,
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


async def test_a_certificate_is_checked() -> None:
    """One for another name or of another authority is refused; the expected name can be given."""
    async with serve(ssl_context=server_tls()) as served:
        with pytest.raises(UnauthorizedError, match=r"TLS with .*wrong\.test"):
            await served.connect(ssl_context=client_tls(), server_hostname="wrong.test")
        with pytest.raises(UnauthorizedError, match="TLS with"):
            await served.connect(ssl_context=client_tls_context(authority=TLS / "stranger.pem"))
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


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "the client hung up"),
        (call_frame("status", 1), "the peer does not speak TLS and this side does: turn it on or off on both"),
        (b"GET / HTTP/1.1\r\n\r\n", "the peer speaks HTTP: metrics and health have ports of their own"),
    ],
    ids=["hangs up", "plain Thrift", "HTTP"],
)
async def test_a_failed_handshake_is_named_in_the_log(data: bytes, said: str, caplog: pytest.LogCaptureFixture) -> None:
    """The log line has a reason, though asyncio's error has none, and names what came; the peer does not hang."""
    async with serve(ssl_context=server_tls()) as served, dial(served) as raw:
        await raw.send(data)
        raw.writer.write_eof()
        await raw.ended()
        assert served.server.stats.num_malformed + served.server.stats.num_unauthorized <= 1
    assert f"TLS handshake: {said}" in caplog.text


async def test_token_opens_its_role(caplog: pytest.LogCaptureFixture) -> None:
    """A wrong or missing token is refused, counted and logged without the secret."""
    async with serve(access=AccessPolicy(Token(SECRET))) as served:
        for shown in (None, OTHER, ""):
            async with await served.connect(says_hello=False) as client:
                with pytest.raises(UnauthorizedError) as error:
                    await client.hello(hello_request(token=shown))
            assert not shown or shown not in str(error.value)
        async with await served.connect(says_hello=False) as client:
            with pytest.raises(UnauthorizedError, match="before hello"):
                await client.set_embeddings(batch(1))
        async with await served.connect(says_hello=False) as client:
            await client.hello(hello_request(token=SECRET))
            await client.set_embeddings(batch(2))
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


def test_methods_by_role() -> None:
    """Following takes the role of a reader, none may do it without a hello, and a new method is an admin's at first."""
    policy = AccessPolicy(Token(SECRET))
    policy.check_call(READER, "fetchUpdates")
    policy.check_call(ADMIN, "somethingNew")
    for role, method in ((None, "fetchUpdates"), (WRITER, "somethingNew")):
        with pytest.raises(UnauthorizedError):
            policy.check_call(role, method)


def test_tokens_are_not_shown() -> None:
    """Neither the error about a bad token nor any representation of a good one shows it."""
    for secret in ("short", "with a space in it", "tab\tin-the-middle-of", "ünicode-ünicode-ü", "x" * 5000):
        with pytest.raises(ConfigError) as error:
            Token(secret)
        assert secret not in str(error.value)
    token = Token(SECRET)
    assert all(SECRET not in text for text in (repr(token), str(token), f"{token}"))
    assert not token.matches("\ud800")
    assert Token("x" * 4096).matches("x" * 4096) and not Token("x" * 4096).matches("x" * 4097)


@pytest.mark.parametrize(
    ("host", "settings"),
    [
        pytest.param("127.0.0.1", {"token": Token(SECRET)}, id="loopback"),
        pytest.param(None, {"token": Token(SECRET), "ssl_context": client_tls()}, id="TLS"),
        pytest.param(None, {"token": Token(SECRET, may_go_plain=True)}, id="insecure token"),
        pytest.param(None, {"token": Token(SECRET)}, id="refused"),
    ],
)
async def test_a_token_is_not_sent_where_others_may_read_it(
    host: str | None, settings: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Beyond loopback a client shows its token over TLS only, or with its user's consent; the error says which."""
    if "ssl_context" in settings:
        settings = settings | {"server_hostname": "shard.test"}
    context = server_tls() if "ssl_context" in settings else None
    policy = AccessPolicy(Token(SECRET))
    async with serve(host=host or own_address(), ssl_context=context, access=policy) as served:
        async with await served.connect(says_hello=False, **settings) as client:
            if "refused" not in request.node.callspec.id:
                await client.hello(hello_request())
                return
            with pytest.raises(UnauthorizedError, match="--insecure-token") as caught:
                await client.hello(hello_request())
        assert SECRET not in str(caught.value)
        # The server has seen nothing.
        assert served.server.stats.num_unauthorized == 0


def test_nodes_that_listen_without_protection_show_each_other_the_token() -> None:
    """Whoever accepts to listen without TLS with --insecure-bind has accepted it for the nodes among each other."""
    for insecure_bind in (True, False):
        settings = ServerConfig(data=Path("d"), insecure_bind=insecure_bind)
        _, token = node_credentials(settings, {"HEADRACE_TOKEN": SECRET}, authority=None)
        assert token is not None
        with contextlib.nullcontext() if insecure_bind else pytest.raises(UnauthorizedError):
            assert token.reveal("node-b:7601", is_private=False) == SECRET


@pytest.mark.parametrize(
    ("host", "is_own"),
    [("::ffff:127.0.0.1", True), ("::ffff:10.0.0.1", False), ("169.254.0.1", False), ("localhost.example", False)],
)
def test_what_does_not_leave_this_machine(host: str, is_own: bool) -> None:
    """An IPv4 address in the form of IPv6 counts as what it is; names count as other machines."""
    assert is_loopback(host) is is_own


def test_token_comes_from_file_or_environment(tmp_path: Path) -> None:
    """A file wins over the environment, and is refused if others may read it."""
    path, environ = token_file(tmp_path / "token", f"{SECRET}\n"), {"HEADRACE_TOKEN": OTHER}
    for given, secret in ((path, SECRET), (None, OTHER)):
        loaded = load_token(path=given, environ=environ)
        assert loaded is not None and loaded.matches(secret)
    assert load_token(path=None, environ={}) is None
    path.chmod(0o644)
    for given, environ, problem in (
        (path, {}, "chmod 600"),
        (tmp_path / "missing", {}, "missing"),
        (None, {"HEADRACE_TOKEN": "short"}, "^HEADRACE_TOKEN: a token must have 16"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_token(path=given, environ=environ)


@pytest.mark.parametrize(
    ("hosts", "is_open"),
    [
        (("127.0.0.1", "127.1.2.3", "::1", "localhost"), True),
        (("0.0.0.0", "::", "", "10.0.0.1", "shard.example"), False),
    ],
)
def test_other_addresses_than_loopback_need_protection_or_consent(hosts: tuple[str, ...], is_open: bool) -> None:
    """Any server may listen on loopback; on other addresses it needs protection, or the user's consent."""
    for host in hosts:
        check_bind(host, is_protected=True, allow_insecure=False)
        check_bind(host, is_protected=False, allow_insecure=True)
        with contextlib.nullcontext() if is_open else pytest.raises(ConfigError, match="--insecure-bind"):
            check_bind(host, is_protected=False, allow_insecure=False)


def test_bad_tls_files_are_named(tmp_path: Path) -> None:
    """The error names a file that is missing or not PEM, and what goes together."""
    (tmp_path / "bad.pem").write_text("not a certificate")
    good, key = TLS / "server.pem", TLS / "server.key.pem"
    for load, problem in (
        (lambda: server_tls_context(certificate=tmp_path / "nothing.pem", key=key), r"nothing\.pem"),
        (lambda: server_tls_context(certificate=good, key=TLS / "client.key.pem"), r"client\.key\.pem"),
        (lambda: client_tls_context(authority=tmp_path / "bad.pem"), r"bad\.pem"),
        (lambda: client_tls_context(certificate=TLS / "client.pem"), "go together"),
        (lambda: protection(tls_certificate=good), "go together"),
        (lambda: protection(tls_client_authority=TLS / "authority.pem"), "needs --tls-certificate"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load()


def protection(secret: str | None = None, variables: dict[str, str] | None = None, **settings: Path) -> Protection:
    """Load the protection of a server, with a token in the environment if there is a secret, and other variables."""
    environ = ({} if secret is None else {"HEADRACE_TOKEN": secret}) | (variables or {})
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
    """A role's token needs the token that opens every role, and must differ from it and from the higher roles'.

    It may be in a file or in the environment.
    """
    file, flag = token_file(tmp_path / "token", SECRET), "--" + name.replace("_", "-")
    variable = f"HEADRACE_{name.removesuffix('_file').upper()}"
    for source, given in ((f"{flag} {file}", {name: file}), (variable, {"variables": {variable: SECRET}})):
        with pytest.raises(ConfigError, match=f"{source}: needs --token-file or HEADRACE_TOKEN"):
            protection(**given)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"{variable}: holds a token that opens a higher role"):
        protection(SECRET, {variable: SECRET})
    for environ, files in ((SECRET, {name: file}), (OTHER, {"writer_token_file": file, "reader_token_file": file})):
        with pytest.raises(ConfigError, match=f"-token-file {file}: holds a token that opens a higher role") as caught:
            protection(environ, **files)
        assert SECRET not in str(caught.value)
    role = READER if name == "reader_token_file" else WRITER
    for loaded in (protection(OTHER, **{name: file}), protection(OTHER, {variable: SECRET})):
        loaded.access.check_hello(role, SECRET)
        with pytest.raises(UnauthorizedError):
            loaded.access.check_hello(ADMIN, SECRET)


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


async def _near_the_end_of_a_handshake(served: Served) -> tuple[Raw, bytes]:
    """Return a connection, and the last bytes of its TLS handshake, which are not sent yet."""
    raw = Raw(*await asyncio.open_connection(served.host, served.port))
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = client_tls().wrap_bio(incoming, outgoing, server_hostname="localhost")
    while True:
        try:
            tls.do_handshake()
            return raw, outgoing.read()
        except ssl.SSLWantReadError:
            await raw.send(outgoing.read())
            incoming.write(await raw.reader.read(MIB))


async def test_who_has_to_go_in_its_handshake_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A connection that has to go amid its handshake, or as that ends, ends too, and newcomers get its descriptor."""
    monkeypatch.setattr(door, "TURN_S", 0.0)
    async with serve(limits=dataclasses.replace(LIMITS, max_strangers=16), ssl_context=server_tls()) as served:
        num_open = len(os.listdir("/proc/self/fd"))
        begun = [await _near_the_end_of_a_handshake(served) for _ in range(8)]
        others = [socket.create_connection((served.host, served.port)) for _ in range(8)]
        for number, ((raw, last), other) in enumerate(zip(begun, others, strict=True)):
            if number % 2:
                raw.writer.write(last)
            other.send(b"\x16")
        for raw, _ in begun:
            await raw.ended()
        await until(lambda: served.server.stats.num_connections_refused == 8)
        for other in others:  # their places, and descriptors, are those of the next ones
            other.close()
        newcomers = [await _near_the_end_of_a_handshake(served) for _ in range(8)]
        for raw, _ in (*begun, *newcomers):
            await raw.close()
        await until(lambda: len(os.listdir("/proc/self/fd")) == num_open)
