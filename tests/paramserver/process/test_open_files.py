"""The limit of open files: raised as far as it goes, and what there is divided."""

from __future__ import annotations

import resource

import pytest

from headrace.paramserver.process.open_files import allow_open_files, files_for_store
from headrace.paramserver.replica.disk_stores import disk_store_config


@pytest.mark.parametrize(
    ("hard", "allowed"), [(resource.RLIM_INFINITY, 12_000), (20_000, 12_000), (10_000, 5904), (1024, 512)]
)
def test_connections_leave_files_to_the_log(hard: int, allowed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where few files may be open, connections beyond their part are refused before the log finds none."""
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
    """A store of terabytes has ten thousand files; all stores of a process together take a part of its limit."""
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, soft))
    assert files_for_store(num_stores) == each
    assert disk_store_config(1 << 30, num_stores=num_stores).max_open_files == each
