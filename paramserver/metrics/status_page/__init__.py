"""The status page: a file each of HTML, style and script, as they go to a browser, loading nothing from elsewhere."""

from __future__ import annotations

from importlib import resources

__all__ = ["PAGE_FILES"]

_TYPES = {
    "index.html": "text/html; charset=utf-8",
    "status.css": "text/css; charset=utf-8",
    "status.js": "text/javascript; charset=utf-8",
}

PAGE_FILES = {name: (kind, resources.files(__name__).joinpath(name).read_bytes()) for name, kind in _TYPES.items()}
"""Content type and bytes of each file, by name."""
