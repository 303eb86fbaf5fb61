"""What the machine lets this process use: memory, open files and disk space."""

from __future__ import annotations

import logging
import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from headrace.paramserver.system.log_lines import fact
from headrace.paramserver.system.text import format_size
from headrace.schemas.errors import ConfigError, StorageError

__all__ = [
    "FILES_OF_STORE",
    "allow_open_files",
    "check_room",
    "control_group_limits",
    "files_for_store",
    "files_for_strangers",
    "free_memory_bytes",
    "machine_memory_bytes",
]

_log = logging.getLogger(__name__)

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")

FILES_OF_STORE = 4096
"""Files that a shard's log and store, or a replica's stores, may have open at once."""
_MOST_STRANGERS = 4096

# With fewer, RocksDB reopens a file for most reads of a store of some thousand files: a disk read and about 30 µs each.
# RocksDB takes no less than 20.
_MAX_STORE_FILES, _MIN_STORE_FILES = 2048, 20


def machine_memory_bytes(limit_files: Iterable[Path] | None = None) -> int:
    """Return the machine's memory, or the lower limit of the container or service, in bytes.

    Missing `limit_files`, and those with a word, set no limit; None means the files of this process.
    """
    size_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in control_group_limits() if limit_files is None else limit_files:
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue
        if text.isdigit():
            size_bytes = min(size_bytes, int(text))
    return size_bytes


def free_memory_bytes(proc: Path = _PROC, limit_files: Iterable[Path] | None = None) -> int:
    """Return how much more this process can use without swapping, in bytes.

    This is the machine's free memory, or what the process leaves of its limit if that is lower. Other processes of the
    same container are not counted.

    Raises:
        ConfigError: The kernel does not report free memory.
    """
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            resident_pages = int((proc / "self/statm").read_text(encoding="ascii").split()[1])
            resident_bytes = resident_pages * os.sysconf("SC_PAGE_SIZE")
            return min(int(line.split()[1]) * 1024, machine_memory_bytes(limit_files) - resident_bytes)
    raise ConfigError("replica: /proc/meminfo does not say what is free; set max_memory_bytes")


def control_group_limits(own: Path = _PROC / "self/cgroup", root: Path = _GROUPS) -> Iterator[Path]:
    """Yield the files that may hold a memory limit: of this process's control groups and their parents.

    Seen from inside a container, the own group is usually the root. A systemd service is further down.

    Source: cgroups(7), on /proc/[pid]/cgroup.
    """
    try:
        lines = own.read_text(encoding="utf-8").splitlines()
    except OSError:
        return  # a kernel without control groups
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if not controllers:  # version 2
            folder, name = root, "memory.max"
        elif "memory" in controllers.split(","):
            folder, name = root / "memory", "memory.limit_in_bytes"
        else:
            continue
        path = PurePosixPath(group.lstrip("/"))
        for each in (path, *path.parents):
            yield folder / each / name


def allow_open_files(max_connections: int) -> int:
    """Raise the limit of open files to what connections and RocksDB may need, as far as this user may.

    Returns:
        How many connections to allow, so that they leave files to the log: a log that cannot open a file stops.
    """
    wanted = max_connections + FILES_OF_STORE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    if allowed >= wanted:
        return max_connections
    most = min(max_connections, max(allowed - FILES_OF_STORE, allowed // 2))
    message = "the limit of open files is low: raise it (ulimit -n)"
    fact(_log, logging.WARNING, message, limit=hard, wanted=wanted, max_connections=most)
    return most


def files_for_store(num_stores: int = 1) -> int:
    """Return how many files each of some RocksDBs may keep open: together an eighth of the process's limit.

    A replica that rebuilds has two copies of each store, a shard also has files of the log and of snapshots, and the
    process may belong to the user.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    for_all = _MAX_STORE_FILES * num_stores if soft == resource.RLIM_INFINITY else soft // 8
    return max(min(for_all // num_stores, _MAX_STORE_FILES), _MIN_STORE_FILES)


def files_for_strangers() -> int:
    """Return how many connections may wait to be let in: an eighth of the process's files, but at most 4,096.

    As many clients may come back at once, after an outage, without that one is turned away.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_STRANGERS if soft == resource.RLIM_INFINITY else min(max(soft // 8, 2), _MOST_STRANGERS)


def check_room(directory: Path, needed_bytes: int, *, what: str) -> None:
    """Fail early when a file system has too little free space, before hours go into the part that fits.

    The space is not reserved; writing may still fail later.

    Args:
        directory: Where the files will be; if it is missing, its nearest existing parent counts.
        needed_bytes: Least total size of the files.
        what: What will be written, for the message.

    Raises:
        StorageError: There is less space, or the file system does not answer.
    """
    directory = directory.absolute()
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        free_bytes = shutil.disk_usage(directory).free
    except OSError as exc:
        raise StorageError(f"{directory}: {exc.strerror or exc}") from exc
    if needed_bytes > free_bytes:
        needed, free = format_size(needed_bytes), format_size(free_bytes)
        raise StorageError(f"{directory}: {what} takes {needed}, and {free} are free; nothing was written")
