"""What does not fit is refused before it is begun."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace.paramserver.files.disk_room import check_room
from headrace.schemas.errors import StorageError


def test_what_does_not_fit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks is told how much it is and how much there is; a place that is not there yet is where it will be."""
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=3 << 30) if path == tmp_path else None)
    check_room(tmp_path, 3 << 30, what="it")
    message = r": it takes 4\.0 TiB, and 3\.0 GiB are free; nothing was written"
    for place in (tmp_path, tmp_path / "not" / "there"):
        with pytest.raises(StorageError, match=f"^{tmp_path}{message}$"):
            check_room(place, 4 << 40, what="it")


def test_a_file_system_that_cannot_be_asked_is_an_error_of_storage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its reason is told."""

    def fail(_: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(shutil, "disk_usage", fail)
    with pytest.raises(StorageError, match="Input/output error"):
        check_room(tmp_path, 1, what="it")
