"""How many of its changed rows each flush sends of a table: all, or a share."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from headrace.paramserver.system.text import first_of
from headrace.schemas.errors import ConfigError
from headrace.streamer.taps.model_tree import Selection, check_names
from headrace.streamer.taps.tapped_table import TappedTable

__all__ = ["SendShares"]

_log = logging.getLogger(__name__)


class SendShares:
    """What a user wants sent, by tables."""

    def __init__(self, send_share: Any = None) -> None:
        """Take the argument of `RawEmbeddingStreamer.attach`.

        Raises:
            ConfigError: A share is not a number above 0 and at most 1.
        """
        if isinstance(send_share, Mapping):
            self._shares = [(Selection([name], argument="send_share"), share) for name, share in send_share.items()]
        else:
            self._shares = [] if send_share is None else [(Selection(), send_share)]
        for _, share in self._shares:
            if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
                raise ConfigError(f"send_share: {share!r} is no share of rows: give a number above 0 and at most 1")

    def apply(self, tables: Sequence[TappedTable], names: Collection[str]) -> None:
        """Have flushes hold rows back so; `names` are those of all ranks. The first entry that a table matches counts.

        Raises:
            ConfigError: A name or pattern matches nothing; the message lists the nearest.
        """
        shares = {name: self._share_of(name) for name in names}
        for selection, _ in self._shares:
            check_names(selection.unmatched, names, argument="send_share")
        filtered = [table for table in tables if shares[table.path] < 1]
        for table in filtered:
            if table.can_wait:
                table.hold_back_all_but(shares[table.path])
        if whole := [table.path for table in filtered if not table.can_wait]:
            _log.warning(
                "send_share: all changed rows go out of tables of integers or with identities: %s", first_of(whole)
            )

    def _share_of(self, name: str) -> float:
        # All entries are asked, so that each finds out whether it matches any table.
        matching = [share for selection, share in self._shares if selection.takes(name)]
        return matching[0] if matching else 1.0
