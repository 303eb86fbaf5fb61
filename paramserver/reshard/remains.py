"""What a server has left in a directory: stores, snapshots and logs of its shards, and what is taken of them.

A shard's rows at a point are those of a *base* and of the log behind it. A base is a snapshot, the shard's store, or
nothing, where the log begins with record 1. A store that was not closed may have rows from behind its own position,
which the rest of the log brings anyway (`store/rows.py`). So it is the first choice for all of the log, and the last
one for a part of it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.paramserver.archive.points import PointFinder, RestorePoint, choose_point
from headrace.paramserver.config.data_dir import LOCK_NAME, MANIFEST_NAME, find_manifest
from headrace.paramserver.ingest.pipeline import stored_mark
from headrace.paramserver.ingest.shard_state import Offer, ShardState, offer_at
from headrace.paramserver.log.inspection import size_of_log
from headrace.paramserver.log.interface import LogRecord, LogSource
from headrace.paramserver.log.opening import open_source
from headrace.paramserver.snapshots.directory import SnapshotFiles, part_folder, verify_snapshot
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.paramserver.system.file_lock import FileLock
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import ConfigError, CorruptionError
from headrace.schemas.snapshot_manifest import MANIFEST_NAME as SNAPSHOT_MANIFEST
from headrace.schemas.snapshot_manifest import shard_folder

__all__ = ["OpenShard", "ShardRemains", "find_remains", "open_remains"]

_STORE_CONFIG = StoreConfig(block_cache_bytes=4 << 20, max_open_files=64)
_SHARD = re.compile(r"shard-(\d{4})")


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRemains:
    """What is left of one shard.

    Attributes:
        name: What it is called in messages.
        shard: Its number; None where nothing tells it.
        store: Its store; None without one.
        snapshots: Its parts of snapshots, which are stores too, the newest first.
        log: The directory of its log; None without a record.
        lacks: What else it had, in words; empty for nothing.
    """

    name: str
    shard: int | None = None
    store: Path | None = None
    snapshots: tuple[Path, ...] = ()
    log: Path | None = None
    lacks: str = ""


@dataclass(kw_only=True, slots=True)
class OpenShard:
    """What is taken of one shard: a base, and records behind it.

    Attributes:
        name: What it is called in messages.
        base: Read-only; None for no rows.
        state: What the shard knew at the base; whoever takes the records takes it on.
        last_seq: Last record that is taken, or that the base has.
        may_be_newer: The base may have rows from behind `last_seq`.
        offer: By which the shard was offered to another server at `last_seq`; None without one.
    """

    name: str
    base: RowStore | None
    state: ShardState
    last_seq: int
    may_be_newer: bool
    offer: Offer | None
    _log: LogSource | None
    _log_path: Path | None

    @property
    def base_seq(self) -> int:
        """Last record that the base has; 0 without one."""
        return 0 if self.base is None else self.base.applied_seq

    @property
    def log_bytes(self) -> int:
        """Size of the whole log."""
        return 0 if self._log_path is None else size_of_log(self._log_path)

    def records(self) -> Iterator[LogRecord]:
        """Yield the records behind the base, checked; raises as `LogSource.read`."""
        if self._log is not None and self.last_seq > self.base_seq:
            yield from self._log.read(self.base_seq + 1, self.last_seq)


@contextmanager
def find_remains(source: Path, *, on_progress: Callable[[int], None] = lambda _: None) -> Iterator[list[ShardRemains]]:
    """Find what is left of a server's shards, and keep servers away from it while the block lasts.

    Args:
        source: A snapshot, or the directory of a server that does not run, of one of its shards, or of a log.
        on_progress: Called with the bytes of a snapshot that were checked since its last call.

    Raises:
        ConfigError: There is nothing of a server, or one is running there.
        CorruptionError: A file of the snapshot is missing or damaged; the message names it.
        StorageError: A file cannot be read.
    """
    source = source.absolute()
    if (source / SNAPSHOT_MANIFEST).is_file():
        manifest = verify_snapshot(source, on_progress=on_progress)
        yield [
            ShardRemains(name=f"shard {part.shard}", shard=part.shard, snapshots=(part_folder(source, part),))
            for part in manifest.parts
        ]
        return
    if not source.is_dir():
        raise ConfigError(f"{source}: not a directory")
    source = source.resolve()  # the server of a link's target is what may run
    server = next((path for path in (source, *source.parents[:2]) if (path / MANIFEST_NAME).is_file()), None)
    with contextlib.nullcontext() if server is None else _kept_from_servers(server):
        found = [_shard_in(folder, server) for folder in _shard_folders(source, server)]
        if not any(each.store or each.log or each.snapshots for each in found):
            raise ConfigError(
                f"{source}: nothing of a server is there: name the directory of a server, of a shard, of a log or of "
                f"one snapshot; an object store in a directory is {source.as_uri()}"
            )
        yield found


@contextmanager
def _kept_from_servers(server: Path) -> Iterator[None]:
    """Keep servers away from a directory, and others that read it too."""
    try:
        lock = FileLock(server / LOCK_NAME, is_read_only=True)
    except FileNotFoundError:  # nobody has ever served it
        yield
        return
    except OSError as exc:
        raise ConfigError(f"{server / LOCK_NAME}: {exc.strerror}") from exc
    with lock:
        if not lock.try_lock(is_shared=True):
            raise ConfigError(
                f"{server}: a server is running there: stop it, name one of its snapshots, or build the new server "
                "while it goes on (headrace serve --reshard)"
            )
        yield


def _shard_folders(source: Path, server: Path | None) -> list[Path]:
    """Return the directories of shards at or below a path, missing ones too; a log alone stands for its shard.

    Others beside them are none: a copy that was moved away has rows of an earlier time.
    """
    if _is_shard(source) or (not _SHARD.fullmatch(source.name) and size_of_log(source)):
        return [source]
    manifest = find_manifest(source) if source == server else None
    if manifest is not None:
        return [source / shard_folder(shard) for shard in range(manifest.num_shards)]
    found = [int(match[1]) for path in source.iterdir() if (match := _SHARD.fullmatch(path.name))]
    return [source / shard_folder(shard) for shard in range(max(found, default=-1) + 1)]


def _is_shard(path: Path) -> bool:
    return (path / "log").is_dir() or (path / "store").is_dir()


def _shard_in(folder: Path, server: Path | None) -> ShardRemains:
    match = _SHARD.fullmatch(folder.name)
    shard = None if match is None else int(match[1])
    if folder.is_dir() and size_of_log(folder):
        return ShardRemains(name=str(folder), shard=shard, log=folder)
    store, log = folder / "store", folder / "log"
    manifest = None if server is None else find_manifest(server)
    snapshots: list[Path] = []
    if server is not None and manifest is not None and shard is not None:
        files = SnapshotFiles(server / "snapshots")
        for snapshot in reversed(files.list()[0]):
            if snapshot.server_id == manifest.server_id:
                parts = [part for part in snapshot.parts if part.shard == shard]
                snapshots += [part_folder(files.folder_of(snapshot.name), part) for part in parts]
    has_log = log.is_dir() and size_of_log(log) > 0
    lacks = "" if has_log else "without its log"
    if manifest is not None and manifest.log != "file":
        lacks = "without its log in NATS"
    return ShardRemains(
        name=str(folder),
        shard=shard,
        store=store if (store / "CURRENT").is_file() else None,
        snapshots=tuple(snapshots),
        log=log if has_log else None,
        lacks=lacks,
    )


@contextmanager
def open_remains(remains: Sequence[ShardRemains], at: RestorePoint | None) -> Iterator[list[OpenShard]]:
    """Open what is taken of some shards, up to the end of their logs or to a point, while the block lasts.

    Raises:
        ConfigError: There is no such point, records before it are missing, or nothing was ever written.
        CorruptionError: A log is damaged, or a part of it is missing.
        StorageError: A file cannot be read.
    """
    if at is not None and at.seq is not None and len(remains) != 1:
        raise ConfigError(f"--at {at}: a seq is of one shard: give --shard N, or step=N or time=… for all")
    with ExitStack() as stack:
        shards = [_Bases(stack, each, None if at is None else at.seq) for each in remains]
        _check_lost(remains, [shard.last_seq for shard in shards])
        ends: list[int | None] = [None if at is None else at.seq for _ in shards]
        if at is not None and at.seq is None:
            points = [shard.find_points() for shard in shards]
            ends = [point.seq for point in choose_point(at, [found.points for found in points], "the log")]
        opened = [shard.choose(end, at) for shard, end in zip(shards, ends, strict=True)]
        if not any(shard.last_seq for shard in opened):
            raise ConfigError(
                f"{opened[0].name}: no record{'' if at is None else f' by --at {at}'}: nothing to restore"
            )
        yield opened


def _check_lost(remains: Sequence[ShardRemains], last_seqs: Sequence[int]) -> None:
    """Refuse to leave a shard out silently. If any has a record, each has: trainers say hello to all of them."""
    lost = [each.name for each, seq in zip(remains, last_seqs, strict=True) if not seq]
    if lost and any(last_seqs):
        others = [f"--shard {each.shard}" for each, seq in zip(remains, last_seqs, strict=True) if seq]
        raise ConfigError(
            f"{first_of(lost)}: nothing is left there; to take the other shards alone, and lose these rows, add "
            f"{' '.join(others)}"
        )


class _Bases:
    """The bases of a shard, and its log."""

    def __init__(self, stack: ExitStack, remains: ShardRemains, to_seq: int | None) -> None:
        """Open them until a stack is closed; ignore damage of the log after `to_seq`."""
        self._remains = remains
        self._log = None if remains.log is None else open_source(remains.log, to_seq=to_seq)

        def opened(path: Path) -> RowStore:
            store = RowStore.open_read_only(path, config=_STORE_CONFIG)
            stack.callback(store.close)
            return store

        self._store = None if remains.store is None else opened(remains.store)
        self._others: list[RowStore | None] = [opened(path) for path in remains.snapshots]
        if self._log is not None or (not self._others and self._store is None):
            self._others.append(None)

    @property
    def last_seq(self) -> int:
        """Last record that is there; 0 for nothing."""
        seqs = [_seq_of(base) for base in (self._store, *self._others)]
        return max([*seqs, 0 if self._log is None else self._log.last_seq])

    @property
    def _first_seq(self) -> int:
        """First record of the log."""
        return 1 if self._log is None else self._log.first_seq

    def _usable(self, bases: Sequence[RowStore | None]) -> list[RowStore | None]:
        """Return the bases behind which the log goes on."""
        return [base for base in bases if self._log is None or _seq_of(base) >= self._first_seq - 1]

    def find_points(self) -> PointFinder:
        """Find all points of the log to which there is a base."""
        bases = self._usable([*self._others, *([] if self._store is None else [self._store])])
        if not bases:
            raise self._lacking("")
        base = min(bases, key=_seq_of)
        finder = PointFinder({} if base is None else base.read_meta(), seq=_seq_of(base))
        for record in () if self._log is None else self._log.read(_seq_of(base) + 1):
            finder.take(record)
        return finder

    def choose(self, end: int | None, at: RestorePoint | None) -> OpenShard:
        """Choose the best base for the records up to `end`; None stands for the end of the log."""
        stores: list[RowStore | None] = [] if self._store is None else [self._store]
        log_end = 0 if self._log is None else self._log.last_seq
        bases = self._usable([*stores, *self._others] if end is None else [*self._others, *stores])
        bases = [base for base in bases if end is None or _seq_of(base) <= end]
        if self._log is None:
            bases.sort(key=_seq_of, reverse=True)
        else:  # a snapshot from behind the log's end may be of a time that was given up
            bases.sort(key=lambda base: base is not self._store and _seq_of(base) > log_end)
        if not bases:
            raise self._lacking("" if at is None else f" from before --at {at}")
        base = bases[0]
        last_seq = max(_seq_of(base), log_end)
        if end is not None and end > last_seq:
            raise ConfigError(f"--at {at}: {self._remains.name} has records up to seq {last_seq}")
        is_part = end is not None and end < last_seq
        lacks = self._remains.lacks
        if self._log is not None and log_end < _seq_of(base):
            lacks = lacks or f"whose log ends at record {log_end}"
        meta = {} if base is None else base.read_meta()
        self._check_history(base, meta)
        return OpenShard(
            name=f"{self._remains.name} ({lacks})" if lacks else self._remains.name,
            base=base,
            state=ShardState(meta),
            last_seq=last_seq if end is None else end,
            may_be_newer=is_part and base is not None and base is self._store,
            offer=None if self._log is None else offer_at(self._log, last_seq if end is None else end),
            _log=self._log,
            _log_path=self._remains.log,
        )

    def _check_history(self, base: RowStore | None, meta: dict[bytes, bytes]) -> None:
        """Check that a base and the log are of one history, as far as the log still has the base's last record."""
        seq, log = _seq_of(base), self._log
        if log is not None and log.first_seq <= seq <= log.last_seq:
            stored = stored_mark(meta, seq)
            if stored is not None and [stored] != log.nonces(seq, seq):
                raise CorruptionError(
                    f"{self._remains.name}: rows and log are of different histories: record {seq} in the log is "
                    "another one; put back both of one moment"
                )

    def _lacking(self, before: str) -> ConfigError:
        name, first = self._remains.name, self._first_seq
        return ConfigError(
            f"{name}: the log begins at seq {first}, and there is neither a store nor a snapshot{before} with what "
            "was before"
        )


def _seq_of(base: RowStore | None) -> int:
    return 0 if base is None else base.applied_seq
