"""A server's data directory: its manifest, its shards' directories, and the lock of the server that uses it.

    DIR/headrace.json   manifest: format, server id, number of shards; of a cluster's node also which shards are its own
    DIR/LOCK            flock held by the supervisor and each of its shard processes; holds the supervisor's pid
    DIR/shard-0000/     one directory per shard; its log, there from the start, and its store are the shard's affair,
                        and `claim.json` says whose it is

Shard processes inherit the lock's open file description. So the lock is free only when the last of them has ended,
even if the supervisor was killed.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shlex
import uuid
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, Self, get_args

from headrace.paramserver.config.cluster_file import ClusterFile, ClusterNode
from headrace.paramserver.config.follow_state import FollowState
from headrace.paramserver.config.server_settings import MAX_SHARDS
from headrace.paramserver.log.claims import CLAIM_FILE, HeldClaims
from headrace.paramserver.log.opening import LogKind
from headrace.paramserver.system.durable import FULL_DISK, disk_error, fsync_path, write_file
from headrace.paramserver.system.file_lock import FileLock
from headrace.schemas.errors import ConfigError, CorruptionError, StorageError
from headrace.schemas.predecessors import Predecessor
from headrace.schemas.snapshot_manifest import shard_folder

__all__ = [
    "FORMAT_VERSION",
    "LOCK_NAME",
    "MANIFEST_NAME",
    "DataDir",
    "Manifest",
    "check_data_dir",
    "find_manifest",
    "has_rows",
    "is_in_use",
    "restore_command",
]

MANIFEST_NAME = "headrace.json"
LOCK_NAME = "LOCK"
# ON DISK: raise it when an older Headrace must not open the directory.
FORMAT_VERSION = 5
_FORMAT = "headrace-data"
_TEMPORARY_NAME = MANIFEST_NAME + ".tmp"
_LOG_NAME = "log"
# Besides shard directories without a record, a directory that is not a store yet may hold what the file system or an
# interrupted first start created.
_HARMLESS = frozenset({"lost+found", LOCK_NAME, _TEMPORARY_NAME})
_SHARD_NAME = re.compile(r"shard-[0-9]{4}")
_HALF_SHARD_NAME = re.compile(r"\.shard-[0-9]{4}\.[a-z]+")  # one that is being restored, or was when it was killed


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Contents of `headrace.json`."""

    server_id: str  # identity of the store (a UUID)
    num_shards: int  # fixed; of the whole server
    node_shards: tuple[int, ...] | None = None  # those of a cluster's node; None for all
    log: LogKind = "file"  # where the log is: in the shards' directories, or in NATS
    predecessors: tuple[Predecessor, ...] = ()  # servers of other numbers of shards in whose place this one is

    @property
    def shards(self) -> tuple[int, ...]:
        """The shards whose directories lie here."""
        return tuple(range(self.num_shards)) if self.node_shards is None else self.node_shards

    def encode(self) -> bytes:
        """Return the file's contents."""
        values: dict[str, Any] = {"format": _FORMAT, "format_version": FORMAT_VERSION, "server_id": self.server_id}
        values |= {"num_shards": self.num_shards} | ({} if self.node_shards is None else {"shards": self.node_shards})
        values |= {} if self.log == "file" else {"log": self.log}
        if self.predecessors:
            values["predecessors"] = [each.to_json() for each in self.predecessors]
        return json.dumps(values, indent=2).encode() + b"\n"

    @classmethod
    def of_node(
        cls,
        cluster: ClusterFile,
        node: ClusterNode,
        *,
        log: LogKind = "file",
        predecessors: tuple[Predecessor, ...] = (),
    ) -> Self:
        """Return the manifest of a node's directory, with the shards of which it has a copy."""
        shards = None if len(node.copies) == cluster.num_shards else tuple(sorted(node.copies))
        return cls(
            server_id=cluster.server_id,
            num_shards=cluster.num_shards,
            node_shards=shards,
            log=log,
            predecessors=predecessors,
        )


