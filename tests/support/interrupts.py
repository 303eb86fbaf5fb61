"""Ctrl-C at any line of a flush."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from headrace.kernels.dirty_sets import DirtyIds, DirtyRows
from headrace.streamer.flush.dense_copy import DenseCopy
from headrace.streamer.flush.flusher import Flusher, TakenRows
from headrace.streamer.flush.importance import ImportanceFilter
from headrace.streamer.flush.staging import StagingPool
from headrace.streamer.taps.tapped_table import DeletedRows

__all__ = ["is_interrupted_at"]

_FILES = {
    inspect.getfile(cls) for cls in (DeletedRows, DenseCopy, DirtyIds, DirtyRows, Flusher, StagingPool, TakenRows)
}
_FILES |= {inspect.getfile(ImportanceFilter)}


def is_interrupted_at(place: int, call: Callable[[], object]) -> bool:
    """Run `call` with a Ctrl-C at the n-th line or return of the files above; return whether there was such a one."""
    num_places = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal num_places
        # What is raised amid the closing of a generator goes nowhere.
        if frame.f_code.co_filename not in _FILES or frame.f_code.co_flags & inspect.CO_GENERATOR:
            return None
        num_places += event in ("line", "return")
        if num_places == place:
            num_places += 1
            raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
        torch.set_grad_enabled(True)  # what came amid the end of a `no_grad` has left it off
    return False
