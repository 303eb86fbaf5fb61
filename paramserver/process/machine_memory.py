"""How much memory this process may have."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from headrace.schemas.errors import ConfigError

__all__ = ["control_group_limits", "free_memory_bytes", "machine_memory_bytes"]

_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")


def machine_memory_bytes(limit_files: Iterable[Path] | None = None) -> int:
    """Return the machine's memory, or the limit of a container or a service when that is less, in bytes.

    Args:
        limit_files: Files that may hold a limit; one that is absent or holds a word sets none. None: this process's.
    """
    size_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for path in control_group_limits() if limit_files is None else limit_files:
        try:
            text = path.read_text(encoding="ascii").strip()
        except OSError:
            continue  # this machine counts in another way, or not at all
        if text.isdigit():
            size_bytes = min(size_bytes, int(text))
    return size_bytes


def free_memory_bytes(proc: Path = _PROC, limit_files: Iterable[Path] | None = None) -> int:
    """Return what this process may still take without swapping, in bytes.

    That is what the machine has free, or what the process leaves of its limit when that is less; other processes of the
    same container are not counted.

    Args:
        proc: Where procfs is.
        limit_files: As of `machine_memory_bytes`.

    Raises:
        ConfigError: The machine does not say what is free.
    """
    for line in (proc / "meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            resident_bytes = int((proc / "self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf(
                "SC_PAGE_SIZE"
            )
            return min(int(line.split()[1]) * 1024, machine_memory_bytes(limit_files) - resident_bytes)
    raise ConfigError("replica: /proc/meminfo does not say what is free; set max_memory_bytes")


def control_group_limits(own: Path = _PROC / "self/cgroup", root: Path = _GROUPS) -> Iterator[Path]:
    """Yield the files that may hold a limit for this process: of its control groups and of those around them.

    As seen from inside a container its own group is mostly the root; a service of systemd's is further down.

    Args:
        own: Where the kernel lists the groups of this process.
        root: Where control groups are mounted.

    Source: cgroups(7), of /proc/[pid]/cgroup.
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