class DataDir:
    """A directory claimed by this process.

    `claim` checks the directory, and locks it if it holds a store; it writes nothing. `prepare` then creates what is
    missing. In between a server can bind its ports, and fail with nothing written.

    Attributes:
        path: The directory, absolute.
        manifest: Of the store, or of the one that `prepare` will create.
    """

    def __init__(self, path: Path, manifest: Manifest, lock: FileLock | None) -> None:
        """Use `claim`."""
        self.path = path
        self.manifest = manifest
        self._lock = lock
        self._is_written = lock is not None
        self._from_elsewhere: tuple[int, ...] = ()  # shards that may be missing

    @classmethod
    def claim(
        cls,
        path: Path,
        *,
        num_shards: int | None,
        cluster: ClusterFile | None = None,
        node: ClusterNode | None = None,
        log: LogKind = "file",
        server_id: str | None = None,
        predecessors: tuple[Predecessor, ...] = (),
    ) -> Self:
        """Check a directory, which may be missing, and lock it if it holds a store.

        A new store gets a `server_id` of its own, unless one is given, and the `predecessors`.

        Without `num_shards`, a store keeps its number of shards, and a new one gets 1. That of a `node` must have the
        shards that the `cluster` gives it; standbys and those whose `log` is elsewhere may be missing, because they are
        made of their owners or of the log.

        Raises:
            ConfigError: Not a directory, in use, not accessible, not ours, or of another number of shards; or it has
                other shards than its node, which the message says how to mend.
            CorruptionError: The manifest cannot be read.
        """
        path = path.absolute()
        if not _has_store(path, of_node=node):
            if cluster is None or node is None:
                server_id = server_id or str(uuid.uuid4())
                shards = num_shards or 1
                new = Manifest(server_id=server_id, num_shards=shards, log=log, predecessors=predecessors)
                return cls(path, new, None)
            if _shards_in(path):  # all of them were moved here
                _check_node(path, Manifest(server_id=cluster.server_id, num_shards=0, log=log), cluster, node)
            return cls(path, Manifest.of_node(cluster, node, log=log, predecessors=predecessors), None)
        lock = _lock(path)
        try:
            manifest = _read_manifest(path, num_shards)
            _check_log(path, manifest, log)
            if cluster is None or node is None:
                _refuse_node(path, manifest)
                return cls(path, manifest, lock)
            _check_node(path, manifest, cluster, node)
            of_node = Manifest.of_node(cluster, node, log=log, predecessors=manifest.predecessors)
            claimed = cls(path, of_node, lock)
            claimed._is_written = claimed.manifest == manifest
            claimed._from_elsewhere = node.standbys if log == "file" else node.copies
        except BaseException:
            lock.close()
            raise
        return claimed

    @property
    def lock_fd(self) -> int:
        """File descriptor of the lock; a process that inherits it holds the lock too."""
        assert self._lock is not None, "prepare() comes first"
        return self._lock.fd

    def shard_path(self, shard: int) -> Path:
        """Return the directory of a shard."""
        return self.path / shard_folder(shard)

    def prepare(self) -> None:
        """Create what is missing, durably, and take the lock if it is not taken.

        Raises:
            ConfigError: Not writable, or another server was faster.
            CorruptionError: A shard's directory is gone.
            StorageError: The disk is full or fails.
        """
        try:
            if self._lock is None:
                self._create()
            else:
                self._make_shards(self._from_elsewhere)
            _check_shards(self.path, self.manifest)
            if not self._is_written:  # shards were moved here, or away
                self._write_manifest()
            self._name_shards()
            os.ftruncate(self.lock_fd, 0)
            os.pwrite(self.lock_fd, f"{os.getpid()}\n".encode(), 0)
        except OSError as exc:
            _fail(self.path, exc)

    def _create(self) -> None:
        missing = [path for path in (self.path, *self.path.parents) if not path.exists()]
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path)
        if (self.path / MANIFEST_NAME).exists():
            raise ConfigError(f"--data {self.path}: another server made it just now; start again")
        self._make_shards(self.manifest.shards)
        # The manifest comes last: where it exists, every shard's log has existed.
        self._write_manifest()
        for path in missing:
            fsync_path(path.parent)

    def _name_shards(self) -> None:
        """Write into each new shard's directory whose it is: disks may be mounted in each other's place."""
        for shard in self.manifest.shards:
            held = HeldClaims.read(self.shard_path(shard), self.manifest.server_id, shard)
            if not (self.shard_path(shard) / CLAIM_FILE).exists():
                held.write(self.shard_path(shard))

    def _make_shards(self, shards: Iterable[int]) -> None:
        for shard in shards:
            (self.shard_path(shard) / _LOG_NAME).mkdir(parents=True, exist_ok=True)
            fsync_path(self.shard_path(shard))

    def _write_manifest(self) -> None:
        write_file(self.path / MANIFEST_NAME, self.manifest.encode(), aside=self.path / _TEMPORARY_NAME)
        self._is_written = True

    def close(self) -> None:
        """Give the lock up; shard processes that still run keep it. Idempotent."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


def check_data_dir(
    path: Path,
    *,
    num_shards: int | None,
    cluster: ClusterFile | None = None,
    node: ClusterNode | None = None,
    log: LogKind = "file",
) -> Manifest | None:
    """Check a directory as `claim` and `prepare` do, but write nothing and take no lock: a server may be using it.

    Returns:
        The manifest; None if there is no store yet.

    Raises:
        ConfigError: Not a directory, not accessible, not ours, or of another number of shards.
        CorruptionError: The manifest cannot be read, or a shard's directory is gone.
    """
    path = path.absolute()
    if _has_store(path, of_node=node):
        manifest = _read_manifest(path, num_shards)
        _check_log(path, manifest, log)
    elif cluster is not None and node is not None and _shards_in(path):  # all of them were moved or restored here
        manifest = Manifest(server_id=cluster.server_id, num_shards=0, log=log)
    else:
        return None
    if cluster is not None and node is not None:
        _check_node(path, manifest, cluster, node)
        manifest = Manifest.of_node(cluster, node, log=log)
    try:
        if manifest.log == "file":
            standbys = () if node is None else node.standbys
            _check_shards(path, replace(manifest, node_shards=tuple(sorted(set(manifest.shards) - set(standbys)))))
    except OSError as exc:
        _fail(path, exc)
    return manifest


def find_manifest(path: Path, *, node: ClusterNode | None = None) -> Manifest | None:
    """Return the manifest in a directory, whose shards may be missing; None if there is none. Raises as `claim`.

    Without a manifest, there may be shards of the `node`.
    """
    return _read_manifest(path, None) if _has_store(path, of_node=node) else None


def restore_command(cluster: ClusterFile, node: ClusterNode, path: Path, *, shards: Iterable[int] = ()) -> str:
    """Return the command that restores a node's directory, or some shards of it, from the cluster's object store."""
    words = ["headrace", "restore", cluster.object_store or "URL", "--cluster", str(cluster.path), "--node", node.name]
    words += ["--data", str(path), *(word for shard in shards for word in ("--shard", str(shard)))]
    return shlex.join(words)


def is_in_use(path: Path) -> bool:
    """Return whether a server, or a process that a killed server left behind, holds the directory.

    Raises:
        ConfigError: Not accessible.
    """
    try:
        with FileLock(path / LOCK_NAME, creates=False) as lock:
            return not lock.try_lock()
    except FileNotFoundError:
        return False
    except OSError as exc:
        _fail(path, exc)


def _has_store(path: Path, *, of_node: ClusterNode | None = None) -> bool:
    """Return whether there is a store; otherwise check that nothing foreign is there, but shards of a node."""
    try:
        names = set(os.listdir(path))
        if MANIFEST_NAME in names:
            return True
        moved = set() if of_node is None else {shard_folder(shard) for shard in of_node.copies}
        left = (name for name in names - _HARMLESS - moved if not _HALF_SHARD_NAME.fullmatch(name))
        foreign = sorted(name for name in left if not _is_empty_shard(path / name))
    except FileNotFoundError:
        return False
    except OSError as exc:
        _fail(path, exc)
    if foreign:
        raise ConfigError(
            f"--data {path}: holds {foreign[0]!r} and no {MANIFEST_NAME}: not a directory of Headrace's; "
            "name a new or an empty one"
        )
    return False


def _check_shards(path: Path, manifest: Manifest) -> None:
    for shard in manifest.shards:
        # An empty directory is a disk that is not mounted, not a new shard: its acked rows would vanish silently.
        folder = path / shard_folder(shard)
        if not (folder / _LOG_NAME).is_dir():
            what = "log" if folder.is_dir() else "directory"
            raise CorruptionError(f"{folder}: the shard's {what} is missing; is its disk mounted?")
        HeldClaims.read(folder, manifest.server_id, shard)


def _shards_in(path: Path) -> set[int]:
    """Return the shards that a directory has. Those with an empty log are of a first start that was interrupted."""
    try:
        found = [name for name in os.listdir(path) if _SHARD_NAME.fullmatch(name)]
        return {int(name.removeprefix("shard-")) for name in found if not _is_empty_shard(path / name)}
    except FileNotFoundError:
        return set()
    except OSError as exc:
        _fail(path, exc)


def _refuse_node(path: Path, manifest: Manifest) -> None:
    if manifest.node_shards is not None:
        raise ConfigError(
            f"--data {path}: has {len(manifest.shards)} of a cluster's {manifest.num_shards} shards: serve it with "
            "--cluster FILE --node NAME"
        )


def _check_log(path: Path, manifest: Manifest, log: LogKind) -> None:
    """Check that the log is where the settings say: another one would be empty, or another shard's."""
    if manifest.log == log:
        return
    if log == "file":
        raise ConfigError(
            f"--data {path}: its update log is in NATS: serve it with --log nats://…; to have it in files, let a new "
            "server follow this one and take its place: headrace serve --data NEW --follow HOST:PORT"
        )
    raise ConfigError(
        f"--data {path}: its update log is in files: serve it without --log; to have it in NATS, let a new server "
        "follow this one and take its place: headrace serve --data NEW --follow HOST:PORT --log nats://…"
    )


