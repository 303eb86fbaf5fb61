"""Connections to real servers that ask for credentials and TLS."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import nkeys
import pytest
from nats_cluster import nats_cluster, needs_nats_server
from nats_servers import NatsServer

from headrace.paramserver.log.jetstream.nats_address import NatsAccess, NatsLogAddress
from headrace.paramserver.log.jetstream.nats_client import NatsClient
from headrace.schemas.errors import ConfigError, UnavailableError

pytestmark = needs_nats_server
TLS = Path(__file__).parents[2] / "tls"
_DEADLINE_S = 60.0


async def _connect(access: NatsAccess) -> str:
    """Connect, ask something, and return the server's version."""
    client = await NatsClient.connect(access, *access.address.servers[0])
    try:
        await client.ask("INFO")
        return client.version
    finally:
        await client.close()


def _address(server: NatsServer, scheme: str = "nats") -> NatsLogAddress:
    return NatsLogAddress.parse(f"{scheme}://{server.address}?replicas=1")


class TestCredentials:
    @pytest.mark.parametrize("kind", ["user", "token", "nkey"])
    async def test_right_ones_are_let_in_and_wrong_ones_refused(self, tmp_path: Path, kind: str) -> None:
        """Each kind of secret opens a server that asks for it; without it, or with another, we are told so."""
        keys = nkeys.from_seed(nkeys.encode_seed(bytes(range(32)), nkeys.PREFIX_BYTE_USER))
        other = nkeys.from_seed(nkeys.encode_seed(bytes(range(1, 33)), nkeys.PREFIX_BYTE_USER))
        user = (
            'authorization { user: "me", password: "right" }',
            "user: me\npassword: right",
            "user: me\npassword: wrong",
        )
        nkey = f"authorization {{ users: [ {{ nkey: {keys.public_key.decode()} }} ] }}"
        settings, right, wrong = {
            "user": user,
            "token": ('authorization { token: "right" }', "token: right", "token: wrong"),
            "nkey": (nkey, keys.seed.decode(), other.seed.decode()),
        }[kind]
        path = tmp_path / "secret"
        path.touch(0o600)
        with nats_cluster(tmp_path / "nats", num_servers=1, settings=(settings,)) as servers:
            address = _address(servers.servers[0])
            path.write_text(right)
            access = NatsAccess(address=address, credentials=path)
            assert (await _connect(access)).startswith("2.")
            # The file is read at each connection, so a secret can be changed while we run.
            path.write_text(wrong)
            with pytest.raises(ConfigError, match="refuses our credentials") as caught:
                await _connect(access)
            assert "wrong" not in str(caught.value)
            with pytest.raises(ConfigError, match="refuses our credentials"):
                await _connect(NatsAccess(address=address))


@pytest.fixture(scope="module")
def tls_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    tls = f'tls {{ cert_file: "{TLS}/server.pem", key_file: "{TLS}/server.key.pem", ca_file: "{TLS}/authority.pem", '
    settings = (f"{tls} verify: true }}",)
    folder = tmp_path_factory.mktemp("nats")
    with nats_cluster(folder, num_servers=1, settings=settings, net="127.0.0") as servers:
        yield servers.servers[0]


class TestTls:
    async def test_our_certificate_is_taken(self, tls_server: NatsServer) -> None:
        """Server and client show certificates of an authority that the other trusts."""
        access = NatsAccess(
            address=_address(tls_server, "tls"),
            tls_authority=TLS / "authority.pem",
            tls_certificate=TLS / "client.pem",
            tls_key=TLS / "client.key.pem",
        )
        assert (await _connect(access)).startswith("2.")

    async def test_wrong_certificates_are_refused(self, tls_server: NatsServer) -> None:
        """A server of another authority is refused; so are we without a certificate."""
        address = _address(tls_server, "tls")
        with pytest.raises(ConfigError, match=r"TLS: .*certificate verify failed"):
            await _connect(NatsAccess(address=address, tls_authority=TLS / "stranger.pem"))
        with pytest.raises((ConfigError, UnavailableError), match=r"certificate required|--log-tls-certificate"):
            await _connect(NatsAccess(address=address, tls_authority=TLS / "authority.pem"))

    async def test_server_without_tls_gets_no_secret(self, tmp_path: Path) -> None:
        """With tls:// nothing is said to a server that offers no TLS."""
        path = tmp_path / "secret"
        path.touch(0o600)
        path.write_text("token: right")
        with nats_cluster(tmp_path / "nats", num_servers=1) as servers:
            access = NatsAccess(
                address=_address(servers.servers[0], "tls"), credentials=path, tls_authority=TLS / "authority.pem"
            )
            with pytest.raises(ConfigError, match="does not offer TLS"):
                await _connect(access)


async def test_nobody_there_is_unavailable() -> None:
    """A refused connection says so."""
    access = NatsAccess(address=NatsLogAddress.parse("nats://127.0.0.1:1"))
    with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1: .*refused|Connect call failed"):
        await _connect(access)


async def test_cancelled_connecting_ends(tmp_path: Path) -> None:
    """Connecting that is cancelled at any moment is cancelled, or was done before, and leaves no connection."""
    with nats_cluster(tmp_path, num_servers=1) as servers:
        (server,) = servers.servers
        access = NatsAccess(address=_address(server))
        num_cancelled = 0
        for num_steps in range(120):
            connecting = asyncio.ensure_future(NatsClient.connect(access, server.host, server.port))
            for _ in range(num_steps):
                await asyncio.sleep(0)
            connecting.cancel()
            await asyncio.wait([connecting], timeout=_DEADLINE_S)
            assert connecting.done()
            num_cancelled += connecting.cancelled()
            if not connecting.cancelled():
                await connecting.result().close()
        assert num_cancelled > 10
        async with asyncio.timeout(_DEADLINE_S):
            while (await asyncio.to_thread(server.ask, "/connz")).get("num_connections") != 0:
                pass
