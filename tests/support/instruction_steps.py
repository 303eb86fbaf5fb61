"""Interrupt functions between any two of their instructions, as another thread might."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def at_each_step_of(call: Callable[[], None], names: set[str], between: Callable[[], None]) -> None:
    """Call `between` before each instruction of the functions `names` that `call` runs."""

    def step(frame: FrameType, event: str, arg: object) -> Any:
        frame.f_trace_opcodes = True
        if event == "opcode":
            between()
        return step

    def enter(frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code.co_name not in names:
            return None
        frame.f_trace_opcodes = True
        return step

    before = sys.gettrace()
    sys.settrace(enter)
    try:
        call()
    finally:
        sys.settrace(before)
