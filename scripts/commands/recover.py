"""The command `headrace restore`: a server, or a shard of it, made again from its object store."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import Annotated

import typer

from headrace.paramserver.archive.points import RestorePoint
from headrace.paramserver.archive.recovery import RestoredShard, restore_server
from headrace.paramserver.config.cluster_file import ClusterFile, ClusterNode, cluster_of
from headrace.paramserver.log.opening import LogKind, check_log_url, kind_of_log
from headrace.paramserver.system.durable import owner_only
from headrace.paramserver.system.object_store import ObjectStore
from headrace.schemas.errors import ConfigError
from headrace.scripts.commands.terminal import option, print_line, show_bytes

__all__ = ["restore", "restore_with_progress"]


def restore(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server's --object-store: s3://, gs://, az:// or file:///.")
    ],
    *,
    data: Annotated[
        Path | None, option("Directory of the server; that of a node is in the cluster file.", "DIR", "--data")
    ] = None,
    cluster: Annotated[Path | None, option("YAML file of a server on several hosts.", "FILE")] = None,
    node: Annotated[str | None, option("Restore the shards of this node of the cluster.", "NAME")] = None,
    log: Annotated[
        str | None, option("The server's --log, if it is replicated: it goes on behind what is restored.", "URL")
    ] = None,
    at: Annotated[
        str | None, option("Go back to `step=N`, `time=2026-01-31T12:00:00` (UTC) or `seq=N`.", "POINT")
    ] = None,
    shard: Annotated[
        list[int] | None, option("Only this shard, beside others that are there; may be repeated.", "N", "--shard")
    ] = None,
) -> None:
    """Make a server again from its object store: the newest snapshot and the archived log behind it, all checked.

    With --cluster and --node it makes the directory of one node of a server on several hosts.

    Without --at everything that was archived is there, and each trainer that lives sends what is missing. With --at all
    shards are cut where they have the last step at or before the point; what was archived after it is given up.
    """
    point = None if at is None else RestorePoint.parse(at)
    of_cluster, of_node = cluster_of(cluster, node, environ={}, env_prefix="")
    if log is not None:
        if of_cluster is not None:
            raise ConfigError(f"--log {log}: goes without --cluster, whose file says where the log is")
        check_log_url(log)
    target = data or (None if of_node is None else of_node.data)
    if target is None:
        raise ConfigError("--data DIR is missing: the directory to make")
    done = restore_with_progress(
        ObjectStore.of_url(url),
        target,
        at=point,
        shards=shard,
        cluster=of_cluster,
        node=of_node,
        log=kind_of_log(log),
    )
    for restored in done:
        print_line(_describe(restored))
    if any(restored.claim for restored in done):
        print("A copy that still runs stops soon after this one starts; what it acks from now on is not in this one.")
    command = _serve_command(url, data, of_cluster, of_node)
    print_line(f"Next: {shlex.join(command if log is None else [*command, '--log', log])}")


def _serve_command(url: str, data: Path | None, cluster: ClusterFile | None, node: ClusterNode | None) -> list[str]:
    words = ["headrace", "serve"]
    if cluster is not None and node is not None:
        words += ["--cluster", str(cluster.path), "--node", node.name]
    if data is not None:
        words += ["--data", str(data)]
    return words if cluster is not None and cluster.object_store else [*words, "--object-store", url]


def restore_with_progress(
    store: ObjectStore,
    data: Path,
    *,
    at: RestorePoint | None = None,
    shards: list[int] | None = None,
    cluster: ClusterFile | None = None,
    node: ClusterNode | None = None,
    log: LogKind = "file",
) -> list[RestoredShard]:
    """Restore a server or a node of it, with a bar on a terminal; see `restore_server`."""
    with owner_only(), contextlib.ExitStack() as stack:
        advance = None

        def begin(size_bytes: int) -> None:
            nonlocal advance
            advance = stack.enter_context(show_bytes("Restoring", size_bytes)).advance

        def count(num_bytes: int) -> None:
            if advance is not None:
                advance(num_bytes)

        return restore_server(
            store, data, at=at, shards=shards, cluster=cluster, node=node, log=log, on_size=begin, on_progress=count
        )


def _describe(restored: RestoredShard) -> str:
    if not restored.seq:
        return f"Shard {restored.shard}: empty; nothing of it was archived.{_takes_over(restored)}"
    source = "the whole log" if restored.snapshot is None else f"snapshot {restored.snapshot}"
    end = f"up to record {restored.seq}"
    if (point := restored.point) is not None:
        end += f", where step {point.step} of epoch {point.epoch} has ended"
        end += "" if point.is_exact else ", with some newer rows"
    return f"Shard {restored.shard}: {source} and log {end}.{_takes_over(restored)}"


def _takes_over(restored: RestoredShard) -> str:
    if restored.claim is None:
        return ""
    at = restored.archived_at
    last = "" if at is None else f", which last archived at {at:%Y-%m-%d %H:%M:%S} UTC"
    return f" Takes over from {restored.claim.owner}, term {restored.claim.term}{last}."
