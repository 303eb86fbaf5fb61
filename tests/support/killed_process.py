"""Work in a process that is killed at a certain call."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

__all__ = ["run_killed"]

_SCRIPT = """
import os, pkgutil, sys
sys.path.insert(0, {support!r})
owner, _, attribute = {call!r}.rpartition(".")
owner = pkgutil.resolve_name(owner)
original, left = getattr(owner, attribute), {nth}

def die(*arguments, **settings):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), 9)
    return original(*arguments, **settings)

setattr(owner, attribute, die)
from pathlib import Path
{work}
"""


def run_killed(work: str, *, at: str, nth: int = 1) -> bool:
    """Run statements in a process that is killed at the n-th call of something; return whether it came to that.

    Args:
        work: The statements. They can import what tests can.
        at: Its dotted name; a colon goes before a class, as in `module:Class.method`.
        nth: Which of its calls.
    """
    script = _SCRIPT.format(support=str(Path(__file__).parent), call=at, nth=nth, work=work)
    done = subprocess.run([sys.executable, "-c", script], check=False, capture_output=True, timeout=120)
    assert done.returncode in (-9, 0), done.stderr.decode()
    return done.returncode == -9
