"""What the store gets of a table's rows: weights whole or rounded, with optimizer states or without."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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

    def __init__(self, weights_dtype: Any = None, states: Any = True) -> None:
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
        self._other_states = True
        self._states: list[tuple[Selection, bool]]
        if isinstance(states, Mapping):
            self._states = [(Selection([name], argument="states"), sent) for name, sent in states.items()]
        elif isinstance(states, bool):
            self._states, self._other_states = [], states
        else:
            self._states, self._other_states = [(Selection(states, argument="states"), True)], False
        for _, sent in self._states:
            if not isinstance(sent, bool):
                raise ConfigError(f"states: {sent!r} is neither True nor False")

    def apply(self, tables: Sequence[TappedTable], names: Collection[str]) -> None:
        """Have tables stored so; `names` are those of all ranks. The first entry that a table matches counts.

        A table that is not of floating point, or whose type is no larger than the wanted one, keeps its own. One in
        int8 goes without states, as nothing can train on from it.

        Raises:
            ConfigError: A name or pattern matches nothing; the message lists the nearest.
            UnsupportedModelError: A table that is to be int8 is sharded by columns, or has identities.
        """
        dtypes = {name: self._dtype_of(name) for name in names}
        states = {name: self._states_of(name) for name in names}
        for selection, _ in self._dtypes:
            check_names(selection.unmatched, names, argument="weights_dtype")
        for selection, _ in self._states:
            check_names(selection.unmatched, names, argument="states")
        for table in tables:
            own, wanted = TORCH_DTYPES[table.spec.dtype], dtypes[table.path]
            if wanted is torch.int8 and own.is_floating_point:
                _check_quantizable(table)
                table.store_as(DType.ROWWISE_INT8, has_states=False)
                continue
            is_rounded = wanted is not None and is_smaller_float(wanted, own)
            dtype = DTYPES[wanted] if wanted is not None and is_rounded else table.spec.dtype
            table.store_as(dtype, has_states=states[table.path])

    def _states_of(self, name: str) -> bool:
        matching = [sent for selection, sent in self._states if selection.takes(name)]
        return matching[0] if matching else self._other_states

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
