"""What the store gets of a table's rows: all bits, or weights rounded to a smaller type, with or without states."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from headrace.kernels.dtypes import DTYPES, TORCH_DTYPES, is_smaller_float
from headrace.schemas.errors import ConfigError, UnsupportedModelError
from headrace.schemas.tables import DType
from headrace.streamer.taps.model_tree import Selection, check_names
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["StoredTypes"]

_SMALLER = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


class StoredTypes:
    """What a user wants stored, by tables."""

    def __init__(self, weights_dtype: Any = None, states: bool | Iterable[str] = True) -> None:
        """Take the arguments of `RawEmbeddingStreamer.attach`.

        Raises:
            ConfigError: One is of another type, or a dtype is none to round weights to.
        """
        if isinstance(weights_dtype, Mapping):
            self._dtypes = [
                (Selection([name], argument="weights_dtype"), dtype) for name, dtype in weights_dtype.items()
            ]
        else:
            self._dtypes = [] if weights_dtype is None else [(Selection(), weights_dtype)]
        for _, dtype in self._dtypes:
            if dtype not in _SMALLER:
                raise ConfigError(
                    f"weights_dtype: {dtype!r} is none of {', '.join(map(str, _SMALLER))}: leave it out to store "
                    "weights as they are trained"
                )
        names = None if states is True else [] if states is False else states
        self._states = Selection(names, argument="states", may_be_empty=states is False)

    def apply(self, tables: Sequence[TappedTable], names: Collection[str]) -> None:
        """Have tables stored so; `names` are those of all ranks. The first entry that a table matches counts.

        A table that is not of floating point, or whose type is no larger than the wanted one, keeps its own. One in
        int8 goes without states, as nothing can train on from it.

        Raises:
            ConfigError: A name or pattern matches nothing; the message lists the nearest.
            UnsupportedModelError: A table that is to be int8 is sharded by columns, or has identities.
        """
        dtypes = {name: self._dtype_of(name) for name in names}
        has_states = {name: self._states.takes(name) for name in names}
        for selection, _ in self._dtypes:
            check_names(selection.unmatched, names, argument="weights_dtype")
        check_names(self._states.unmatched, names, argument="states")
        for table in tables:
            own, wanted = TORCH_DTYPES[table.spec.dtype], dtypes[table.path]
            if wanted is torch.int8 and own.is_floating_point:
                _check_quantizable(table)
                table.store_as(DType.ROWWISE_INT8, has_states=False)
                continue
            is_rounded = wanted is not None and is_smaller_float(wanted, own)
            dtype = DTYPES[wanted] if wanted is not None and is_rounded else table.spec.dtype
            table.store_as(dtype, has_states=has_states[table.path])

    def _dtype_of(self, name: str) -> torch.dtype | None:
        # All entries are asked, so that each finds out whether it matches any table.
        matching = [dtype for selection, dtype in self._dtypes if selection.takes(name)]
        return matching[0] if matching else None


def _check_quantizable(table: TappedTable) -> None:
    what, instead = None, "give torch.bfloat16 for it in weights_dtype"
    if table.shard != table.spec.whole:
        what = "is sharded by columns, and each row has one scale"
        instead += ", or shard it by rows or by tables"
    elif table.spec.has_identities:
        what = "maps raw ids to rows (zero-collision hashing)"
    if what is not None:
        raise UnsupportedModelError(f"table {table.path!r} cannot be stored in int8: it {what}; {instead}")
