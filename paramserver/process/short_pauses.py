"""Settings of Python that keep a process which serves from pausing; for processes of our own, not for a user's."""

from __future__ import annotations

import gc
import os
import sys
import threading

__all__ = ["NICENESS", "shorten_pauses", "step_back"]

NICENESS = 5
"""What threads that nobody waits for have above the others."""

_HIGHEST_NICENESS = 19

_SWITCH_INTERVAL_S = 0.0005
# Requests make many objects and hardly a cycle: of batches of many tables, collections took a quarter of the time.
_COLLECT_AFTER = 50_000


def shorten_pauses() -> None:
    """Make waits for the garbage's collection and for the interpreter rarer and shorter.

    To be called once everything is imported: what is there stays, and a collection that goes through all of it again
    would be a pause, of a tenth of a second in a process with torch.
    """
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER)
    # How long whoever needs the interpreter waits for a thread that runs Python, and does not let go by itself.
    sys.setswitchinterval(_SWITCH_INTERVAL_S)


def step_back() -> None:
    """Let threads for which somebody waits have a busy processor before this one, and before those that it starts.

    Thread: it holds for the calling one, for good.
    """
    thread = threading.get_native_id()
    # From what the process was started with: less than that is refused to most users.
    niceness = os.getpriority(os.PRIO_PROCESS, thread) + NICENESS
    os.setpriority(os.PRIO_PROCESS, thread, min(niceness, _HIGHEST_NICENESS))
