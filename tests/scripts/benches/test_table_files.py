"""The benches of backfill and export: small ones run to their end, and their JSON has every figure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main


def test_backfill(tmp_path: Path) -> None:
    """The directory is made, RocksDB gets the same rows, and nothing is left."""
    file = tmp_path / "figures.json"
    (tmp_path / "files").mkdir()
    assert main(["bench", "backfill", "--rows", "5000", "--folder", str(tmp_path / "files"), "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["offline_vs_rocksdb"] > 0
    assert set(figures["peak_rss_bytes"]) == {"1000", "5000"}
    assert set(figures["rows_per_s"]) == {"backfill", "rocksdb"}
    assert list((tmp_path / "files").iterdir()) == []


@pytest.mark.parametrize("format_name", ["safetensors", "dcp"])
def test_export(tmp_path: Path, format_name: str) -> None:
    """The snapshot is exported in the format that was asked for, and the disk gets as many bytes."""
    file = tmp_path / "figures.json"
    arguments = ["--rows", "1000", "--format", format_name, "--folder", str(tmp_path), "--json", str(file)]
    assert main(["bench", "export", *arguments]) == 0
    figures = json.loads(file.read_text())
    assert figures["export_vs_disk"] > 0
    assert figures["size_bytes"] >= 1000 * 260
    assert set(figures["peak_rss_bytes"]) == {"200", "1000"}
    assert list(tmp_path.iterdir()) == [file]


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An unknown format is refused before anything is made."""
    assert main(["bench", "export", "--format", "csv", "--folder", str(tmp_path)]) == 1
    assert "--format 'csv'" in capsys.readouterr().err
