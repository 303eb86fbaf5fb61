"""How to install what an extra of Headrace brings."""

from __future__ import annotations

import functools
import json
from importlib import metadata
from pathlib import Path
from urllib.parse import unquote, urlsplit

__all__ = ["install_command"]


def install_command(*extras: str) -> str:
    """Return the command that adds extras to this copy of Headrace, wherever it was installed from."""
    return f"pip install '{_origin()}[{','.join(extras)}]'"


@functools.cache
def _origin() -> str:
    """Return the checkout or wheel of this copy, or its name, which does for a copy that pip has installed."""
    checkout = Path(__file__).resolve().parents[1]
    if (checkout / "pyproject.toml").is_file():
        return str(checkout)
    told = metadata.distribution("headrace").read_text("direct_url.json")
    url = urlsplit(json.loads(told)["url"] if told else "")
    path = unquote(url.path)
    return path if url.scheme == "file" and Path(path).exists() else "headrace"
