"""Which tensors a file of torch.save has; one that is made to harm changes nothing in the process."""

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


def test_lists_are_stepped_through(tmp_path: Path) -> None:
    """A place in a list or tuple is a part of a tensor's name, as a key is; lists that hold each other have an end."""
    content: dict[str, object] = {"opt": [{"state": {0: {"exp_avg": torch.ones(2, 3)}}, "lr": 0.1}, (torch.ones(4),)]}
    torch.save(content, tmp_path / "t.pt")
    columns = open_torch_file(tmp_path / "t.pt").columns
    assert {name: column.shape for name, column in columns.items()} == {
        "opt.0.state.0.exp_avg": (2, 3),
        "opt.1.0": (4,),
    }
    nested = [torch.ones(1)]
    for _ in range(20):
        nested = [nested] * 8
    torch.save({"a": nested}, tmp_path / "t.pt")
    with pytest.raises(RequestError):
        open_torch_file(tmp_path / "t.pt")
