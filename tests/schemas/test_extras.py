"""How to install what is missing, by where this copy of Headrace came from."""

from __future__ import annotations

import json
import shlex
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from headrace.schemas import extras


@pytest.mark.parametrize("source", ["checkout", "wheel", "index", "gone", "none"])
def test_the_command_names_what_this_copy_came_from(
    source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or wheel that is there; else the name, which pip knows; the checkout where nothing is installed."""
    given = tmp_path / "my head race.whl"
    if source != "gone":
        given.touch()
    told = None if source == "index" else json.dumps({"url": given.as_uri(), "dir_info": {"editable": True}})

    class Installed:
        def read_text(self, name: str) -> str | None:
            return told if name == "direct_url.json" else None

    def distribution(name: str) -> Any:
        if source == "none":
            raise metadata.PackageNotFoundError(name)
        return Installed()

    monkeypatch.setattr(metadata, "distribution", distribution)
    extras._origin.cache_clear()
    command = shlex.split(extras.install_command("torch", "tools"))
    extras._origin.cache_clear()
    root = {"none": str(Path(extras.__file__).resolve().parents[1]), "index": "headrace", "gone": "headrace"}
    assert command == ["pip", "install", f"{root.get(source, given)}[torch,tools]"]
