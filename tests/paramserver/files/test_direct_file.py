"""Files past the page cache: the bytes are right whatever their number, and a short write is an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.paramserver.files.direct_file import DirectFileWriter, read_direct, supports_direct_io, write_buffer


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (4 << 20) - 1, 4 << 20, (9 << 20) + 17])
def test_any_number_of_bytes(tmp_path: Path, size: int) -> None:
    """A file has exactly what was written, also in one buffer after another file."""
    data, buffer = os.urandom(size), write_buffer()
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(bytes(size + 1))  # what is there is emptied
        with DirectFileWriter(tmp_path / name, buffer) as file:
            view = memoryview(data)
            for start in range(0, size, 1_000_003):
                file.write(view[start : start + 1_000_003])
            file.sync()
            assert file.size_bytes == size
        assert (tmp_path / name).read_bytes() == data
        assert b"".join(map(bytes, read_direct(tmp_path / name))) == data


def test_file_systems_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system refuses, the same bytes go the usual way."""
    open_file = os.open

    def refuse(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return open_file(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    open_files = os.listdir("/proc/self/fd")
    assert not supports_direct_io(tmp_path)
    assert os.listdir("/proc/self/fd") == open_files
    data = os.urandom((8 << 20) + 3)
    with DirectFileWriter(tmp_path / "file", write_buffer()) as file:
        assert not file.is_direct
        file.write(data)
        file.sync()
    assert (tmp_path / "file").read_bytes() == data
    assert b"".join(map(bytes, read_direct(tmp_path / "file"))) == data
    assert os.listdir(tmp_path) == ["file"]


def test_a_file_is_synced_as_long_as_it_will_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a crash leaves of a file that is complete has every byte, and none of what filled its last block."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    for size in (0, 4096, 5000, 4 << 20):
        with DirectFileWriter(tmp_path / "file", write_buffer()) as file:
            file.write(bytes(size))
            file.sync()
            file.close()  # leaving closes it again: harmless
    assert synced == [0, 4096, 5000, 4 << 20]


def test_a_short_write_goes_on_where_it_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole blocks that were taken are not written again; a part of one is an error, as nothing can follow it."""
    write, sizes = os.write, [8192, 4096]
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, data[: sizes.pop(0)] if sizes else data))
    data = os.urandom(20_000)
    with DirectFileWriter(tmp_path / "file", write_buffer()) as file:
        file.write(data)
        file.sync()
    assert (tmp_path / "file").read_bytes() == data
    monkeypatch.setattr(os, "write", lambda fd, data: 100)
    with DirectFileWriter(tmp_path / "file", write_buffer()) as file, pytest.raises(OSError, match="only part"):
        file.write(data)
        file.sync()


def test_what_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    """A missing folder is not taken for a missing feature."""
    with pytest.raises(FileNotFoundError):
        supports_direct_io(tmp_path / "none")


def test_a_file_that_is_cut_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """What is missing is not taken for the end."""
    (tmp_path / "file").write_bytes(bytes(9 << 20))
    pieces = read_direct(tmp_path / "file")
    assert len(next(pieces)) == 4 << 20
    os.truncate(tmp_path / "file", 5 << 20)
    with pytest.raises(OSError, match="only part"):
        list(pieces)


def test_a_full_disk_is_an_error(tmp_path: Path) -> None:
    """Nothing is taken for written that is not."""
    with DirectFileWriter(Path("/dev/full"), write_buffer()) as file:
        file.write(bytes(5000))
        with pytest.raises(OSError, match="No space left"):
            file.sync()
