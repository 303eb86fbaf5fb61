"""Tensors that are no tables; tables of every kind of file are in `test_sources.py`."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from command_line import CommandLine
from safetensors.numpy import save_file

from headrace.schemas.errors import ConfigError, SpecMismatchError
from headrace.schemas.tables import DType, TableSpec
from headrace.scripts.table_io.source import BackfillConfig


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "t.safetensors"
    save_file(dict(empty=np.zeros((0, 3), "<f4"), flat=np.zeros(4, "<f4"), deep=np.zeros((2, 2, 2)), t=np.eye(3)), path)
    return path


@pytest.mark.parametrize("maps", [(), ("empty=other",)])
def test_a_tensor_without_rows_makes_no_table(source: Path, maps: tuple[str, ...]) -> None:
    """A number of rows of 0 would mean that every id is one; a file for many tables may have such a tensor."""
    config = BackfillConfig(maps=maps, tables=("other" if maps else "empty",))
    with pytest.raises(SpecMismatchError, match="'empty' has no rows, a new table has one or more"):
        config.open(source, None)
    (table,) = BackfillConfig(maps=maps, tables=("t",)).open(source, None).tables
    assert table.spec.fqn == "t"


def test_a_tensor_without_rows_brings_none_to_a_table_of_virtual_ids(source: Path) -> None:
    """There is such a table, so that no rows for it are no mistake."""
    known = TableSpec(fqn="empty", num_rows=0, dim=3, dtype=DType.FLOAT32)
    (table,) = BackfillConfig().open(source, {"empty": known}).tables
    assert (table.spec, table.num_rows) == (known, 0)


def test_what_is_named_and_no_table_is_told_of(source: Path) -> None:
    """One that was named is not asked for again, whether or not the file has other tables."""
    for others in ((), ("t",)):
        with pytest.raises(SpecMismatchError, match=r"'flat' has shape \[4\], weights have two dimensions"):
            BackfillConfig(tables=(*others, "flat")).open(source, None)
        with pytest.raises(ConfigError, match="--table 'deep': no such table"):
            BackfillConfig(tables=(*others, "deep")).open(source, None)
    (table,) = BackfillConfig(maps=("t=flat",), tables=("flat",)).open(source, None).tables
    assert table.name == "t"


@pytest.mark.parametrize("name", ["empty", "flat"])
def test_a_new_directory_is_not_made_of_it(source: Path, tmp_path: Path, run: CommandLine, name: str) -> None:
    """The command ends in one line that names file and tensor, and makes nothing."""
    line = run.refused("backfill", source, "--data", tmp_path / "data", "--table", name)
    assert f"{source}: '{name}' has" in line
    assert not (tmp_path / "data").exists()
