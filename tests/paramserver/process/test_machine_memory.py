from __future__ import annotations

import os
from pathlib import Path

import pytest

from headrace.paramserver.process.machine_memory import control_group_limits, free_memory_bytes, machine_memory_bytes
from headrace.schemas.errors import ConfigError

MIB = 2**20


def test_a_container_is_heeded(tmp_path: Path) -> None:
    """A container's limit counts when it is less than the machine's memory; `max` and an absent file set none."""
    whole = machine_memory_bytes(())
    limit = tmp_path / "memory.max"
    for text, expected in (("max\n", whole), ("1048576\n", MIB), (f"{2**62}\n", whole)):
        limit.write_text(text)
        assert machine_memory_bytes((tmp_path / "absent", limit)) == expected


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
def test_a_service_is_heeded(own: str, limit: str, tmp_path: Path) -> None:
    """The limit of the process's own control group counts, and of each around it, in both versions."""
    (tmp_path / "own").write_text(own)
    path = tmp_path / "groups" / limit
    path.parent.mkdir(parents=True)
    path.write_text(f"{MIB}\n")
    assert machine_memory_bytes(control_group_limits(tmp_path / "own", tmp_path / "groups")) == MIB


def test_groups_of_other_things_set_no_limit(tmp_path: Path) -> None:
    """Control groups without memory, and a kernel without any, have no file that counts."""
    (tmp_path / "own").write_text("3:cpuset:/a\n1:name=systemd:/b\n")
    assert list(control_group_limits(tmp_path / "own")) == []
    assert list(control_group_limits(tmp_path / "absent")) == []


def test_what_is_free_is_within_the_limit(tmp_path: Path) -> None:
    """Of a limit, what the process has taken is not free; without one, the machine tells."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self/statm").write_text(f"9999 {3 * MIB // os.sysconf('SC_PAGE_SIZE')} 7 1 0 5 0\n")
    (tmp_path / "meminfo").write_text("MemTotal: 32768 kB\nMemAvailable: 16384 kB\n")
    limit = tmp_path / "memory.max"
    for text, expected in ((f"{8 * MIB}\n", 5 * MIB), ("max\n", 16 * MIB)):
        limit.write_text(text)
        assert free_memory_bytes(tmp_path, (limit,)) == expected


def test_a_machine_that_does_not_tell(tmp_path: Path) -> None:
    """Where nothing says what is free, the setting is asked for; here something does."""
    (tmp_path / "meminfo").write_text("MemTotal: 32768 kB\n")
    with pytest.raises(ConfigError, match="max_memory_bytes"):
        free_memory_bytes(tmp_path)
    assert 0 < free_memory_bytes() < machine_memory_bytes()