def _check_node(path: Path, manifest: Manifest, cluster: ClusterFile, node: ClusterNode) -> None:
    """Check that a directory has the shards that the cluster file gives to its node."""
    if manifest.server_id != cluster.server_id:
        ours, theirs = cluster.server_id, manifest.server_id
        raise ConfigError(f"--data {path}: is of server {theirs}, and {cluster.path} of {ours}")
    if manifest.num_shards not in (0, cluster.num_shards):
        raise ConfigError(
            f"{cluster.path}: shards: {cluster.num_shards}: {path} is of a server of {manifest.num_shards} shards, and "
            f"rows stay where they were hashed to: say shards: {manifest.num_shards}"
        )
    there = _shards_in(path)
    for shard in sorted(there - set(node.copies)):
        name = cluster.node_of(shard).name
        raise ConfigError(
            f"--data {path}: has shard {shard}, which {cluster.path} gives to node {name}: if that has taken it over, "
            f"remove {path / shard_folder(shard)}; if not, give the shard back to node {node.name}"
        )
    if manifest.log != "file":
        return
    for shard in sorted(set(node.shards) - set(manifest.shards) - there):
        raise ConfigError(
            f"--data {path}: lacks shard {shard}, which {cluster.path} gives to node {node.name}: name it under its "
            f"standbys, and let it take the shard over: headrace promote --shard {shard} --to {node.name}"
            + (f"; or run {restore_command(cluster, node, path, shards=[shard])}" if cluster.object_store else "")
        )
    for shard in sorted(there):
        _check_role(path / shard_folder(shard), shard, cluster, node)


