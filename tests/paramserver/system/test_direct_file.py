"""Direct I/O: the bytes are right whatever their number, and however few a call takes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
from open_files import files_open_in

from headrace.paramserver.system.direct_file import (
    DirectFileWriter,
    open_direct,
    page_memory,
    read_direct,
    supports_direct_io,
    write_buffer,
)


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, (4 << 20) - 1, 4 << 20, (9 << 20) + 17])
def test_any_number_of_bytes(tmp_path: Path, size: int) -> None:
    """A file has exactly the bytes written, even if its buffer served another file before."""
    data, buffer = os.urandom(size), write_buffer()
    for name in ("first", "second"):
        (tmp_path / name).write_bytes(bytes(size + 1))  # is emptied
        with DirectFileWriter(tmp_path / name, buffer) as file:
            view = memoryview(data)
            for start in range(0, size, 1_000_003):
                file.write(view[start : start + 1_000_003])
            file.sync()
            assert file.size_bytes == size
        assert (tmp_path / name).read_bytes() == data
        assert b"".join(map(bytes, read_direct(tmp_path / name))) == data


def test_file_systems_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system refuses the flag, the same bytes go through the page cache."""
    open_file = os.open

    def refuse(path: Any, flags: int, *args: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return open_file(path, flags, *args)

    monkeypatch.setattr(os, "open", refuse)
    assert not supports_direct_io(tmp_path)
    assert not files_open_in(tmp_path)
    data = os.urandom((8 << 20) + 3)
    with DirectFileWriter(tmp_path / "file", write_buffer()) as file:
        assert not file.is_direct
        file.write(data)
        file.sync()
    assert (tmp_path / "file").read_bytes() == data == b"".join(map(bytes, read_direct(tmp_path / "file")))
    assert os.listdir(tmp_path) == ["file"]


def test_file_systems_that_refuse_direct_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where only the calls are refused, because the disk's blocks are larger, the bytes go through the page cache."""
    refused: list[str] = []

    def refusing(name: str) -> None:
        call = getattr(os, name)

        def refuse(fd: int, data: Any) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                refused.append(name)
                raise OSError(errno.EINVAL, "Invalid argument")
            return int(call(fd, data))

        monkeypatch.setattr(os, name, refuse)

    for name in ("write", "readv"):
        refusing(name)
    assert not supports_direct_io(tmp_path)
    data = os.urandom((8 << 20) + 3)
    synced: list[int] = []
    monkeypatch.setattr(os, "fdatasync", synced.append)
    with DirectFileWriter(tmp_path / "file", write_buffer()) as file:
        file.write(data)
        assert not file.is_direct
        assert len(synced) == 2, "each piece, so that no large sync at the end delays the update log's"
        file.sync()
    assert (tmp_path / "file").read_bytes() == data == b"".join(map(bytes, read_direct(tmp_path / "file")))
    assert refused == ["write", "write", "readv"], "once a file"
    assert os.listdir(tmp_path) == ["file"]


def test_calls_refused_in_any_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refusal that is not about direct I/O is an error."""
    calls: list[int] = []

    def refuse(fd: int, data: Any) -> int:
        calls.append(fd)
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "write", refuse)
    with DirectFileWriter(tmp_path / "file", write_buffer()) as file:
        file.write(b"data")
        for num_calls in (2, 3):  # first with and without direct I/O, then only without
            with pytest.raises(OSError, match="Invalid argument"):
                file.sync()
            assert len(calls) == num_calls


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS])
def test_support_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    """A full disk says nothing against direct I/O, but is an error of `sync`; any other failure is one at once."""

    def fail(fd: int, data: Any) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "write", fail)
    with (
        contextlib.nullcontext()
        if code in (errno.ENOSPC, errno.EDQUOT)
        else pytest.raises(OSError, match=re.escape(os.strerror(code)))
    ):
        assert supports_direct_io(tmp_path)
    assert not os.listdir(tmp_path)
    with DirectFileWriter(tmp_path / "file", write_buffer()) as file:
        file.write(bytes(5000))
        with pytest.raises(OSError, match=re.escape(os.strerror(code))):
            file.sync()
    with pytest.raises(FileNotFoundError):
        supports_direct_io(tmp_path / "none")


def test_the_final_size_is_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a crash a complete file has every byte, no padding of its last block, and the mode of the mask."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))
    mask = os.umask(0o022)
    try:
        for size in (0, 4096, 5000, 4 << 20):
            with DirectFileWriter(tmp_path / "file", write_buffer()) as file:
                file.write(bytes(size))
                file.sync()
                file.close()  # leaving closes it again: harmless
    finally:
        os.umask(mask)
    assert synced == [0, 4096, 5000, 4 << 20]
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o644


@pytest.mark.parametrize("part", [8192, 100])
def test_short_calls_are_followed_by_the_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: int) -> None:
    """Each byte is written and read once; after a part of a block the file goes on through the page cache."""
    path, data, parts = tmp_path / "file", os.urandom(20_000), [part]

    def short(name: str) -> None:
        call = getattr(os, name)

        def call_short(fd: int, given: Any) -> int:
            if not parts:
                return int(call(fd, given))
            size = parts.pop()
            if name == "readv":
                given[0][:size] = data[:size]
            else:
                with open(path, "r+b") as file:
                    file.write(given[:size])
            return os.lseek(fd, size, os.SEEK_CUR)

        monkeypatch.setattr(os, name, call_short)

    short("write")
    with DirectFileWriter(path, write_buffer()) as file:
        file.write(data)
        file.sync()
    assert path.read_bytes() == data
    parts.append(part)
    short("readv")
    assert b"".join(map(bytes, read_direct(path))) == data
    for name in ("write", "readv"):
        monkeypatch.setattr(os, name, lambda fd, data: 0)
    with pytest.raises(OSError, match="shorter than it was"):
        list(read_direct(path))
    with DirectFileWriter(path, write_buffer()) as file, pytest.raises(OSError, match="accepts no more"):
        file.write(data)
        file.sync()


@pytest.mark.parametrize(("code", "num_calls"), [(errno.EINVAL, 2), (errno.EMFILE, 1), (errno.EACCES, 1)])
def test_only_a_refused_flag_is_retried(tmp_path: Path, code: int, num_calls: int) -> None:
    """A file that cannot be opened for another reason is an error at once."""
    calls: list[int] = []

    def refuse(path: Path, flags: int) -> int:
        calls.append(flags)
        raise OSError(code, os.strerror(code))

    with pytest.raises(OSError, match=os.strerror(code)):
        open_direct(tmp_path / "file", os.O_RDONLY, refuse)
    assert calls == [os.O_RDONLY | os.O_DIRECT, os.O_RDONLY][:num_calls]


def test_memory_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel without huge pages gives pages of the usual size."""
    asked: list[int] = []

    class Plain(mmap.mmap):
        def madvise(self, option: int, start: int = 0, length: int = 0) -> None:
            asked.append(option)
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(mmap, "mmap", Plain)
    memory = page_memory(8192)
    assert asked == [mmap.MADV_HUGEPAGE] and memory == bytes(8192)
    memory[4096:] = b"x" * 4096
