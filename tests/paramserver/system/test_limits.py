"""Limits of memory, open files and disk space."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from headrace.paramserver.replica.tables.disk_stores import disk_store_config
from headrace.paramserver.system.limits import (
    allow_open_files,
    check_room,
    control_group_limits,
    files_for_store,
    files_for_strangers,
    free_memory_bytes,
    machine_memory_bytes,
)
from headrace.schemas.errors import ConfigError, StorageError

MIB = 2**20


def test_the_limit_of_a_container(tmp_path: Path) -> None:
    """A container's limit counts if it is lower than the machine's memory; `max` and a missing file set none.

    Control groups without memory, and a kernel without any, set no limit."""
    whole = machine_memory_bytes(())
    limit = tmp_path / "memory.max"
    for text, expected in (("max\n", whole), ("1048576\n", MIB), (f"{2**62}\n", whole)):
        limit.write_text(text)
        assert machine_memory_bytes((tmp_path / "absent", limit)) == expected
    (tmp_path / "own").write_text("3:cpuset:/a\n1:name=systemd:/b\n")
    assert list(control_group_limits(tmp_path / "own")) == []
    assert list(control_group_limits(tmp_path / "absent")) == []


@pytest.mark.parametrize(
    ("own", "limit"),
    [
        ("0::/\n", "memory.max"),  # a container
        ("0::/system.slice/headrace.service\n", "system.slice/headrace.service/memory.max"),
        ("0::/system.slice/headrace.service\n", "system.slice/memory.max"),
        ("2:cpu:/\n1:memory:/a/b\n0::/\n", "memory/a/b/memory.limit_in_bytes"),
        ("1:cpu,memory:/gone/from/here\n", "memory/memory.limit_in_bytes"),  # version 1, in a container
    ],
)
def test_the_limit_of_a_service(own: str, limit: str, tmp_path: Path) -> None:
    """The limits of the own control group and of its parents count, in both versions."""
    (tmp_path / "own").write_text(own)
    path = tmp_path / "groups" / limit
    path.parent.mkdir(parents=True)
    path.write_text(f"{MIB}\n")
    assert machine_memory_bytes(control_group_limits(tmp_path / "own", tmp_path / "groups")) == MIB


def test_free_memory(tmp_path: Path) -> None:
    """Below a limit, memory that the process uses is not free; without one the machine's free memory counts.

    Where the machine does not report it, the error names the setting that replaces the figure.
    """
    (tmp_path / "self").mkdir()
    (tmp_path / "self/statm").write_text(f"9999 {3 * MIB // os.sysconf('SC_PAGE_SIZE')} 7 1 0 5 0\n")
    (tmp_path / "meminfo").write_text("MemTotal: 32768 kB\nMemAvailable: 16384 kB\n")
    limit = tmp_path / "memory.max"
    for text, expected in ((f"{8 * MIB}\n", 5 * MIB), ("max\n", 16 * MIB)):
        limit.write_text(text)
        assert free_memory_bytes(tmp_path, (limit,)) == expected
    (tmp_path / "meminfo").write_text("MemTotal: 32768 kB\n")
    with pytest.raises(ConfigError, match="max_memory_bytes"):
        free_memory_bytes(tmp_path)
    assert 0 < free_memory_bytes() < machine_memory_bytes()


@pytest.mark.parametrize(
    ("hard", "allowed"), [(resource.RLIM_INFINITY, 12_000), (20_000, 12_000), (10_000, 5904), (1024, 512)]
)
def test_connections_leave_files_to_the_log(hard: int, allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a low limit of open files, fewer connections are allowed, so that the log can still open files."""
    limits = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda _, both: limits.append(both))
    assert allow_open_files(12_000) == allowed
    assert limits == ([(min(16_096, hard) if hard != resource.RLIM_INFINITY else 16_096, hard)] if hard != 1024 else [])


@pytest.mark.parametrize(
    ("soft", "num_stores", "each"),
    [(resource.RLIM_INFINITY, 8, 2048), (16_096, 1, 2012), (20_000, 1, 2048), (1024, 1, 128), (1024, 8, 20)],
)
def test_stores_leave_files_to_others(soft: int, num_stores: int, each: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All stores of a process together take a part of its limit, however many files they have."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert files_for_store(num_stores) == each
    assert disk_store_config(1 << 30, num_stores=num_stores).max_open_files == each


@pytest.mark.parametrize(
    ("soft", "most"), [(1024, 128), (16_096, 2012), (1 << 20, 4096), (resource.RLIM_INFINITY, 4096)]
)
def test_strangers_leave_files_to_the_log(soft: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections that were not let in have an eighth of the process's limit."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert files_for_strangers() == most


def test_too_little_disk_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error has the needed and the free size; a missing directory is checked by its parent."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 30) if path == tmp_path else None)
    check_room(tmp_path, 3 << 30, what="it")
    message = r": it takes 4\.0 TiB, and 3\.0 GiB are free; nothing was written"
    for place in (tmp_path, tmp_path / "not" / "there"):
        with pytest.raises(StorageError, match=f"^{tmp_path}{message}$"):
            check_room(place, 4 << 40, what="it")
    monkeypatch.setattr(shutil, "disk_usage", Mock(side_effect=OSError(5, "Input/output error")))
    with pytest.raises(StorageError, match="Input/output error"):
        check_room(tmp_path, 1, what="it")
