"""The command `headrace serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from headrace.paramserver.archive.recovery import has_server
from headrace.paramserver.config.cluster_file import ClusterFile, ClusterNode, cluster_of, settings_of_node
from headrace.paramserver.config.data_dir import DataDir, check_data_dir, find_manifest, restore_command
from headrace.paramserver.config.server_settings import ENV_PREFIX, ServerConfig, ShardSettings
from headrace.paramserver.log.opening import check_log, fit_log, kind_of_log
from headrace.paramserver.observe.monitor import ServerMonitor
from headrace.paramserver.observe.status_query import OtherNodes
from headrace.paramserver.reading.link import link_all, retry
from headrace.paramserver.reshard.new_server import build_server
from headrace.paramserver.rpc.address import bind_listener, bind_listeners, format_address, parse_addresses
from headrace.paramserver.rpc.security import Protection, node_credentials
from headrace.paramserver.shard.child import EXIT_OK, EXIT_STORAGE
from headrace.paramserver.shard.hand_over import peer_dial
from headrace.paramserver.shard.other_copies import check_nobody_has
from headrace.paramserver.shard.supervisor import Supervisor
from headrace.paramserver.system.durable import ReadyFile, owner_only
from headrace.paramserver.system.event_loop import stop_requests
from headrace.paramserver.system.flags import (
    ReadyFileFlag,
    WatchStdinFlag,
    config_option,
    settings_sources,
    with_setting_flags,
)
from headrace.paramserver.system.log_lines import configure_logging, fact, limit_repeats
from headrace.paramserver.system.object_store import ObjectStore, RateLimit
from headrace.paramserver.system.settings import settings_of
from headrace.schemas.errors import ConfigError, StorageError
from headrace.schemas.idl import idl
from headrace.schemas.predecessors import Predecessor
from headrace.scripts.commands.restore import restore_with_progress
from headrace.scripts.commands.terminal import ShowSettings, option, print_line, show_settings

__all__ = ["serve"]

_log = logging.getLogger(__name__)
# A source that is away for longer at the first start is probably misspelt.
_SOURCE_PATIENCE_S = 60.0
# The other nodes may start at this moment, too.
_OTHERS_S = 3.0
_ClusterFlag = Annotated[
    Path | None, option("YAML file of a server on several hosts. Also HEADRACE_SERVE_CLUSTER.", "FILE")
]
_NodeFlag = Annotated[
    str | None, option("Run the shards of this node of the cluster. Also HEADRACE_SERVE_NODE.", "NAME")
]
_OF_SHARDS = frozenset(field.name for field, _ in settings_of(ShardSettings))


@with_setting_flags(ServerConfig, panel_of=lambda name: "Each shard" if name in _OF_SHARDS else "Server")
def serve(
    *,
    config: Annotated[Path | None, config_option(ENV_PREFIX, example="port: 7601")] = None,
    cluster: _ClusterFlag = None,
    node: _NodeFlag = None,
    ready_file: ReadyFileFlag = None,
    watch_stdin: WatchStdinFlag = False,
    restore: Annotated[
        bool, option("If the directory is empty, first restore it from the object store.", None, "--restore")
    ] = False,
    shows_settings: ShowSettings = False,
    **flags: Any,
) -> int:
    """Run a parameter server: a supervisor and one process per shard, on the store in a directory.

    Each setting can also come from the environment, as HEADRACE_SERVE_ and its name in capitals, or from a YAML file.
    A flag wins over the environment, and the environment over the file. Sizes and times may have units (64MiB, 250ms).

    The server logs on stderr when it is ready. It drains and ends on SIGTERM or SIGINT; a second one ends it at once.

    Returns:
        0 stopped, 1 gave up, 3 the storage failed, 130 ended by a second signal.

    Raises:
        ConfigError: A setting is wrong, or the directory or a port cannot be used; nothing was written.
    """
    origins: dict[str, str] = {}
    settings, of_cluster, of_node = _load(config, cluster, node, flags, origins, may_lack=shows_settings)
    if shows_settings:
        show_settings(settings, origins)
        return 0
    configure_logging(level=settings.log_level, log_format=settings.log_format)
    limit_repeats()
    try:
        with owner_only():  # the shards' processes, too
            _check_others(settings, of_cluster, of_node, restores=restore)
            _restore_first(settings, of_cluster, of_node, is_wanted=restore)
            return _run(settings, ready_file, watch_stdin, of_cluster, of_node)
    except StorageError as exc:
        print_line(f"headrace: error: {exc}", to_stderr=True)
        return EXIT_STORAGE


def _load(
    config: Path | None,
    cluster: Path | None,
    node: str | None,
    flags: dict[str, Any],
    origins: dict[str, str],
    *,
    may_lack: bool,
) -> tuple[ServerConfig, ClusterFile | None, ClusterNode | None]:
    """Return the settings with the cluster and its node; `origins` gets where each is from, but for defaults."""
    environ, file = settings_sources(ENV_PREFIX, config, os.environ)
    of_cluster, of_node = cluster_of(cluster, node, environ=environ, env_prefix=ENV_PREFIX)
    defaults, fixed = settings_of_node(of_cluster, of_node)
    if of_cluster is not None:
        origins.update(dict.fromkeys([*defaults, *fixed], str(of_cluster.path)))
    settings = ServerConfig.load(
        flags=flags,
        environ=environ,
        file=file,
        defaults=defaults,
        fixed=fixed,
        origins=origins,
        may_lack=may_lack,
    )
    return settings, of_cluster, of_node


def _check_others(
    config: ServerConfig, cluster: ClusterFile | None, node: ClusterNode | None, *, restores: bool
) -> None:
    """Refuse to begin without a row where another node has the shard."""
    if cluster is None or node is None or config.log is not None or config.follow is not None:
        return  # what follows never begins as an owner
    if check_data_dir(config.data, num_shards=None, cluster=cluster, node=node) is None:
        dial = replace(peer_dial(config), timeout_s=_OTHERS_S)
        asyncio.run(check_nobody_has(cluster, node, dial, restores=restores))


def _restore_first(
    config: ServerConfig, cluster: ClusterFile | None, node: ClusterNode | None, *, is_wanted: bool
) -> None:
    """Restore a server or node into an empty directory, or refuse to make a new one where its object store has one."""
    if config.follow is not None or config.reshard is not None:
        if is_wanted:
            raise ConfigError("--restore: this server begins with the rows of another one: leave --restore out")
        return
    if config.object_store is None:
        if is_wanted:
            raise ConfigError("--restore: from where? Give --object-store")
        return
    kind = kind_of_log(config.log)
    if check_data_dir(config.data, num_shards=config.shards, cluster=cluster, node=node, log=kind) is not None:
        return
    if kind != "file" and node is not None and not is_wanted:
        return  # the shards come from their log, unless that begins too late: then each says so
    store = ObjectStore.of_url(config.object_store, rate=RateLimit(config.object_store_rate))
    has, new = ("server", "one") if node is None else (f"shard of node {node.name}", "it")
    if not has_server(store, cluster=cluster, node=node):
        if is_wanted:
            raise ConfigError(f"--restore: {config.object_store} has no {has}; start without --restore to make {new}")
        return
    if not is_wanted:
        command = shlex.join(["headrace", "restore", config.object_store, "--data", str(config.data)])
        if cluster is not None and node is not None:
            command = restore_command(cluster, node, config.data)
        elif config.log is not None:
            command += f" --log {shlex.quote(config.log)}"
        raise ConfigError(
            f"--data {config.data} is empty, and {config.object_store} has a {has}: start with --restore, or run "
            f"{command}; for a new server use another prefix"
        )
    for restored in restore_with_progress(store, config.data, cluster=cluster, node=node, log=kind):
        after = None if restored.claim is None else str(restored.claim)
        fact(_log, logging.INFO, "shard restored", shard=restored.shard, seq=restored.seq, takes_over_from=after)


def _run(
    config: ServerConfig,
    ready_file: Path | None,
    watch_stdin: bool,
    cluster: ClusterFile | None,
    node: ClusterNode | None,
) -> int:
    """Lock the directory, bind the ports, and only then write anything."""
    ready = None if ready_file is None else ReadyFile(ready_file)
    # Each shard loads these again; this finds mistakes early.
    is_protected = Protection.load(config, os.environ).is_complete
    if config.object_store is not None:
        ObjectStore.of_url(config.object_store)
    if config.log is not None:
        asyncio.run(check_log(config))
    others = None
    if cluster is not None and node is not None:
        credentials = node_credentials(config, os.environ, authority=config.tls_peer_authority)
        others = OtherNodes(cluster, node, credentials)
    if config.reshard is not None and find_manifest(config.data) is None:
        if node is not None:
            raise ConfigError("--reshard: leave --cluster out: a node does not take another server's place")
        return _reshard(config, ready, watch_stdin, is_protected=is_protected)
    server_id, num_shards, predecessors = _source_of(config, cluster, node)
    with (
        DataDir.claim(
            config.data,
            num_shards=num_shards,
            cluster=cluster,
            node=node,
            log=kind_of_log(config.log),
            server_id=server_id,
            predecessors=predecessors,
        ) as data_dir,
        bind_listeners(
            config.host,
            config.port,
            data_dir.manifest.shards if node is None else node.copies,
            is_protected=is_protected,
            insecure_bind=config.insecure_bind,
        ) as sockets,
        _bind_metrics(config, others) as monitor,
    ):
        if config.log is not None:
            manifest = data_dir.manifest
            fitting = fit_log(config, server_id=manifest.server_id, num_shards=manifest.num_shards)
            config = replace(config, log_max_bytes=asyncio.run(fitting))
        data_dir.prepare()
        supervisor = Supervisor(
            config,
            data_dir,
            sockets,
            ready_file=ready,
            watch_stdin=watch_stdin,
            monitor=monitor,
            cluster=cluster,
            node=node,
        )
        return asyncio.run(supervisor.run())


def _reshard(config: ServerConfig, ready: ReadyFile | None, watch_stdin: bool, *, is_protected: bool) -> int:
    """Build the directory from another server with the ports bound, and serve it."""
    assert config.reshard is not None and config.shards is not None
    if config.object_store is not None and has_server(ObjectStore.of_url(config.object_store)):
        raise ConfigError(f"--object-store {config.object_store} has a server: for a new one use another prefix")
    seeds, dial = parse_addresses(config.reshard), peer_dial(config, role=idl.Role.ADMIN)
    with (
        bind_listeners(
            config.host,
            config.port,
            range(config.shards),
            is_protected=is_protected,
            insecure_bind=config.insecure_bind,
        ) as sockets,
        _bind_metrics(config, None) as monitor,
    ):
        address = format_address(config.client_host, sockets[0].getsockname()[1])
        num_shards, data = config.shards, config.data.absolute()

        async def build() -> None:
            building = asyncio.current_task()
            assert building is not None

            def stop(*_: Any) -> None:
                building.cancel()

            with stop_requests(stop, stop if watch_stdin else None):
                await build_server(
                    seeds, dial, data, num_shards=num_shards, address=address, archives=config.object_store is not None
                )

        try:
            asyncio.run(build())
        except asyncio.CancelledError:
            if find_manifest(data) is None:
                fact(_log, logging.INFO, "the build was stopped; the server goes on", server=config.reshard)
            else:
                fact(_log, logging.WARNING, "the server is built: start it again, or nobody takes updates", data=data)
            return EXIT_OK
        with DataDir.claim(config.data, num_shards=config.shards) as data_dir:
            data_dir.prepare()
            supervisor = Supervisor(
                config, data_dir, sockets, ready_file=ready, watch_stdin=watch_stdin, monitor=monitor
            )
            return asyncio.run(supervisor.run())


def _source_of(
    config: ServerConfig, cluster: ClusterFile | None, node: ClusterNode | None
) -> tuple[str | None, int | None, tuple[Predecessor, ...]]:
    """Return (server id, number of shards, predecessors) of a new directory: those of the server to follow, if any.

    A directory that is there knows them, so a follower starts while its source is away.

    Raises:
        ConfigError: Settings do not fit together.
        UnavailableError: The server to follow has not answered in time.
    """
    if config.follow is None or find_manifest(config.data, node=node) is not None:
        return None, config.shards, ()
    dial = peer_dial(config)
    sources = config.follow
    if cluster is not None and node is not None:
        sources = cluster.sources_of(node, node.copies[0])
    seeds = parse_addresses(sources)
    links = asyncio.run(retry(lambda: link_all(dial, seeds), patience_s=_SOURCE_PATIENCE_S))
    if config.shards not in (None, len(links)):
        raise ConfigError(
            f"--shards {config.shards}: the server at {config.follow} has {len(links)}, and so has a copy of it: leave "
            "--shards out"
        )
    hello = links[0].hello
    if cluster is not None and (hello.server_id, len(links)) != (cluster.server_id, cluster.num_shards):
        raise ConfigError(
            f"{cluster.path}: the server at {config.follow} has server_id: {hello.server_id} and shards: {len(links)}, "
            "and so has a copy of it"
        )
    before = (Predecessor(server_id=each.server_id, seqs=tuple(each.seqs)) for each in hello.predecessors or ())
    return hello.server_id, len(links), tuple(before)


@contextlib.contextmanager
def _bind_metrics(config: ServerConfig, others: OtherNodes | None) -> Iterator[ServerMonitor | None]:
    if config.metrics_port is None:
        yield None
        return
    # An address other than loopback is the user's choice; metrics have no protection.
    with bind_listener(
        config.metrics_host,
        config.metrics_port,
        taker="the metrics page",
        flag="--metrics-port",
        is_open=True,
        host_flag="--metrics-host",
    ) as sock:
        yield ServerMonitor(sock, others=others)
