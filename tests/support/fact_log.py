"""Waits for facts that the code under test logs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

from headrace.paramserver.system import log_lines


class FactLog(logging.Handler):
    """Keeps the facts of a logger and wakes who waits for them. Thread: the loop's."""

    def __init__(self) -> None:
        super().__init__()
        self.facts: list[tuple[str, dict[str, Any]]] = []
        self._news = asyncio.Event()
        self._num_taken = 0

    def emit(self, record: logging.LogRecord) -> None:
        self.facts.append((record.getMessage(), getattr(record, log_lines._FIELDS, {})))
        self._news.set()

    def messages(self) -> list[str]:
        return [message for message, _ in self.facts]

    async def next(self, message: str, *, timeout_s: float = 60.0) -> dict[str, Any]:
        """Return the fields of the next fact that says `message`, from where the last call stopped."""
        async with asyncio.timeout(timeout_s):
            while True:
                while self._num_taken < len(self.facts):
                    found, fields = self.facts[self._num_taken]
                    self._num_taken += 1
                    if found == message:
                        return fields
                self._news.clear()
                await self._news.wait()


def collect_facts(name: str) -> Iterator[FactLog]:
    """Yield the facts of the logger of a module; the body of a fixture."""
    logger, handler = logging.getLogger(name), FactLog()
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG)
    try:
        yield handler
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
