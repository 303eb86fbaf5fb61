"""How long a read may take: all of it, where its caller says so, and else until its next answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Self

from headrace.schemas.durations import format_seconds
from headrace.schemas.errors import UnavailableError

__all__ = ["ReadDeadline"]


class ReadDeadline:
    """The deadline of one read. Use it with `async with` around all of it.

    A read of many rows takes many answers, and of a slow disk as long as they take: it is given up when none has come
    for as long as one may take. A total that the caller sets is for all of them.

    Cancellation: passed on.
    """

    def __init__(self, total_s: float | None, answer_s: float, why: Callable[[str], str]) -> None:
        """Begin when it is entered.

        Args:
            total_s: For all of the read, seconds; None for no bound as long as answers come.
            answer_s: Until the next answer, where there is no total, seconds.
            why: Returns the error's text to a duration.
        """
        self._is_total = total_s is not None
        self._timeout_s = answer_s if total_s is None else total_s
        self._why = why
        self._timeout = asyncio.timeout(None)

    def answered(self) -> None:
        """Note that an answer has come."""
        # One may come in the very moment in which the read is given up.
        if not (self._is_total or self._timeout.expired()):
            self._set()

    def _set(self) -> None:
        self._timeout.reschedule(asyncio.get_running_loop().time() + self._timeout_s)

    async def __aenter__(self) -> Self:
        await self._timeout.__aenter__()
        self._set()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Raise `UnavailableError` when the deadline has come."""
        try:
            await self._timeout.__aexit__(kind, exc, traceback)
        except TimeoutError as late:
            raise UnavailableError(self._why(format_seconds(self._timeout_s))) from late
