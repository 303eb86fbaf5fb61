"""A file of torch.save that is made to harm changes nothing in the process."""

from __future__ import annotations

import importlib
import zipfile
from pathlib import Path

import pytest
import torch

from headrace.schemas.errors import RequestError
from headrace.scripts.table_io.torch_reader import open_torch_file

MARK = "set_by_a_pickle"


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("collections", "OrderedDict"),
        ("collections", "Counter"),
        ("torch", "Tensor"),
        ("torch", "Size"),
        ("torch.nn.parameter", "Parameter"),
        ("torch.storage", "UntypedStorage"),
        ("torch._utils", "_rebuild_tensor_v2"),
        ("pathlib", "PosixPath"),
    ],
)
def test_no_file_changes_a_class(tmp_path: Path, module: str, name: str) -> None:
    """A pickle that sets an attribute of a class or a function is refused, and sets none."""
    path = tmp_path / "t.pt"
    key = b"X" + len(MARK).to_bytes(4, "little") + MARK.encode()
    for build in (b"}" + key + b"K\x01sb", b"N}" + key + b"K\x01s\x86b"):
        torch.save({}, path)
        with zipfile.ZipFile(path) as archive:
            members = {member: archive.read(member) for member in archive.namelist()}
        members["t/data.pkl"] = b"\x80\x02" + f"c{module}\n{name}\n".encode() + build + b"."
        with zipfile.ZipFile(path, "w") as archive:
            for member, content in members.items():
                archive.writestr(member, content)
        with pytest.raises(RequestError, match="holds more than tensors"):
            open_torch_file(path)
        assert not hasattr(getattr(importlib.import_module(module), name), MARK)