def _check_role(folder: Path, shard: int, cluster: ClusterFile, node: ClusterNode) -> None:
    """Check that a shard's directory may be what the cluster file says. Whoever has taken the shard over has it."""
    state = FollowState.read(folder)
    if shard in node.shards and state is None and cluster.follow is not None and has_rows(folder):
        raise ConfigError(
            f"{folder}: a shard with rows of its own, which cannot follow {cluster.follow}: take follow: out of "
            f"{cluster.path}, or name a new directory"
        )
    if shard in node.shards and state is not None and not state.is_promoted and cluster.follow is None:
        raise ConfigError(
            f"{folder}: a copy that has not taken over shard {shard}, which {cluster.path} gives to node {node.name}: "
            f"name it under its standbys, or say follow:, and run headrace promote --shard {shard} --to {node.name}"
        )
    if shard in node.standbys and state is None and has_rows(folder):
        raise ConfigError(
            f"{folder}: shard {shard} with rows of its own, of which {cluster.path} makes node {node.name} a standby: "
            "if another node has taken the shard over, remove the directory, and it follows; if not, name it under "
            "shards"
        )


def has_rows(folder: Path) -> bool:
    """Return whether a shard's directory has a record, or a store. It blocks."""
    try:
        return (folder / "store").exists() or any((folder / _LOG_NAME).iterdir())
    except FileNotFoundError:
        return False


