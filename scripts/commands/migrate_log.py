"""The command `headrace migrate-log`: a stopped server's update logs, moved from files into NATS or back."""

# ruff: noqa: RUF009 (`setting` returns a dataclass field, which the linter cannot know)

from __future__ import annotations

import asyncio
import contextlib
import shlex
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from headrace.paramserver.config.cluster_file import ClusterFile, ClusterNode, cluster_of
from headrace.paramserver.log.opening import check_log_url, log_mover
from headrace.paramserver.shard.migration import (
    MovedLog,
    Mover,
    find_server,
    move_to_files,
    move_to_stream,
    remove_streams,
)
from headrace.paramserver.system.durable import owner_only
from headrace.paramserver.system.flags import with_setting_flags
from headrace.paramserver.system.settings import check, merge, path_setting, size_setting, text_setting
from headrace.schemas.errors import ConfigError
from headrace.scripts.commands.terminal import option, print_line, show_bytes

__all__ = ["migrate_log"]

_FILE = "file"
_GIB = 1 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class _LogPlace:
    """Where the replicated log is or will be; the fields are those of `ShardSettings`."""

    log: str | None = text_setting(None, "With `--to file`: where the log is now, as `serve` was told.")
    log_credentials: Path | None = path_setting(None, "What to show its servers; NATS_CREDS and such, too.")
    log_tls_authority: Path | None = path_setting(None, "Authorities of their certificates, PEM.")
    log_tls_certificate: Path | None = path_setting(None, "Our certificate for them, PEM.")
    log_tls_key: Path | None = path_setting(None, "Its key, PEM.")
    log_monitor: str | None = text_setting(None, "Their monitoring, with commas; by default port 8222 of each.")
    log_max_bytes: int = size_setting(
        0, 0, 1024 * 1024 * _GIB, "Disk a shard, on each of them; give it to `serve`, too. 0 takes what fits, as there."
    )

    def __post_init__(self) -> None:
        check(self)


@with_setting_flags(_LogPlace)
def migrate_log(
    *,
    to: Annotated[str, option("nats://HOST,HOST,HOST, or file.", "URL")],
    data: Annotated[
        Path | None, option("Directory of the stopped server; a node's is in the cluster file.", "DIR", "--data")
    ] = None,
    cluster: Annotated[Path | None, option("YAML file of a server on several hosts.", "FILE")] = None,
    node: Annotated[str | None, option("Move the logs of this node of the cluster.", "NAME")] = None,
    **flags: Any,
) -> int:
    """Move the update logs of a stopped server from files into NATS JetStream, or back with `--to file`.

    Positions stay, so replicas, the archive and trainers go on where they were. Into NATS nothing is copied; back, what
    the directory holds of the log is written anew. Interrupted, it goes on when it is repeated.

    Returns:
        0.

    Raises:
        ConfigError: A server runs, the engine is unfit, a stream has other records, or there is nothing to move.
        HeadraceError: A log is damaged, a disk failed, or the engine does not answer.
    """
    of_cluster, of_node = cluster_of(cluster, node, environ={}, env_prefix="")
    target = data or (None if of_node is None else of_node.data)
    if target is None:
        raise ConfigError("--data DIR is missing: the directory of the server")
    place = merge(_LogPlace, flags=flags | {"log": _url_of(to, flags["log"], of_cluster)}, environ={}, prefix="")
    manifest = find_server(target, of_cluster, of_node)
    mover = log_mover(place, server_id=manifest.server_id, num_shards=manifest.num_shards)
    started_s = time.monotonic()
    if (to == _FILE) == (manifest.log == _FILE):
        if to == _FILE:  # what is left to do after the decision
            asyncio.run(remove_streams(target, mover, manifest.shards if of_node is None else of_node.shards))
        print_line(f"{target}: the logs are in {'files' if to == _FILE else 'NATS'} already.")
    elif to == _FILE:
        _move_to_files(target, mover, of_cluster, of_node)
    else:
        with owner_only():
            asyncio.run(move_to_stream(target, mover, cluster=of_cluster, node=of_node, on_moved=_tell_begun))
    print_line(f"The server may start: it was kept waiting for {time.monotonic() - started_s:.1f} s.")
    print_line(f"Next: {_next(to, data, of_cluster, of_node)}")
    return 0


def _url_of(to: str, log: str | None, cluster: ClusterFile | None) -> str:
    """Return the URL of the replicated log."""
    if to != _FILE:
        if log is not None:
            raise ConfigError(f"--log {log}: goes with --to file; --to says where the log will be")
        try:
            check_log_url(to)
        except ConfigError as exc:
            raise ConfigError(f"{str(exc).replace('--log', '--to', 1)}; or file") from exc
        return to
    url = log or (None if cluster is None else cluster.log)
    if url is None:
        raise ConfigError("--log URL is missing: where the log is now, as headrace serve was told")
    check_log_url(url)
    return url


def _move_to_files(data: Path, mover: Mover, cluster: ClusterFile | None, node: ClusterNode | None) -> None:
    with owner_only(), contextlib.ExitStack() as stack:
        advance = None

        def begin(size_bytes: int) -> None:
            nonlocal advance
            advance = stack.enter_context(show_bytes("Writing the log", size_bytes)).advance

        def count(num_bytes: int) -> None:
            if advance is not None:
                advance(num_bytes)

        moving = move_to_files(
            data, mover, cluster=cluster, node=node, on_size=begin, on_progress=count, on_moved=_tell_ended
        )
        asyncio.run(moving)


def _tell_begun(moved: MovedLog) -> None:
    print_line(f"Shard {moved.shard}: files up to record {moved.last_seq}, then stream {moved.stream}.", flush=True)


def _tell_ended(moved: MovedLog) -> None:
    print_line(f"Shard {moved.shard}: all {moved.last_seq} records of stream {moved.stream} are in files.", flush=True)


def _next(to: str, data: Path | None, cluster: ClusterFile | None, node: ClusterNode | None) -> str:
    words = ["headrace", "serve"]
    if cluster is not None and node is not None:
        words += ["--cluster", str(cluster.path), "--node", node.name]
    if data is not None:
        words += ["--data", str(data)]
    if cluster is None:
        return shlex.join(words if to == _FILE else [*words, "--log", to])
    change = f"log: {to}" if to != _FILE else "no log: and no standbys:"
    others = [name for name in cluster.nodes if node is None or name != node.name]
    rest = f"the same for node {', '.join(others)}, and " if others else ""
    return f"{rest}{change} in {cluster.path}; then {shlex.join(words)}"
