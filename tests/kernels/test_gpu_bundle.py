"""The folder that takes the checks to a GPU without a package index: which code it leaves out, and how it is packed."""

from __future__ import annotations

import struct
from pathlib import Path

import gpu_bundle
import pytest

CUBIN, PTX = 2, 1


def fat_binary(*programs: tuple[int, int, bytes]) -> bytes:
    """Return a fat binary of programs: kind, architecture and code of each."""
    entries = b""
    for kind, architecture, code in programs:
        header = struct.pack("<HHIQ", kind, 0x101, 64, len(code)).ljust(28, b"\0") + struct.pack("<I", architecture)
        entries += header.ljust(64, b"\0") + code
    return struct.pack("<IHHQ", 0xBA55ED50, 1, 16, len(entries)) + entries


def test_only_code_for_other_architectures_is_unused() -> None:
    """In several binaries with padding between them, PTX and other GPUs' code are found, and nothing else."""
    first = fat_binary((CUBIN, 80, b"a" * 40), (CUBIN, 90, b"b" * 48), (PTX, 90, b"c" * 24))
    binaries = first + bytes(16) + fat_binary((CUBIN, 100, b"d" * 8), (CUBIN, 90, b"e" * 8))
    unused = [binaries[begin:end] for begin, end in gpu_bundle.unused_code(binaries, {90})]
    assert unused == [b"a" * 40, b"c" * 24, b"d" * 8]
    assert len(list(gpu_bundle.unused_code(binaries, set()))) == 5


def test_files_come_back_as_they_were(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages of zeros within, at the end, and an empty file; from several parts."""
    monkeypatch.setattr(gpu_bundle, "_PART", 100)
    contents = {"a.so": bytes(5000) + b"x" * 5000 + bytes(9000), "in/b": b"y", "in/empty": b"", "zeros": bytes(4097)}
    source = tmp_path / "source"
    for name, content in contents.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes(content)
    (tmp_path / "parts").mkdir()
    gpu_bundle._pack(source, tmp_path / "parts")
    assert len(list((tmp_path / "parts").iterdir())) > 1
    gpu_bundle._unpack(tmp_path / "parts", tmp_path / "target")
    assert {name: (tmp_path / "target" / name).read_bytes() for name in contents} == contents
