"""How to install what is missing, by where this copy of Headrace came from."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path

import pytest

from headrace.schemas import extras


@pytest.mark.parametrize("source", ["checkout", "wheel", "index", "gone"])
def test_the_command_names_what_this_copy_came_from(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkout or a wheel that is there; else the name, which pip knows."""
    given = tmp_path / "my head race.whl"
    if source != "gone":
        given.touch()
    told = None if source == "index" else json.dumps({"url": given.as_uri()})

    class Installed:
        def read_text(self, name: str) -> str | None:
            return told if name == "direct_url.json" else None

    root = str(Path(extras.__file__).resolve().parents[1])
    if source != "checkout":
        monkeypatch.setattr(extras, "__file__", str(tmp_path / "headrace" / "schemas" / "extras.py"))
    monkeypatch.setattr(metadata, "distribution", lambda name: Installed())
    extras._origin.cache_clear()
    command = shlex.split(extras.install_command("torch", "tools"))
    extras._origin.cache_clear()
    expected = {"checkout": root, "wheel": given}.get(source, "headrace")
    assert command == ["pip", "install", f"{expected}[torch,tools]"]
