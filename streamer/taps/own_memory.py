"""Whether a table's memory is written by nobody but its optimizer, as far as that shows."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.nn.parameter import UninitializedParameter

from headrace.schemas.errors import UnsupportedModelError
from headrace.streamer.taps.local_parts import local_tensor

__all__ = ["check_not_aliased", "check_not_shared"]


def check_not_shared(names: str, tensors: Iterable[torch.Tensor]) -> None:
    """Refuse memory that other processes may write: torch counts the writes of each process by itself.

    Args:
        names: The tables, for the error.
        tensors: Their weights.

    Raises:
        UnsupportedModelError: They lie in shared memory.
    """
    # Memory of a GPU is called shared always.
    on_cpu = [local_tensor(tensor) for tensor in tensors if tensor.device.type == "cpu"]
    if any(tensor.is_shared() for tensor in on_cpu):  # type: ignore[no-untyped-call]
        raise UnsupportedModelError(
            f"table {names} lies in memory that is shared with other processes, whose writes are not seen: attach a "
            f"copy of the model (copy.deepcopy) that this process alone trains"
        )


def check_not_aliased(tables: Iterable[tuple[str, torch.nn.Parameter]], others: Iterable[torch.nn.Parameter]) -> None:
    """Refuse tables that lie where another trained parameter lies, whose updates are not looked at.

    Args:
        tables: Name and parameter.
        others: All parameters that are trained, those of the tables among them.

    Raises:
        UnsupportedModelError: One of them overlaps a table.
    """
    names = {id(parameter): name for name, parameter in tables}
    # A lazy module's parameter has no memory before the first forward, and then its own.
    trained = [each for each in others if each.requires_grad and not isinstance(each, UninitializedParameter)]
    spans = {id(each): _span(local_tensor(each)) for each in trained}
    farthest, end = 0, 0  # of those that lie before, the parameter that ends last, and where
    for parameter, (first, own_end) in sorted(spans.items(), key=lambda item: item[1]):
        name = names.get(farthest) or names.get(parameter)
        if first < end and first < own_end and name is not None:
            raise UnsupportedModelError(
                f"table {name!r} has the memory of another parameter too, whose updates would not be seen: tie "
                f"them by one nn.Parameter (b.weight = a.weight), or give each its own memory"
            )
        if own_end > end:
            farthest, end = parameter, own_end


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the first address of a tensor, and the end; columns of a wider tensor count as its first row's alone."""
    if not tensor.numel() or tensor.device.type == "meta":
        return 0, 0
    num_elements = tensor.numel() if tensor.is_contiguous() else 1
    return tensor.data_ptr(), tensor.data_ptr() + num_elements * tensor.element_size()
