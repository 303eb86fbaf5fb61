"""The command `headrace backfill` into a server, when something happens to its source meanwhile."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headrace import cli
from headrace.paramserver.shard.launch import ServerProcess
from headrace.scripts.table_io.sending import BackfillSender


@pytest.mark.parametrize(
    ("happens", "text"),
    [
        (
            lambda path: os.utime(path, ns=(1, 1)),
            "t.safetensors: changed while it was read; run it again when it is at rest",
        ),
        (lambda path: path.unlink(), "t.safetensors"),
    ],
    ids=["changed", "gone"],
)
def test_a_source_that_is_not_at_rest_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    happens: Callable[[Path], None],
    text: str,
) -> None:
    """A file that is written to or removed while its rows are sent is one line and exit code 1, and no success."""
    path, sent = tmp_path / "t.safetensors", []
    save_file(dict(table=np.zeros((10, 3), "<f4")), path)
    original = BackfillSender._messages

    def cut(self: BackfillSender, *arguments: Any) -> Any:
        if not sent:
            happens(path)
        sent.append(original(self, *arguments))
        return sent[-1]

    monkeypatch.setattr(BackfillSender, "_messages", cut)
    with ServerProcess.start(tmp_path / "data") as server:
        capsys.readouterr()
        assert cli.main(["backfill", str(path), "--server", server.address, "--table", "table"]) == 1
        told = capsys.readouterr()
    assert sent and text in told.err and told.err.count("\n") == 1
    assert "rows written" not in told.out
