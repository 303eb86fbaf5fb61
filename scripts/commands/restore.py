"""The command `headrace restore`: a server made of what another one, or its last run, has left."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from headrace.paramserver.archive.points import RestorePoint
from headrace.paramserver.archive.recovery import RestoredShard, fetched_shards, num_shards_at, restore_server
from headrace.paramserver.config.cluster_file import ClusterFile, ClusterNode, cluster_of
from headrace.paramserver.config.data_dir import MANIFEST_NAME
from headrace.paramserver.config.server_settings import MAX_SHARDS
from headrace.paramserver.log.opening import LogKind, check_log_url, kind_of_log
from headrace.paramserver.reshard.rebuild import ShardSummary, TableChoice, rebuild, survey
from headrace.paramserver.reshard.remains import OpenShard, ShardRemains, find_remains, open_remains
from headrace.paramserver.snapshots.bucket import is_object_store_url
from headrace.paramserver.snapshots.new_data_dir import check_target
from headrace.paramserver.system.durable import owner_only
from headrace.paramserver.system.object_store import ObjectStore
from headrace.paramserver.system.text import counted, format_size
from headrace.schemas.errors import ConfigError
from headrace.scripts.commands.log import show_time
from headrace.scripts.commands.terminal import (
    OnlyModel,
    OnlyTables,
    escape,
    number_table,
    option,
    output_console,
    print_line,
    show_bytes,
    show_rows,
)

__all__ = ["restore", "restore_with_progress"]


def restore(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A server's --object-store (s3://, gs://, az:// or file:///), the directory of a snapshot, or that of "
            "a server that does not run, of one of its shards or logs.",
            show_default=False,
        ),
    ],
    *,
    data: Annotated[
        Path | None, option("Directory to make; that of a node is in the cluster file.", "DIR", "--data")
    ] = None,
    shards: Annotated[
        int | None, option("Shards of a new server. Default: as many as SOURCE has.", "M", min=1, max=MAX_SHARDS)
    ] = None,
    name: Annotated[
        str | None, option("A new server of this snapshot in the object store, without the log.", "NAME")
    ] = None,
    at: Annotated[
        str | None, option("Go back to `step=N`, `time=2026-01-31T12:00:00` (UTC) or `seq=N`.", "POINT")
    ] = None,
    table: OnlyTables = None,
    model: OnlyModel = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be made, and make nothing.")] = False,
    cluster: Annotated[Path | None, option("YAML file of a server on several hosts.", "FILE")] = None,
    node: Annotated[str | None, option("Restore the shards of this node of the cluster.", "NAME")] = None,
    log: Annotated[
        str | None, option("The server's --log, if it is replicated: it goes on behind what is restored.", "URL")
    ] = None,
    shard: Annotated[
        list[int] | None,
        option("Only this shard; may be repeated. Of the same server, beside others that are there.", "N", "--shard"),
    ] = None,
) -> None:
    """Make a server of what another one has left: the newest snapshot or store, and the log behind it, all checked.

    From its object store it is the same server, which goes on: each trainer that lives sends what is missing. With
    --cluster and --node it is the directory of one node, with --shard some of its shards.

    With other --shards, with --name, --table or --model, and from a directory, it is a new server. SOURCE does not
    change, and the directory is whole or not there.

    With --at all shards are cut where they have the last step at or before the point.
    """
    point = None if at is None else RestorePoint.parse(at)
    choice = TableChoice(patterns=frozenset(table or ()), model=model)
    is_new = not is_object_store_url(source) or bool(name or table or model or dry_run)
    if not is_new and shards is not None:
        is_new = shards != num_shards_at(ObjectStore.of_url(source, creates=False))
    if is_new:
        for flag, value in (("cluster", cluster), ("node", node), ("log", log)):
            if value:
                raise ConfigError(f"--{flag} goes with the same server: from its object store, all tables, as it was")
        _make_new(source, data, shards, name, point, choice, only_shards=shard, is_dry_run=dry_run)
        return
    url = source
    of_cluster, of_node = cluster_of(cluster, node, environ={}, env_prefix="")
    if log is not None:
        if of_cluster is not None:
            raise ConfigError(f"--log {log}: goes without --cluster, whose file says where the log is")
        check_log_url(log)
    target = data or (None if of_node is None else of_node.data)
    if target is None:
        raise ConfigError("--data DIR is missing: the directory to make")
    done = restore_with_progress(
        ObjectStore.of_url(url, creates=False),
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


def _make_new(
    source: str,
    data: Path | None,
    shards: int | None,
    name: str | None,
    at: RestorePoint | None,
    choice: TableChoice,
    *,
    only_shards: list[int] | None,
    is_dry_run: bool,
) -> None:
    """Make the directory of a new server, or say what it would have."""
    if data is None and not is_dry_run:
        raise ConfigError("--data DIR is missing: the directory to make; or --dry-run shows what it would have")
    if name is not None and at is not None:
        raise ConfigError(f"--at {at}: a snapshot has one step; leave --name out")
    if data is not None:
        _check_apart(source, data)
    with contextlib.ExitStack() as stack:
        stack.enter_context(owner_only())
        remains = stack.enter_context(_remains(source, data, name, at))
        num_shards = shards or len(remains)
        opened = stack.enter_context(open_remains(_chosen(remains, only_shards), at))
        for each in opened:
            _warn_of_offer(each)
        log_bytes = sum(shard.log_bytes for shard in opened)
        if data is None or is_dry_run:
            with show_bytes("Checking the log", log_bytes) as bar:
                summaries = survey(opened, choice, on_log=bar.advance)
        else:
            with contextlib.ExitStack() as bars:
                rows_bar = bars.enter_context(show_rows("Taking rows"))
                log_bar = None

                def count(num_bytes: int) -> None:
                    nonlocal log_bar
                    if log_bar is None:  # one bar at a time
                        bars.close()
                        log_bar = bars.enter_context(show_bytes("Taking the log", log_bytes))
                    log_bar.advance(num_bytes)

                summaries = rebuild(
                    opened,
                    data,
                    num_shards=num_shards,
                    choice=choice,
                    on_rows=rows_bar.advance,
                    on_log=count,
                )
    _print_summaries(summaries)
    if data is not None and not is_dry_run:
        made = counted(num_shards, "shard")
        print_line(f"{data}: a new server of {made}. Next: headrace serve --data {shlex.quote(str(data))}")


@contextlib.contextmanager
def _remains(source: str, data: Path | None, name: str | None, at: RestorePoint | None) -> Iterator[list[ShardRemains]]:
    """Find what a new server is made of; what an object store has is fetched while the block lasts."""
    with contextlib.ExitStack() as stack:
        if not is_object_store_url(source):
            if name is not None:
                raise ConfigError("--name goes with a URL; name the directory of one snapshot")
            with show_bytes(f"Checking {Path(source).name}") as bar:
                found = stack.enter_context(find_remains(Path(source), on_progress=bar.advance))
            yield found
            return
        if data is None:
            data = Path(stack.enter_context(TemporaryDirectory(prefix="headrace-restore-"))) / "new"
        with _fetching() as (begin, advance):
            fetching = fetched_shards(
                ObjectStore.of_url(source, creates=False), data, at=at, name=name, on_size=begin, on_progress=advance
            )
            folders = stack.enter_context(fetching)
        yield [
            ShardRemains(
                name=f"shard {shard}",
                shard=shard,
                snapshots=(folder / "store",) if any((folder / "store").iterdir()) else (),
                log=folder / "log",
            )
            for shard, folder in enumerate(folders)
        ]


def _chosen(remains: list[ShardRemains], shards: list[int] | None) -> list[ShardRemains]:
    """Return what is left of some shards, or of all."""
    known = {each.shard for each in remains}
    for shard in shards or ():
        if shard not in known:
            raise ConfigError(f"--shard {shard}: there is no such shard")
    return [each for each in remains if not shards or each.shard in shards]


def _warn_of_offer(shard: OpenShard) -> None:
    """Say that another server may have what came later."""
    if (offer := shard.offer) is not None:
        has = "has" if offer.is_taken else "may have"
        print_line(
            f"headrace: warning: {shard.name}: {offer.to} {has} taken over at record {shard.last_seq}; what came later "
            "is there",
            to_stderr=True,
        )


def _check_apart(source: str, data: Path) -> None:
    """Refuse a directory that cannot be made, before anything is read for long."""
    if not is_object_store_url(source):
        ours, theirs = data.resolve(), Path(source).resolve()
        servers = [path for path in theirs.parents[:2] if (path / MANIFEST_NAME).is_file()]
        if any(ours == path or ours in path.parents or path in ours.parents for path in (theirs, *servers)):
            raise ConfigError(f"--data {data}: that is where {source} lies; name another directory")
    check_target(data)


def _print_summaries(summaries: Sequence[ShardSummary]) -> None:
    """Print a line of each table, and up to where each shard's rows are there."""
    shown = number_table("table", "rows of the base, about>", "rows of the log>", "deletes>")
    for fqn in sorted({fqn for summary in summaries for fqn in summary.tables}):
        found = [summary.tables[fqn] for summary in summaries if fqn in summary.tables]
        counts = [(each.num_base_rows, each.num_rows, each.num_deleted) for each in found]
        shown.add_row(escape(fqn), *(f"{sum(column):,}" for column in zip(*counts, strict=True)))
    output_console().print(shown)
    for summary in summaries:
        print_line(f"{summary.name}: {_extent_of(summary)}")
    logs = [(each.steps, each.times_us) for each in summaries if each.steps is not None and each.times_us is not None]
    if logs:
        steps, times_us = [step for each, _ in logs for step in each], [time_us for _, each in logs for time_us in each]
        records, size_bytes = sum(each.num_records for each in summaries), sum(each.size_bytes for each in summaries)
        line = f"{counted(records, 'record')} of the log, {format_size(size_bytes)}; steps {min(steps)} to {max(steps)}"
        print_line(f"{line}, trainer's time {show_time(min(times_us))} to {show_time(max(times_us))} UTC.")


def _extent_of(summary: ShardSummary) -> str:
    if summary.step < 0:
        return f"up to record {summary.seq}."
    newer = "" if summary.is_exact else ", with some newer rows"
    return f"up to record {summary.seq}; all of step {summary.step} of epoch {summary.epoch}{newer}."


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
    with owner_only(), _fetching() as (begin, advance):
        return restore_server(
            store, data, at=at, shards=shards, cluster=cluster, node=node, log=log, on_size=begin, on_progress=advance
        )


@contextlib.contextmanager
def _fetching() -> Iterator[tuple[Callable[[int], None], Callable[[int], None]]]:
    """Show a bar of what is fetched: the first function takes all bytes, and the second those that have come since."""
    with show_bytes("Fetching") as bar:
        yield lambda size_bytes: bar.update(0, size_bytes), bar.advance


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
