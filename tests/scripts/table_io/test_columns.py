"""What parsers raise of damaged files is damage, whatever kind of error it is."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp

from headrace.schemas.errors import CorruptionError
from headrace.scripts.table_io.source import BackfillConfig

TABLE = "sparse.items.weight"
_ENTRY = b"PK\x01\x02"  # of the directory of a zip archive
_END = b"PK\x05\x06"


def _of_another_version(data: bytearray) -> None:
    data[data.index(_ENTRY) + 6] = 240


def _named_in_no_utf8(data: bytearray) -> None:
    entry = data.index(_ENTRY)
    data[entry + 9] |= 8  # the name is UTF-8
    data[entry + 46] = 0xBE


def _beyond_any_file(data: bytearray) -> None:
    for at in (data.index(_END) + 16, data.rfind(b"PK\x06\x06") + 48):  # where the directory is said to begin
        if at > 48:
            data[at : at + 4] = b"\xf0\xff\xff\xff"


@pytest.mark.parametrize("damage", [_of_another_version, _named_in_no_utf8, _beyond_any_file])
@pytest.mark.parametrize("name", ["t.pt", "checkpoint"])
def test_damaged_archives(tmp_path: Path, name: str, damage: Callable[[bytearray], None]) -> None:
    """An archive of an unknown version, with names that are none or places that are none is one line, not a crash."""
    path = tmp_path / name
    if name == "checkpoint":
        dcp.save({TABLE: torch.ones(4, 2)}, checkpoint_id=str(path), no_dist=True)
    else:
        torch.save({TABLE: torch.ones(4, 2)}, path)
    file = path / "__0_0.distcp" if name == "checkpoint" else path
    data = bytearray(file.read_bytes())
    damage(data)
    file.write_bytes(data)
    with pytest.raises(CorruptionError, match=re.escape(file.name)):
        BackfillConfig(tables=(TABLE,)).open(path, None)


def test_columns_of_no_utf8(tmp_path: Path) -> None:
    """A Parquet file whose column has a name that is no UTF-8 is damage."""
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"row_id": pa.array([1]), "weights": pa.array([1.0])}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"row_id", b"\xbeow_id"))
    with pytest.raises(CorruptionError, match=r"t\.parquet: damaged"):
        BackfillConfig().open(path, None)
