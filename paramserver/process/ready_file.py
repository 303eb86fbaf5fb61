"""The file by which a process tells the scripts that have started it that it is ready."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.schemas.errors import ConfigError, StorageError

__all__ = ["ReadyFile"]


class ReadyFile:
    """A file that is there while a process is ready, for scripts that have started it.

    Thread: any; methods block.
    """

    def __init__(self, path: Path) -> None:
        """Remove what an earlier run has left: it would lie.

        Raises:
            ConfigError: The file cannot be written there.
        """
        self._path = path
        # A disk may hold up one write until the next one comes, or until the process ends.
        self._lock = threading.Lock()
        self._is_over = False
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            raise ConfigError(f"--ready-file {path}: {exc.strerror}") from exc
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(f"--ready-file {path}: its directory is not there or not writable")

    def write(self, facts: Mapping[str, Any]) -> None:
        """Say that the process is ready; whoever reads the file finds all of it. After `remove` nothing is said.

        Raises:
            StorageError: It cannot be written.
        """
        temporary = self._path.with_name(self._path.name + ".tmp")
        with self._lock:
            if self._is_over:
                return
            try:
                temporary.write_bytes(json.dumps(facts).encode() + b"\n")
                temporary.rename(self._path)
            except OSError as exc:
                raise StorageError(f"--ready-file {self._path} cannot be written: {exc.strerror}") from exc

    def remove(self) -> None:
        """Say that it is ready no more, for good. Again is harmless."""
        with self._lock:
            self._is_over = True
            self._path.unlink(missing_ok=True)
