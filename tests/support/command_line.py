"""Commands of `headrace`, run in the test's process."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace import cli


class CommandLine:
    """Runs commands, and returns what they print; `err` is what the last one has printed on stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys, self.err = capsys, ""

    def __call__(self, *arguments: object, code: int | None = 0) -> str:
        """Run a command, which must end with an exit code, None for any, and return its stdout."""
        self._capsys.readouterr()
        ended_with = cli.main([str(argument) for argument in arguments])
        assert code is None or ended_with == code
        out, self.err = self._capsys.readouterr()
        return out

    def json(self, *arguments: object, code: int | None = 0) -> Any:
        """Run a command with `--json`, and return what it tells."""
        return json.loads(self(*arguments, "--json", code=code))

    def refused(self, *arguments: object, code: int = 1) -> str:
        """Run a command that must fail and print nothing else, and return its one line on stderr."""
        assert self(*arguments, code=code) == ""
        assert self.err.startswith("headrace: error: ") and self.err.count("\n") == 1, self.err
        return self.err
