"""A relay's process: learns the shards, binds a port for each, mirrors and serves them, drains and ends.

    DIR/LOCK                    flock, held while the relay runs
    DIR/relay.json              which server it is a relay of, and its shards' last hellos
    DIR/shard-0000/…            mirrors, see `mirrored_log.py`
    DIR/snapshots/NAME/…        fetched snapshots

With `relay.json` a relay starts and serves what it has while its server is away.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import logging
import os
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST

from headrace.paramserver.reading.link import Dial, ShardLink, links_of, retry
from headrace.paramserver.relay.gauges import relay_metrics
from headrace.paramserver.relay.kept_snapshots import KeptSnapshots, source_of
from headrace.paramserver.relay.options import RelayConfig
from headrace.paramserver.relay.shard_mirror import ShardMirror
from headrace.paramserver.relay.shard_service import RelayedShard
from headrace.paramserver.rpc.address import bind_listener, bind_listeners, format_address, parse_addresses
from headrace.paramserver.rpc.outages import OutageLog
from headrace.paramserver.rpc.security import Protection
from headrace.paramserver.rpc.server import ThriftServer
from headrace.paramserver.snapshots.directory import mapped_errors
from headrace.paramserver.system.durable import ReadyFile, write_file
from headrace.paramserver.system.event_loop import stop_requests, task_group
from headrace.paramserver.system.file_lock import FileLock
from headrace.paramserver.system.http_server import HttpServer, Page, Reply, Request
from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.text import format_seconds
from headrace.schemas.errors import ConfigError, CorruptionError, ProtocolError, UnavailableError
from headrace.schemas.idl import idl
from headrace.schemas.messages import REPLY, decode_header, decode_struct, encode_message

__all__ = ["RelayProcess", "hellos_behind"]

_log = logging.getLogger(__name__)

_EXIT_OK, _EXIT_INTERRUPTED = 0, 130
# ON DISK: names, and what a version means.
_LOCK_NAME, _IDENTITY_NAME = "LOCK", "relay.json"
_FORMAT, _FORMAT_VERSION = "headrace-relay", 1
_ATTEMPT_S = 15.0


class RelayProcess:
    """Runs a relay until it is stopped; each object runs once. Thread: the event loop's.

    Attributes:
        mirrors: The shards' mirrors, by index; empty before the relay knows its server.
    """

    def __init__(
        self,
        config: RelayConfig,
        *,
        environ: Mapping[str, str],
        ready_file: ReadyFile | None = None,
        watch_stdin: bool = False,
    ) -> None:
        """Load TLS files and tokens, perhaps from the environment; nothing is bound yet."""
        self.mirrors: list[ShardMirror] = []
        self._config = config
        self._protection = Protection.load(config, environ)
        self._reach_log = OutageLog()
        self._dial = Dial(
            ssl_context=config.server_tls_context(),
            server_hostname=config.server_hostname,
            token=config.load_server_token(environ),
            timeout_s=_ATTEMPT_S,
            reach_log=self._reach_log,
        )
        self._ready_file = ready_file
        self._watch_stdin = watch_stdin
        self._stopping = asyncio.Event()
        self._num_signals = 0
        self._hellos: list[Any] = []
        self._saving = asyncio.Lock()

    async def run(self) -> int:
        """Serve until SIGTERM or SIGINT; return the exit code.

        Raises:
            ConfigError: A setting is wrong, the directory is in use or another server's relay, or a port is taken.
            StorageError: The disk failed.
            UnavailableError: The server has not come in time, the first time.
        """
        data = self._config.data
        with contextlib.ExitStack() as stack:
            with mapped_errors(data):
                data.mkdir(parents=True, exist_ok=True)
                busy = f"{data}: another relay uses this directory; stop that one, or choose another --data"
                stack.enter_context(FileLock.acquire(data / _LOCK_NAME, busy=busy))
            on_stdin_end = (lambda: self._stop("stdin has ended")) if self._watch_stdin else None
            stack.enter_context(stop_requests(self._on_signal, on_stdin_end))
            try:
                async with task_group() as group:
                    serving = group.create_task(self._serve(), name="headrace-relay")
                    stopping = group.create_task(self._stopping.wait(), name="headrace-stop")
                    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
                    stopping.cancel()
                    serving.cancel()
            finally:
                if self._ready_file is not None:
                    self._ready_file.remove()
        return _EXIT_OK

    async def _serve(self) -> None:
        """Mirror and serve; ends by an error or when it is cancelled."""
        config = self._config
        self._hellos = await self._learn_shards(await asyncio.to_thread(self._read_identity))
        await self._save_hellos()
        server_id, num_shards = self._hellos[0].server_id, len(self._hellos)
        async with contextlib.AsyncExitStack() as stack:
            sockets = stack.enter_context(
                bind_listeners(
                    config.host,
                    config.port,
                    num_shards,
                    is_protected=self._protection.is_complete,
                    insecure_bind=config.insecure_bind,
                )
            )
            seeds = parse_addresses(config.server)
            # All hellos have the same map.
            first = ShardLink(self._dial, *seeds[0], self._hellos[0])
            links = links_of(first, self._dial, seeds, hellos=self._hellos)
            for link in links:
                stack.push_async_callback(link.close)
            snapshots = KeptSnapshots(
                config.data / "snapshots", source_of(config, links, self._dial, server_id), config, server_id
            )
            self.mirrors = [
                ShardMirror(
                    link,
                    config,
                    shard=shard,
                    hello=self._hellos[shard],
                    newest_snapshot=snapshots.newest_at_source,
                    on_hello=self._note_hello,
                )
                for shard, link in enumerate(links)
            ]
            if config.metrics_port is not None:
                health = bind_listener(
                    config.host, config.metrics_port, taker="the relay", flag="--metrics-port", is_open=True
                )
                stack.callback(health.close)
                await stack.enter_async_context(HttpServer(health, self._pages(snapshots)))
                health_address = {"health": format_address(config.client_host, health.getsockname()[1])}
            else:
                health_address = {}
            async with task_group() as group:
                for shard, mirror in enumerate(self.mirrors):
                    group.create_task(mirror.run(), name=f"headrace-relay-{shard}")
                group.create_task(snapshots.run(self.mirrors), name="headrace-relay-snapshots")
                async with self._served(sockets, snapshots) as address:
                    addresses = {"address": address, **health_address}
                    fact(_log, logging.INFO, "relay is ready", server=config.server, shards=num_shards, **addresses)
                    if self._ready_file is not None:
                        self._ready_file.write({**addresses, "pid": os.getpid()})
                    await asyncio.get_running_loop().create_future()

    @contextlib.asynccontextmanager
    async def _served(self, sockets: Sequence[socket.socket], snapshots: KeptSnapshots) -> AsyncIterator[str]:
        """Serve every shard during the block, and drain at its end; yields the address of shard 0."""
        config, protection = self._config, self._protection
        addresses = [(config.client_host, sock.getsockname()[1]) for sock in sockets]
        servers, services = [], []
        for shard, sock in enumerate(sockets):
            service = RelayedShard(shard, self.mirrors, snapshots, config, addresses)
            server = service.server = ThriftServer(
                service, limits=config.limits, ssl_context=protection.ssl_context, access=protection.access
            )
            await server.start(sock.dup())
            servers.append(server)
            services.append(service)
        try:
            yield format_address(*addresses[0])
        finally:
            for service in services:
                service.begin_drain()
            closing = [asyncio.ensure_future(server.close(drain_s=config.drain_s)) for server in servers]
            await asyncio.wait(closing)

    async def _learn_shards(self, known: list[Any]) -> list[Any]:
        """Return a hello of each shard: the server's present map, and what is known of the others from before.

        The first time this waits for the server; later a relay serves what it has.
        """
        config = self._config
        patience_s = 0.0 if known else config.start_timeout_s
        first, *others = parse_addresses(config.server)
        link = ShardLink(self._dial, *first, others=others)
        try:
            hello = await retry(link.refresh, patience_s=patience_s)
        except UnavailableError as exc:
            if known:
                fact(_log, logging.WARNING, "the server is away; the relay serves what it has", error=str(exc))
                return known
            after = format_seconds(config.start_timeout_s)
            raise UnavailableError(f"given up after {after} (--start-timeout-s): {exc}") from exc
        finally:
            await link.close()
        if known and hello.server_id != known[0].server_id:
            raise ConfigError(
                f"{config.data} is a relay of server {known[0].server_id}, and {config.server} is server "
                f"{hello.server_id}: choose another --data"
            )
        if known and (hello.term or 0) < (known[hello.shard].term or 0):
            address = format_address(link.host, link.port)
            fact(_log, logging.WARNING, "an old copy of a shard has answered", address=address, shard=hello.shard)
            return known
        return hellos_behind(hello, known)

    def _read_identity(self) -> list[Any]:
        """Return the hellos in the directory; none in a new one."""
        path = self._config.data / _IDENTITY_NAME
        with mapped_errors(path, FileNotFoundError):
            try:
                content = path.read_bytes()
            except FileNotFoundError:
                return []
        try:
            values = json.loads(content)
            if (values["format"], values["format_version"]) != (_FORMAT, _FORMAT_VERSION):
                raise ValueError(f"not a relay's of version {_FORMAT_VERSION}")
            hellos = [_decode_hello(text) for text in values["hellos"]]
        except (ValueError, KeyError, TypeError, ProtocolError) as exc:
            raise CorruptionError(f"{path}: {exc}; remove {self._config.data}, and the relay begins anew") from exc
        return hellos

    async def _note_hello(self, shard: int, hello: Any) -> None:
        if _encode_hello(hello) != _encode_hello(self._hellos[shard]):
            self._hellos[shard] = hello
            await self._save_hellos()

    async def _save_hellos(self) -> None:
        async with self._saving:
            values = {"format": _FORMAT, "format_version": _FORMAT_VERSION}
            content = json.dumps({**values, "hellos": [_encode_hello(hello) for hello in self._hellos]}).encode()
            with mapped_errors(self._config.data):
                await asyncio.to_thread(write_file, self._config.data / _IDENTITY_NAME, content)

    def _pages(self, snapshots: KeptSnapshots) -> dict[str, Page]:
        async def alive(_: Request) -> Reply:
            return Reply(body=b"alive\n")

        async def ready(_: Request) -> Reply:
            why = self._why_not_ready()
            if why is not None:
                return Reply(status=503, body=f"not ready: {why}\n".encode())
            return Reply(body=b"ready\n")

        async def metrics(_: Request) -> Reply:
            return Reply(body=relay_metrics(self.mirrors, snapshots), content_type=CONTENT_TYPE_LATEST)

        return {"/healthz": alive, "/readyz": ready, "/metrics": metrics}

    def _why_not_ready(self) -> str | None:
        max_lag_s = self._config.max_lag_s
        for shard, mirror in enumerate(self.mirrors):
            if mirror.log is None:
                return f"shard {shard}: {mirror.failure or 'it has not begun yet'}"
            for late_s, what in ((mirror.lag_s, "behind"), (mirror.knowledge_age_s, "without word from its shard")):
                if max_lag_s and late_s > max_lag_s:
                    return f"shard {shard}: {late_s:.0f} s {what}"
        return None

    def _on_signal(self, number: signal.Signals) -> None:
        self._num_signals += 1
        if self._num_signals == 1:
            self._stop(number.name)
            return
        fact(_log, logging.WARNING, "relay is stopped at once", signal=number.name)
        if self._ready_file is not None:
            self._ready_file.remove()
        os._exit(_EXIT_INTERRUPTED)  # what is mirrored is on the disk, and the server has all

    def _stop(self, why: str) -> None:
        if not self._stopping.is_set():
            fact(_log, logging.INFO, "relay stops", why=why, drain_s=self._config.drain_s)
            self._stopping.set()


def hellos_behind(newest: Any, known: Sequence[Any]) -> list[Any]:
    """Return a hello of each shard, by index, with the newest one's map and the highest term that is known of it.

    A follower that has been told too high a term would refuse the shard for ever.

    Args:
        newest: An `idl.HelloReply` that has just come from some shard.
        known: What each shard said before; empty in a new relay, which then takes the tables of the newest for all.
    """
    terms: dict[int, int] = {}
    for hello in (newest, *known):
        for shard, term in [(hello.shard, hello.term), *((place.shard, place.term) for place in hello.shards)]:
            terms[shard] = max(term or 0, terms.get(shard, 0))
    hellos = [*known] or [newest] * len(newest.shards)
    hellos[newest.shard] = newest
    return [
        idl.HelloReply(**{**vars(hello), "shard": shard, "shards": newest.shards, "term": terms[shard] or None})
        for shard, hello in enumerate(hellos)
    ]


def _encode_hello(hello: Any) -> str:
    return base64.b64encode(b"".join(bytes(part) for part in encode_message("hello", REPLY, 0, hello))).decode()


def _decode_hello(text: str) -> Any:
    frame = memoryview(base64.b64decode(text))
    return decode_struct(idl.HelloReply, frame, decode_header(frame).body_offset)
