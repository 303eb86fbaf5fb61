"""The status page: HTML, style and script in a file each. It loads nothing from other hosts."""

from importlib import resources

__all__ = ["PAGE_FILES"]

_TYPES = {"index.html": "text/html", "status.css": "text/css", "status.js": "text/javascript"}

PAGE_FILES = {
    name: (f"{kind}; charset=utf-8", resources.files(__name__).joinpath(name).read_bytes())
    for name, kind in _TYPES.items()
}
"""Content type and bytes of each file, by name."""
