"""A process of ours does not go through everything that is imported again and again."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import gc, sys
from headrace.paramserver.short_pauses import shorten_pauses
shorten_pauses()
print(gc.get_freeze_count() > 1000, gc.get_threshold()[0] > 700, sys.getswitchinterval() < 0.005, gc.isenabled())
"""


def test_collections_and_switches_are_set() -> None:
    """What is there is left alone, and collections come rarely, but come."""
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"] * 4
