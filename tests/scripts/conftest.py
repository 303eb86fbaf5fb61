"""Fixtures for tests of the commands and of what they read and write."""

from __future__ import annotations

import pytest
from command_line import CommandLine


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> CommandLine:
    """The command line; `run("status", "--server", address)` returns what it prints."""
    return CommandLine(capsys)
