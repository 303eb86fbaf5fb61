"""Files past the page cache: the bytes are right whatever their number, and a short write is an error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from headrace.paramserver.direct_file import DirectFileWriter, read_direct, supports_direct_io, write_buffer


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (4 << 20) - 1, 4 << 20, (9 << 20) + 17])
def test_any_number_of_bytes(tmp_path: Path, size: int) -> None:
    """A file has exactly what was written, also in one buffer after another file."""
    data, buffer = os.urandom(size), write_buffer()
    for name in ("first", "second"):
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
    assert not supports_direct_io(tmp_path)
    with DirectFileWriter(tmp_path / "file", write_buffer()) as file:
        assert not file.is_direct
        file.write(b"abc")
        file.sync()
    assert (tmp_path / "file").read_bytes() == b"abc"
    assert [bytes(piece) for piece in read_direct(tmp_path / "file")] == [b"abc"]
    assert os.listdir(tmp_path) == ["file"]


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
