"""How a trainer's ranks take a run over together: one store, one epoch, a session of each rank on every shard."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from functools import partial

from headrace.paramserver.rpc.address import format_address
from headrace.paramserver.rpc.client import ParamServerClient
from headrace.paramserver.rpc.security import client_tls_context, load_token
from headrace.schemas.errors import StorageError, UnavailableError
from headrace.streamer.config import StreamerConfig
from headrace.streamer.delivery.rendezvous import Connect, Store, Writer
from headrace.streamer.delivery.sender import Sender
from headrace.streamer.world import World

__all__ = ["connector", "take_over", "tls_context"]


@dataclass(frozen=True, slots=True)
class _Agreed:
    """What rank 0 tells the others."""

    epoch: int
    server_ids: tuple[str, ...]
    error: str | None = None


def take_over(
    sender: Sender, host: str, port: int, *, run: str, world: World, config: StreamerConfig
) -> tuple[Store, Writer]:
    """Agree with the other ranks on an epoch above all that the store has seen, and open the session.

    Args:
        sender: Started.
        host: Of any shard.
        port: Of it.
        run: Name of the run.
        world: All ranks call this together.
        config: The streamer's settings.

    Raises:
        ConfigError: The token's file cannot be read.
        UnavailableError: A shard, or rank 0's, cannot be reached.
        StorageError: This rank finds another store than rank 0.
        HeadraceError: A shard refuses.
    """
    token = load_token(path=config.token_file, environ=os.environ)
    asks = Writer(run=run, client=f"rank{world.rank}", epoch=0, rank=world.rank, world_size=world.size, token=token)
    if world.rank == 0:
        return _lead(sender, host, port, asks, world)
    agreed: _Agreed = world.share(None)
    if agreed.error is not None:
        raise UnavailableError(f"rank 0 could not begin to stream: {agreed.error}")
    store, writer = sender.find_store(host, port, asks), asks.with_epoch(agreed.epoch)
    if tuple(shard.server_id for shard in store.shards) != agreed.server_ids:
        raise StorageError(f"rank {world.rank} finds another store at {format_address(host, port)} than rank 0")
    sender.open(store, writer)
    return store, writer


def _lead(sender: Sender, host: str, port: int, asks: Writer, world: World) -> tuple[Store, Writer]:
    """Choose the epoch, as rank 0, and tell the other ranks, also of a failure: they would wait for ever."""
    try:
        store = sender.find_store(host, port, asks)
        writer = sender.claim_epoch(store, asks)
        sender.open(store, writer)
    except BaseException as exc:
        world.share(_Agreed(0, (), str(exc) or type(exc).__name__))
        raise
    world.share(_Agreed(writer.epoch, tuple(shard.server_id for shard in store.shards)))
    return store, writer


def connector(config: StreamerConfig) -> Connect:
    """Return what opens connections as the settings say."""
    return partial(ParamServerClient.connect, timeout_s=config.connect_timeout_s, ssl_context=tls_context(config))


def tls_context(config: StreamerConfig) -> ssl.SSLContext | None:
    """Return the context for TLS, or None without it.

    Raises:
        ConfigError: A file cannot be used.
    """
    if not config.tls:
        return None
    return client_tls_context(authority=config.tls_authority, certificate=config.tls_certificate, key=config.tls_key)
