"""The commands `headrace snapshot …`: copies of a whole server at one consistent cut."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.table import Table

from headrace.paramserver.config.data_dir import MANIFEST_NAME as DATA_DIR_MANIFEST
from headrace.paramserver.snapshots.bucket import SnapshotStore, is_object_store_url
from headrace.paramserver.snapshots.directory import SnapshotFiles, read_manifest, verify_snapshot
from headrace.paramserver.snapshots.remote import create_snapshot, fetch_snapshot
from headrace.paramserver.system.text import counted, format_size
from headrace.schemas.errors import ConfigError, CorruptionError
from headrace.schemas.idl import idl
from headrace.schemas.snapshot_manifest import MANIFEST_NAME, SnapshotManifest
from headrace.scripts.commands.log import show_time
from headrace.scripts.commands.terminal import (
    Access,
    AsJson,
    ProgressBar,
    ServerFlag,
    escape,
    option,
    output_console,
    print_line,
    show_bytes,
    with_server_flags,
)

__all__ = ["snapshot"]

_ANSWER_TIMEOUT_S = 10.0

snapshot = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Make, list, check, fetch and remove snapshots of a server.",
)

_Directory = Annotated[
    Path, typer.Argument(metavar="DIR", help="Directory of a server, or one that holds snapshots.", show_default=False)
]

_DirectoryOrUrl = Annotated[
    str, typer.Argument(metavar="DIR|URL", help="As DIR elsewhere, or an object store's URL.", show_default=False)
]
_Url = Annotated[
    str, typer.Argument(metavar="URL", help="s3://, gs://, az:// or file:// and a prefix.", show_default=False)
]


@snapshot.command()
@with_server_flags
def create(
    *,
    server: ServerFlag = None,
    name: Annotated[str | None, option("Its name; by default the present time.", "NAME")] = None,
    run: Annotated[str | None, option("Take it at a step of this run; by default the newest.", "RUN")] = None,
    now: Annotated[bool, option("Take it now, at no step: for a run that ended in mid-step.", None, "--now")] = False,
    timeout_s: Annotated[float, typer.Option(help="How long to try, seconds.", min=0.1, metavar="SECONDS")] = 60.0,
    as_json: AsJson = False,
    access: Access,
) -> None:
    """Make a snapshot of a running server: all shards at one step. Writes continue meanwhile.

    If the server has an object store, the snapshot goes there: each shard sends what the store lacks of its part.
    """
    if now and run is not None:
        raise ConfigError("--now takes no step of a --run; give only one of them")
    reached = access(server, timeout_s=_ANSWER_TIMEOUT_S)
    with ExitStack() as bars:
        bar: ProgressBar | None = None

        def show_upload(done_bytes: int, total_bytes: int) -> None:
            nonlocal bar
            bar = bar or bars.enter_context(show_bytes("Uploading"))
            bar.update(done_bytes, total_bytes)

        making = create_snapshot(
            reached.address,
            dial=reached.dial(idl.Role.ADMIN),
            name=name,
            run=run,
            at_step=not now,
            timeout_s=timeout_s,
            on_upload=show_upload,
        )
        manifest = asyncio.run(making)
    _print(manifest, as_json=as_json)


@snapshot.command("list")
def list_snapshots(directory: _DirectoryOrUrl, *, as_json: AsJson = False) -> None:
    """List the snapshots in a directory, oldest first. Exit code 1 when one cannot be read."""
    void: list[str] = []
    if is_object_store_url(directory):
        store, damage = SnapshotStore.of_url(directory, creates=False), list[str]()
        manifests = store.list(with_void=True)
        void = [manifest.name for manifest in manifests if store.is_void(manifest)]
    else:
        manifests, damage = _files(Path(directory)).list()
        if not manifests and not damage and not (Path(directory) / DATA_DIR_MANIFEST).is_file():
            raise ConfigError(f"{directory}: no snapshots, and not the directory of a server")
    if as_json:
        found = [_to_json(manifest) | {"is_void": manifest.name in void} for manifest in manifests]
        print(json.dumps({"snapshots": found, "damage": damage}, indent=2))
    elif manifests:
        output_console().print(_table(manifests))
    else:
        print("No snapshots.")
    if void and not as_json:
        print_line(f"Void, because a shard was set back to before: {', '.join(void)}.")
    if damage:
        raise CorruptionError(damage[0] if len(damage) == 1 else f"{damage[0]}; and {len(damage) - 1} more")


@snapshot.command()
def verify(
    directory: _DirectoryOrUrl,
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="One snapshot; all by default.")] = None,
) -> None:
    """Check every byte of snapshots against their manifests. Exit code 1 when one is damaged."""
    if is_object_store_url(directory):
        store = SnapshotStore.of_url(directory, creates=False)
        for one in [name] if name else store.names():
            _check(store, one)
        return
    path = Path(directory)
    if (path / MANIFEST_NAME).is_file() and name is None:
        folders = [path]
    else:
        files = _files(path)
        manifests, damage = files.list()
        if damage:
            raise CorruptionError(damage[0])
        folders = [files.folder_of(name)] if name else [files.folder_of(manifest.name) for manifest in manifests]
    if not folders:
        raise ConfigError(f"{directory}: no snapshots")
    for folder in folders:
        with show_bytes(f"Checking {folder.name}", _size_of(folder)) as bar:
            manifest = verify_snapshot(folder, on_progress=bar.advance)
        _say_right(manifest)


@snapshot.command()
def upload(
    directory: Annotated[
        Path, typer.Argument(metavar="SNAPSHOT", help="Directory of one snapshot.", show_default=False)
    ],
    url: _Url,
) -> None:
    """Send a snapshot to an object store; files that are there already are not sent again."""
    total = read_manifest(directory).size_bytes
    with show_bytes(f"Uploading {directory.name}", total) as bar:
        sent_bytes = SnapshotStore.of_url(url).upload(directory, on_progress=bar.advance)
    print_line(f"{directory.name}: {format_size(sent_bytes)} of {format_size(total)} sent.")


@snapshot.command()
def check(url: _Url, name: Annotated[str, typer.Argument(metavar="NAME", help="The snapshot.")]) -> None:
    """Read every byte of a snapshot in an object store. Exit code 1 when it is damaged."""
    _check(SnapshotStore.of_url(url, creates=False), name)


def _check(store: SnapshotStore, name: str) -> None:
    with show_bytes(f"Checking {name}", store.manifest_of(name).size_bytes) as bar:
        manifest = store.check(name, on_progress=bar.advance)
    _say_right(manifest)


def _say_right(manifest: SnapshotManifest) -> None:
    size = format_size(manifest.size_bytes)
    print_line(f"{manifest.name}: {counted(len(manifest.files()), 'file')}, {size}: all checksums are right.")


@snapshot.command()
def remove(
    directory: _DirectoryOrUrl, name: Annotated[str, typer.Argument(metavar="NAME", help="The snapshot.")]
) -> None:
    """Remove one snapshot. From an object store, `prune` removes its files a day later."""
    if is_object_store_url(directory):
        store = SnapshotStore.of_url(directory, creates=False)
        store.manifest_of(name)
        store.remove(name)
    else:
        _files(Path(directory)).remove(name)
    print_line(f"Removed {name}.")


@snapshot.command()
def prune(
    directory: _DirectoryOrUrl,
    *,
    keep: Annotated[int, typer.Option(help="How many of the newest of each store to keep.", min=1, metavar="N")] = 3,
) -> None:
    """Remove all snapshots but the newest of each store, and the remains of interrupted ones.

    The newest are those with the highest positions in the store's log, whatever the clocks said. In an object store,
    those that a shard was set back to before do not count, and go.
    """
    files = (
        SnapshotStore.of_url(directory, creates=False) if is_object_store_url(directory) else _files(Path(directory))
    )
    manifests = files.list(with_void=True) if isinstance(files, SnapshotStore) else files.list()[0]
    num_newer: Counter[str] = Counter()
    old = []
    for manifest in reversed(manifests):
        if manifest.lease_s:  # an export reads it and will remove it
            continue
        is_void = isinstance(files, SnapshotStore) and files.is_void(manifest)
        num_newer[manifest.server_id] += not is_void
        if is_void or num_newer[manifest.server_id] > keep:
            old.append(manifest.name)
    for name in reversed(old):
        files.remove(name)
        print_line(f"Removed {name}.")
    if isinstance(files, SnapshotStore):
        files.prune()
    else:
        files.prune_abandoned()
    print_line(f"{len(manifests) - len(old)} left.")


@snapshot.command()
@with_server_flags
def fetch(
    url: Annotated[
        str | None, typer.Argument(metavar="[URL]", help="An object store's, instead of a server.", show_default=False)
    ] = None,
    *,
    server: ServerFlag = None,
    to: Annotated[Path, option("Directory to put it in.", "DIR", "--to")],
    name: Annotated[str, option("Snapshot; the newest by default.", "NAME")] = "",
    access: Access,
) -> None:
    """Copy a snapshot from a server, or an object store's URL, to this machine.

    After an interruption, it continues where it was.
    """
    if url is not None:
        if server is not None:
            raise ConfigError("give the URL of an object store, or --server, not both")
        if not is_object_store_url(url):
            raise ConfigError(f"{url}: no URL of an object store; a server's address goes with --server")
        store = SnapshotStore.of_url(url, creates=False)
        manifest = store.choose(name)
        with show_bytes("Fetching", manifest.size_bytes) as bar:
            store.fetch(manifest.name, SnapshotFiles(to), on_progress=bar.advance)
        _print(manifest, as_json=False)
        return
    reached = access(server, timeout_s=_ANSWER_TIMEOUT_S)
    with show_bytes("Fetching") as bar:
        making = fetch_snapshot(reached.address, to, dial=reached.dial(), name=name, on_progress=bar.update)
        manifest = asyncio.run(making)
    _print(manifest, as_json=False)


def _size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _files(directory: Path) -> SnapshotFiles:
    if not directory.is_dir():
        raise ConfigError(f"{directory}: not a directory")
    return SnapshotFiles(directory / "snapshots" if (directory / DATA_DIR_MANIFEST).is_file() else directory)


def _print(manifest: SnapshotManifest, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(_to_json(manifest), indent=2))
    else:
        where = f"step {manifest.step} of epoch {manifest.epoch}" if manifest.step >= 0 else "no common step"
        size = f"{counted(len(manifest.parts), 'shard')}, {format_size(manifest.size_bytes)}"
        print_line(f"Snapshot {manifest.name}: {where}, {size}.")


def _table(manifests: list[SnapshotManifest]) -> Table:
    table = Table(box=box.SIMPLE)
    table.add_column("name", overflow="fold", min_width=max(len(manifest.name) for manifest in manifests))
    table.add_column("made, UTC")
    for column in ("epoch", "step", "shards", "tables", "size"):
        table.add_column(column, justify="right")
    for manifest in manifests:
        step = manifest.step if manifest.step >= 0 else "–"
        counts = (manifest.epoch, step, len(manifest.parts), len(manifest.tables), format_size(manifest.size_bytes))
        table.add_row(escape(manifest.name), show_time(manifest.created_us), *map(str, counts))
    return table


def _to_json(manifest: SnapshotManifest) -> dict[str, Any]:
    head = {name: getattr(manifest, name) for name in ("name", "created_us", "server_id", "epoch", "step")}
    seqs = [part.seq for part in manifest.parts]
    return {**head, "seqs": seqs, "tables": sorted(manifest.tables), "size_bytes": manifest.size_bytes}
