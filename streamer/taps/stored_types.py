"""What the store gets of a table's rows: weights whole or rounded; optimizer states always, with flushes, or never."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import torch

from headrace.kernels.dtypes import DTYPES, TORCH_DTYPES, is_smaller_float
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import ConfigError, UnsupportedModelError
from headrace.schemas.tables import DType
from headrace.streamer.taps.model_tree import Selection, check_names
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["StatesSent", "StoredTypes"]

_log = logging.getLogger(__name__)
StatesSent = bool | Literal["on_flush"]
"""Whether optimizer states go out with the weights, never, or with `flush` alone."""
_SMALLER = (torch.float32, torch.bfloat16, torch.float16, torch.int8)


class StoredTypes:
    """What a user wants stored, by tables."""

    def __init__(self, weights_dtype: Any = None, states: Any = True) -> None:
        """Take the arguments of `RawEmbeddingStreamer.attach`.

        Raises:
            ConfigError: One is of another type, a dtype is none to round weights to, or states go out at no such time.
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
        self._other_states: StatesSent = True
        self._states: list[tuple[Selection, StatesSent]]
        if isinstance(states, Mapping):
            self._states = [(Selection([name], argument="states"), sent) for name, sent in states.items()]
        elif isinstance(states, bool) or states == "on_flush":
            self._states, self._other_states = [], states
        else:
            self._states, self._other_states = [(Selection(states, argument="states"), True)], False
        for _, sent in self._states:
            if not isinstance(sent, bool) and sent != "on_flush":
                raise ConfigError(f"states: {sent!r} is neither True, False nor 'on_flush'")

    def apply(self, tables: Sequence[TappedTable], names: Collection[str]) -> list[TappedTable]:
        """Have tables stored so; `names` are those of all ranks. The first entry that a table matches counts.

        A table that is not of floating point, or whose type is no larger than the wanted one, keeps its own. One in
        int8 goes without states, as nothing can train on from it. Returns the states tables of those whose states go
        out with flushes.

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
        states_tables, always = [], []
        for table in tables:
            own, wanted = TORCH_DTYPES[table.spec.dtype], dtypes[table.path]
            if wanted is torch.int8 and own.is_floating_point:
                _check_quantizable(table)
                table.store_as(DType.ROWWISE_INT8, has_states=False)
                continue
            is_rounded = wanted is not None and is_smaller_float(wanted, own)
            dtype = DTYPES[wanted] if wanted is not None and is_rounded else table.spec.dtype
            sent = states[table.path]
            if sent == "on_flush" and table.can_split_states:
                states_tables.append(table.split_states())
            elif sent == "on_flush" and table.spec.states:
                always.append(table.path)
            table.store_as(dtype, has_states=sent is not False)
        if always:
            _log.warning(
                "states: they go out with the weights of tables with virtual ids or identities, and of tables that are "
                "split by columns and have one value a row: %s",
                first_of(always),
            )
        return states_tables

    def _states_of(self, name: str) -> StatesSent:
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
