"""That a shard's directory is a follower's, and what has become of it: `follow.json`."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from headrace.paramserver.system.durable import disk_error, write_file
from headrace.schemas.errors import CorruptionError

__all__ = ["FollowState"]

# ON DISK: names, and what a version means.
_STATE_NAME = "follow.json"
_FORMAT, _FORMAT_VERSION = "headrace-follow", 1


@dataclass(frozen=True, kw_only=True, slots=True)
class FollowState:
    """Contents of `follow.json`.

    Attributes:
        copy_id: Tells the source which lease is this directory's.
        has_begun: The copy is one that the source's records continue.
        is_direct: The source takes the updates itself, as far as it was heard.
        declined: The last offer that was declined, for ever.
        accepted: The offer by which the shard takes over, or what stands for one if it was forced to; None before. The
            record `open` in the log is what decides.
        was_forced: It takes over without an offer.
        is_promoted: It has taken over.
    """

    copy_id: str
    has_begun: bool = False
    is_direct: bool = True
    declined: str | None = None
    accepted: str | None = None
    was_forced: bool = False
    is_promoted: bool = False

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """Return what a shard's directory says; None if it is no follower's.

        Raises:
            CorruptionError: It is damaged.
            StorageError: The disk failed.
        """
        path = directory / _STATE_NAME
        try:
            values = json.loads(path.read_bytes())
            if (values.pop("format"), values.pop("format_version")) != (_FORMAT, _FORMAT_VERSION):
                raise ValueError(f"not a follower's of version {_FORMAT_VERSION}")
            return cls(**values)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise disk_error(f"{path}: {exc.strerror or exc}", exc) from exc
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CorruptionError(f"{path}: {exc}; remove the copy, and it begins anew") from exc

    def write(self, directory: Path) -> None:
        """Write it durably; `StorageError` if that fails."""
        values = {"format": _FORMAT, "format_version": _FORMAT_VERSION, **asdict(self)}
        try:
            write_file(directory / _STATE_NAME, json.dumps(values).encode() + b"\n")
        except OSError as exc:
            raise disk_error(f"{directory / _STATE_NAME}: {exc.strerror or exc}", exc) from exc
