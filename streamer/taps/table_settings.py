"""What `attach` is told of each table: the type to store weights in, whether to send states, and what share of rows."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from headrace.kernels.dtypes import DTYPES, TORCH_DTYPES, is_smaller_float
from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import ConfigError
from headrace.streamer.taps.model_tree import Selection, check_names
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["TableSettings"]

_log = logging.getLogger(__name__)
_STORED = (torch.float32, torch.bfloat16, torch.float16)


class TableSettings:
    """Arguments of `RawEmbeddingStreamer.attach` that may differ from table to table."""

    def __init__(self, *, weights_dtype: Any = None, states: Any = True, send_share: Any = None) -> None:
        """Take the arguments.

        Raises:
            ConfigError: One is of another type, a dtype is none to round weights to, or a share is none of rows.
        """
        is_list = not isinstance(states, bool | Mapping)
        self._dtypes = _ByTable("weights_dtype", _entries_of(weights_dtype), otherwise=None)
        self._states = _ByTable("states", [(states, True)] if is_list else _entries_of(states), otherwise=not is_list)
        self._shares = _ByTable("send_share", _entries_of(send_share), otherwise=1.0)
        for dtype in self._dtypes.values:
            if dtype not in _STORED:
                raise ConfigError(
                    f"weights_dtype: {dtype!r} is none of {', '.join(map(str, _STORED))}: leave it out to store "
                    "weights as they are trained"
                )
        for sent in self._states.values:
            if not isinstance(sent, bool):
                raise ConfigError(f"states: {sent!r} is neither True nor False")
        for share in self._shares.values:
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                raise ConfigError(f"send_share: {share!r} is no share of rows: give a number above 0 and at most 1")

    def apply(self, tables: Sequence[TappedTable], names: Collection[str]) -> None:
        """Have tables stored and sent so; `names` are those of all ranks.

        A table that is not of floating point, or whose type is no larger than the wanted one, keeps its own.

        Raises:
            ConfigError: A name or pattern matches nothing; the message lists the nearest.
        """
        dtypes, states, shares = (each.of(names) for each in (self._dtypes, self._states, self._shares))
        for table in tables:
            wanted = dtypes[table.path]
            is_rounded = wanted is not None and is_smaller_float(wanted, TORCH_DTYPES[table.spec.dtype])
            table.store_as(DTYPES[wanted] if is_rounded else table.spec.dtype, has_states=states[table.path])
        filtered = [table for table in tables if shares[table.path] < 1]
        for table in filtered:
            if table.can_wait:
                table.hold_back_all_but(shares[table.path])
        if whole := [table.path for table in filtered if not table.can_wait]:
            _log.warning(
                "send_share: all changed rows go out of tables of integers or with identities: %s", first_of(whole)
            )


class _ByTable:
    """One argument: values by names and patterns, of which the first that a table matches counts.

    Attributes:
        values: All that were given.
    """

    def __init__(self, argument: str, entries: Iterable[tuple[Any, Any]], *, otherwise: Any) -> None:
        """Take (names and patterns, value) of each entry, None for all tables; other tables have `otherwise`."""
        self._argument, self._otherwise = argument, otherwise
        self._entries = [(Selection(names, argument=argument), value) for names, value in entries]
        self.values = [value for _, value in self._entries]

    def of(self, names: Collection[str]) -> dict[str, Any]:
        """Return the values of all tables of these names; raise ConfigError if a name or pattern matches none."""
        # All entries are asked for each table, so that each finds out whether it matches any.
        matching = {name: [value for selection, value in self._entries if selection.takes(name)] for name in names}
        for selection, _ in self._entries:
            check_names(selection.unmatched, names, argument=self._argument)
        return {name: (found or [self._otherwise])[0] for name, found in matching.items()}


def _entries_of(given: Any) -> list[tuple[Any, Any]]:
    if isinstance(given, Mapping):
        return [([name], value) for name, value in given.items()]
    return [] if given is None else [(None, given)]
