"""The benches of backfill and export: small ones run to their end, and their JSON has every figure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.schemas.errors import ConfigError
from headrace.scripts.benches.table_files import ExportBenchConfig


def test_backfill(bench: Callable[..., Any]) -> None:
    """The directory is made, and RocksDB gets the same rows."""
    figures, _ = bench("backfill", "--rows=5000")
    assert figures["offline_vs_rocksdb"] > 0
    assert set(figures["peak_rss_bytes"]) == {"1000", "5000"}
    assert set(figures["rows_per_s"]) == {"backfill", "rocksdb"}


@pytest.mark.parametrize("format_name", ["safetensors", "dcp"])
def test_export(bench: Callable[..., Any], format_name: str) -> None:
    """The snapshot is exported in the format that was asked for, and the disk gets as many bytes."""
    figures, _ = bench("export", "--rows=1000", f"--format={format_name}")
    assert figures["export_vs_disk"] > 0
    assert figures["size_bytes"] >= 1000 * 260
    assert set(figures["peak_rss_bytes"]) == {"200", "1000"}


def test_an_unknown_format_is_refused() -> None:
    """The message names the flag."""
    with pytest.raises(ConfigError, match="--format 'csv'"):
        ExportBenchConfig(format_name="csv")
