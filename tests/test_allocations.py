"""Every tensor that the product makes names its device and type, so that no default of the user's program counts."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("kernels", "paramserver", "streamer", "headrace")

_FACTORIES = {
    *(
        "empty",
        "empty_strided",
        "zeros",
        "ones",
        "full",
        "eye",
        "rand",
        "randn",
        "tensor",
        "scalar_tensor",
        "as_tensor",
    ),
    *("arange", "linspace", "logspace", "range", "randint", "randperm", "sparse_coo_tensor"),
}
_CONSTRUCTORS = {"Tensor", "FloatTensor", "LongTensor", "IntTensor", "BoolTensor", "ByteTensor", "DoubleTensor"}


def careless_allocations(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the reason of each call that makes a tensor and leaves its device or type to a default."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        if not isinstance(owner, ast.Name) or owner.id != "torch":
            continue
        given = {keyword.arg for keyword in node.keywords}
        if node.func.attr in _CONSTRUCTORS:
            yield node.lineno, f"torch.{node.func.attr}: use torch.tensor with device and dtype"
        elif node.func.attr in _FACTORIES and (missing := {"device", "dtype"} - given):
            yield node.lineno, f"torch.{node.func.attr} without {' and '.join(sorted(missing))}"


def test_each_allocation_names_device_and_dtype() -> None:
    """No module of the product makes a tensor with a default device or type."""
    found = [
        f"{path.relative_to(ROOT)}:{line}: {reason}"
        for folder in FOLDERS
        for path in sorted((ROOT / folder).rglob("*.py"))  # does not follow the links in headrace/
        for line, reason in careless_allocations(path.read_text("utf-8"))
    ]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "reasons"),
    [
        ("torch.zeros(3)", ["torch.zeros without device and dtype"]),
        ("torch.empty(3, dtype=torch.int64)", ["torch.empty without device"]),
        ("torch.arange(3, device='cpu')", ["torch.arange without dtype"]),
        ("torch.zeros(3, dtype=torch.int64, device='cpu')", []),
        ("torch.Tensor(3)", ["torch.Tensor: use torch.tensor with device and dtype"]),
        ("torch.zeros_like(other)", []),
    ],
)
def test_the_check_sees_what_is_left_to_a_default(source: str, reasons: list[str]) -> None:
    """A call without device, without type or of a class is found; one that has both, or takes another's, is not."""
    assert [reason for _, reason in careless_allocations(source)] == reasons
