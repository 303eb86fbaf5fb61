"""Compiled kernels on disk: made once, and made again when the file is damaged."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from headrace.kernels.binary_cache import BinaryCache, binary_key


def _refuse() -> bytes:
    raise AssertionError("made though it is there")


def test_a_binary_is_made_once(tmp_path: Path) -> None:
    """A second cache of the folder, as of a later process, finds what the first has made."""
    assert BinaryCache(tmp_path / "a" / "b").get("key.cubin", lambda: b"binary") == b"binary"
    assert BinaryCache(tmp_path / "a" / "b").get("key.cubin", _refuse) == b"binary"
    assert [path.name for path in (tmp_path / "a" / "b").iterdir()] == ["key.cubin"]
    assert (tmp_path / "a" / "b").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("keep", [0, 10, 32, 35])
def test_a_file_that_is_cut_short_is_made_again(tmp_path: Path, keep: int) -> None:
    """Half a file is none."""
    BinaryCache(tmp_path).get("key.cubin", lambda: b"binary")
    os.truncate(tmp_path / "key.cubin", keep)
    assert BinaryCache(tmp_path).get("key.cubin", lambda: b"again") == b"again"
    assert BinaryCache(tmp_path).get("key.cubin", _refuse) == b"again"


def test_a_flipped_bit_is_found(tmp_path: Path) -> None:
    """A damaged binary never reaches a GPU."""
    BinaryCache(tmp_path).get("key.cubin", lambda: b"binary")
    content = bytearray((tmp_path / "key.cubin").read_bytes())
    content[-1] ^= 1
    (tmp_path / "key.cubin").write_bytes(content)
    assert BinaryCache(tmp_path).get("key.cubin", lambda: b"again") == b"again"


def test_a_folder_that_cannot_be_used_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Where nothing can be kept the binary is made each time, and the log says why."""
    (tmp_path / "file").write_text("not a folder")
    with caplog.at_level(logging.WARNING):
        assert BinaryCache(tmp_path / "file" / "x").get("key.cubin", lambda: b"binary") == b"binary"
    assert "cannot be kept" in caplog.text


def test_the_default_folder_is_the_users_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It lies under XDG_CACHE_HOME."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    BinaryCache().get("key.cubin", lambda: b"binary")
    assert (tmp_path / "headrace" / "kernels" / "key.cubin").exists()


def test_the_key_depends_on_every_part() -> None:
    """Where one part ends and the next begins counts too."""
    keys = {binary_key(parts) for parts in ([b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"ab", b"d"], [b"ab", b"c", b""])}
    assert len(keys) == 5
