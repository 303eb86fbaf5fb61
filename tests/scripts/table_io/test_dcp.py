"""A checkpoint's metadata that is made to harm: it changes nothing in the process, and what is wrong is damage."""

from __future__ import annotations

import importlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from headrace.schemas.errors import CorruptionError
from headrace.scripts.table_io.dcp import METADATA_NAME
from headrace.scripts.table_io.source import BackfillConfig

TABLE = "sparse.items.weight"
MARK = "set_by_a_pickle"
_METADATA = "torch.distributed.checkpoint.metadata"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of one table, and of a number that is pickled into its data."""
    path = tmp_path / "checkpoint"
    dcp.save({TABLE: torch.ones(4, 2), "n": 3}, checkpoint_id=str(path), no_dist=True)
    return path


def _open(path: Path) -> Any:
    return BackfillConfig(tables=(TABLE,)).open(path, None)


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("pathlib", "PosixPath"),
        ("pathlib", "PurePosixPath"),
        (_METADATA, "Metadata"),
        (_METADATA, "MetadataIndex"),
        (_METADATA, "TensorProperties"),
        (_METADATA, "_MEM_FORMAT_ENCODING"),
        ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
        ("torch.serialization", "_get_layout"),
        ("torch", "Size"),
        ("torch", "float32"),
        ("collections", "OrderedDict"),
    ],
)
def test_no_metadata_changes_a_class(checkpoint: Path, module: str, name: str) -> None:
    """A pickle that sets an attribute of a class is damage and sets none: the checks of paths are as they were."""
    file = checkpoint / METADATA_NAME
    good = pickle.dumps(pickle.loads(file.read_bytes()), protocol=4)
    by_dict = f"}}(V{MARK}\nVx\nub0"
    by_slots = f"(N}}(V{MARK}\nVx\nutb0"
    for build in (by_dict, by_slots):
        file.write_bytes(good[:2] + f"c{module}\n{name}\n{build}".encode() + good[2:])
        with pytest.raises(CorruptionError, match=r"\.metadata: damaged"):
            _open(checkpoint)
        assert not hasattr(getattr(importlib.import_module(module), name), MARK)
    file.write_bytes(good)
    assert _open(checkpoint).tables[0].num_rows == 4


def _info_of(metadata: Any) -> Any:
    return next(info for index, info in metadata.storage_data.items() if index.fqn == TABLE)


def _tensor_of(metadata: Any) -> Any:
    return metadata.state_dict_metadata[TABLE]


def _set(of: Callable[[Any], Any], field: str, value: Any) -> Callable[[Any], None]:
    return lambda metadata: setattr(of(metadata), field, value)


def _without(of: Callable[[Any], Any], field: str) -> Callable[[Any], None]:
    return lambda metadata: delattr(of(metadata), field)


@pytest.mark.parametrize(
    "damage",
    [
        *(_without(lambda metadata: metadata, field) for field in ("state_dict_metadata", "storage_data")),
        *(_without(_tensor_of, field) for field in ("properties", "size", "chunks")),
        *(_without(lambda metadata: _tensor_of(metadata).chunks[0], field) for field in ("offsets", "sizes")),
        *(_without(_info_of, field) for field in ("relative_path", "offset", "length")),
        _set(lambda metadata: metadata, "storage_data", [1]),
        _set(_tensor_of, "properties", "float32"),
        _set(_tensor_of, "size", 4),
        _set(_tensor_of, "size", (4, 1)),
        _set(_tensor_of, "size", (4, 2**70)),
        _set(_tensor_of, "chunks", [3]),
        _set(_info_of, "offset", -1),
        _set(_info_of, "offset", "0"),
        _set(_info_of, "offset", 2**63 - 1),
        _set(_info_of, "length", 2**70),
    ],
)
def test_fields_that_are_wrong_are_damage(checkpoint: Path, damage: Callable[[Any], None]) -> None:
    """Metadata in which a field is missing, of another type or beyond what can be is one line that names the file."""
    file = checkpoint / METADATA_NAME
    metadata = pickle.loads(file.read_bytes())
    damage(metadata)
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CorruptionError, match="checkpoint"):
        _open(checkpoint)