def _is_empty_shard(path: Path) -> bool:
    if not (_SHARD_NAME.fullmatch(path.name) and path.is_dir()):
        return False
    return all(below.name == _LOG_NAME and below.is_dir() and not any(below.iterdir()) for below in path.iterdir())


def _lock(path: Path) -> FileLock:
    try:
        lock = FileLock(path / LOCK_NAME)
    except OSError as exc:
        _fail(path, exc)
    try:
        if lock.try_lock():
            return lock
        holder = os.pread(lock.fd, 20, 0).decode("ascii", "replace").strip()
    except OSError as exc:  # a file system without flock
        lock.close()
        _fail(path, exc)
    lock.close()
    raise ConfigError(f"--data {path}: in use by another server" + (f" (pid {holder})" if holder.isdigit() else ""))


def _read_manifest(path: Path, required_shards: int | None) -> Manifest:
    file = path / MANIFEST_NAME
    try:
        values: Any = json.loads(file.read_bytes())
    except OSError as exc:
        _fail(path, exc)
    except (ValueError, RecursionError) as exc:
        raise CorruptionError(f"{file}: not a manifest: {exc}") from exc
    if not isinstance(values, dict) or values.get("format") != _FORMAT:
        raise CorruptionError(f"{file}: not a manifest of a Headrace server")
    version = values.get("format_version")
    if version in range(1, FORMAT_VERSION):
        raise ConfigError(
            f"--data {path}: made by Headrace 0.2, which orders rows in another way; make a new directory of its rows: "
            "with 0.2, serve it, and run headrace export --with-states --format safetensors --to rows.safetensors "
            "--server HOST:PORT; with this release, headrace backfill rows.safetensors --data NEW --shards "
            f"{values.get('num_shards')}"
        )
    if version != FORMAT_VERSION:
        raise ConfigError(f"{file}: format version {version}, this Headrace reads {FORMAT_VERSION}")
    server_id, num_shards = values.get("server_id"), values.get("num_shards")
    shards, log = values.get("shards"), values.get("log", "file")
    if not isinstance(server_id, str) or type(num_shards) is not int or not 1 <= num_shards <= MAX_SHARDS:
        raise CorruptionError(f"{file}: server_id {server_id!r} or num_shards {num_shards!r} makes no sense")
    if shards is not None and not _are_shards(shards, num_shards):
        raise CorruptionError(f"{file}: shards {shards!r} make no sense")
    try:
        predecessors = tuple(map(Predecessor.from_json, values.get("predecessors", ())))
    except (KeyError, TypeError, ValueError) as exc:
        raise CorruptionError(f"{file}: predecessors make no sense: {exc!r}") from exc
    if log not in get_args(LogKind):
        raise ConfigError(f"{file}: the log is in {log!r}, which this Headrace does not know")
    if required_shards not in (None, num_shards):
        raise ConfigError(
            f"--shards {required_shards}: {path} has {num_shards} shards, and rows stay where they were hashed to: "
            "leave --shards out, or make another directory: headrace restore "
            f"{path} --data NEW --shards {required_shards}"
        )
    return Manifest(
        server_id=server_id,
        num_shards=num_shards,
        node_shards=None if shards is None else tuple(shards),
        log=log,
        predecessors=predecessors,
    )


def _are_shards(shards: Any, num_shards: int) -> bool:
    """Return whether these are ascending numbers of shards."""
    is_list = isinstance(shards, list) and all(type(shard) is int and 0 <= shard < num_shards for shard in shards)
    return is_list and bool(shards) and shards == sorted(set(shards))


def _fail(path: Path, exc: OSError) -> NoReturn:
    """Raise our error for an `OSError` on the directory."""
    if isinstance(exc, PermissionError) or exc.errno == errno.EROFS:
        raise ConfigError(f"--data {path}: not writable ({exc.strerror})") from exc
    if isinstance(exc, NotADirectoryError | FileExistsError):
        raise ConfigError(f"--data {path}: not a directory") from exc
    if isinstance(exc, FileNotFoundError):
        raise ConfigError(f"--data {path}: cannot be made there ({exc.strerror})") from exc
    if exc.errno in FULL_DISK:
        raise disk_error(f"{path}: the disk is full ({exc.strerror})", exc) from exc
    raise StorageError(f"{path}: {exc.strerror or exc}") from exc
