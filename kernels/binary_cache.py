"""Compiled kernels on disk, so that only the first process of a user that needs them compiles them.

A file holds the SHA-256 of a binary and the binary. Its name is the SHA-256 of all that decides it: source, headers,
architecture, options and the compiler's version. A file that is cut short or damaged counts as none. Files are written
aside and renamed, so that processes that start together never read half of one.
"""

from __future__ import annotations

import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

__all__ = ["BinaryCache", "binary_key"]

_logger = logging.getLogger(__name__)
_DIGEST_BYTES = hashlib.sha256().digest_size


def binary_key(parts: Sequence[bytes]) -> str:
    """Return the name of the binary that so many inputs decide: 64 hexadecimal digits.

    Args:
        parts: All that decides it; how they are divided counts.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()


class BinaryCache:
    """A folder of compiled kernels. It is never cleaned: a binary is some 50 KB, and few are made a version."""

    def __init__(self, folder: Path | None = None) -> None:
        """Use a folder, which is made when first written to.

        Args:
            folder: None is `headrace/kernels` under `$XDG_CACHE_HOME`, or under `~/.cache`.
        """
        home = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        self._folder = folder or Path(home).expanduser() / "headrace" / "kernels"

    def get(self, name: str, make: Callable[[], bytes]) -> bytes:
        """Return a binary from the folder, or make it and keep it there.

        A folder that cannot be read or written costs time at each start and nothing else; it is said in the log.

        Args:
            name: Of the file: what `binary_key` gives, and the ending of such binaries.
            make: Compiles; what it raises is passed on.
        """
        path = self._folder / name
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            content = b""
        except OSError as exc:
            _logger.warning("compiled kernels cannot be read from %s: %s", path, exc.strerror)
            content = b""
        digest, binary = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        if binary and hashlib.sha256(binary).digest() == digest:
            return binary
        binary = make()
        try:
            self._write(path, binary)
        except OSError as exc:
            _logger.warning("compiled kernels cannot be kept in %s: %s", self._folder, exc.strerror)
        return binary

    def _write(self, path: Path, binary: bytes) -> None:
        # For this user only: what lies here is run.
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        number, aside = tempfile.mkstemp(dir=self._folder, prefix=path.stem[:8])
        try:
            with open(number, "wb") as file:
                file.write(hashlib.sha256(binary).digest() + binary)
            os.replace(aside, path)
        except BaseException:
            os.unlink(aside)
            raise
