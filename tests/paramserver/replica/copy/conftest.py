"""Copies of a replica that start with one copy and are closed after the test."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from fake_copies import Begun, FakeBuilder, FakeCopy, made, switch

from headrace.paramserver.replica.copy.copies import Copies


@pytest.fixture
async def begun() -> AsyncIterator[Begun]:
    opened: list[Copies] = []

    async def begin(*results: FakeCopy | Exception) -> tuple[Copies, FakeBuilder]:
        copies, builder = made(*results)
        opened.append(copies)
        await switch(copies)
        return copies, builder

    yield begin
    for copies in opened:
        await copies.close()
