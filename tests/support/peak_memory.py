"""How much memory a piece of code takes at most."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["PeakMemory", "peak_memory"]

_SELF = Path("/proc/self")


@dataclass
class PeakMemory:
    """The result: by how much this process has grown at most, bytes; known at the end of the block."""

    grown_bytes: int = 0


@contextlib.contextmanager
def peak_memory() -> Iterator[PeakMemory]:
    """Measure the block, with all threads of this process."""
    (_SELF / "clear_refs").write_text("5")  # the highest mark begins anew
    before_bytes, peak = _bytes_of("VmRSS"), PeakMemory()
    try:
        yield peak
    finally:
        peak.grown_bytes = max(_bytes_of("VmHWM") - before_bytes, 0)


def _bytes_of(name: str) -> int:
    lines = (_SELF / "status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))
