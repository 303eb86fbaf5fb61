"""Where a long run works: a directory that nobody has yet."""

from __future__ import annotations

import tempfile
from pathlib import Path

import typer

__all__ = ["new_directory"]


def new_directory(data: Path | None, *, prefix: str) -> Path:
    """Return the directory of `--data`, made and empty, or a temporary one.

    Raises:
        typer.BadParameter: Something is in it, or it cannot be made.
    """
    if data is None:
        return Path(tempfile.mkdtemp(prefix=prefix))
    try:
        data.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in data.iterdir())
    except OSError as exc:
        raise typer.BadParameter(f"--data {data}: {exc.strerror}; name a new directory") from exc
    if names:
        raise typer.BadParameter(f"--data {data}: holds {names[0]!r}; name a new directory")
    return data
