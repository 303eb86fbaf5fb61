"""A file that exists while a process is ready, for the scripts that started it."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.paramserver.system.durable import write_file
from headrace.schemas.errors import ConfigError, StorageError

__all__ = ["ReadyFile"]


class ReadyFile:
    """A file that exists while a process is ready.

    Thread: any; methods block.
    """

    def __init__(self, path: Path) -> None:
        """Remove the file of an earlier process, which would be wrong now.

        Raises:
            ConfigError: The file cannot be written there.
        """
        self._path = path
        # A disk may delay one write until the next one comes, or until the process ends.
        self._lock = threading.Lock()
        self._is_over = False
        try:
            path.unlink(missing_ok=True)
        except OSError as exc:
            raise ConfigError(f"--ready-file {path}: {exc.strerror}") from exc
        if not os.access(path.parent, os.W_OK):
            raise ConfigError(f"--ready-file {path}: its directory is not there or not writable")

    def write(self, facts: Mapping[str, Any]) -> None:
        """Report that the process is ready; readers see all of the facts or no file. Does nothing after `remove`.

        Raises:
            StorageError: The file cannot be written.
        """
        with self._lock:
            if self._is_over:
                return
            try:
                write_file(self._path, json.dumps(facts).encode() + b"\n", is_durable=False)
            except OSError as exc:
                raise StorageError(f"--ready-file {self._path} cannot be written: {exc.strerror}") from exc

    def remove(self) -> None:
        """Report that the process is no longer ready, for good. Idempotent."""
        with self._lock:
            self._is_over = True
            self._path.unlink(missing_ok=True)
