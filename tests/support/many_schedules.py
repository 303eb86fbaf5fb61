"""Many seeded schedules on some processes, from the command line."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial

__all__ = ["RunSchedules", "run_many"]

RunSchedules = Callable[[range], tuple[Counter[str], list[str]]]
_REPORT_EVERY = 10_000


def run_many(run: RunSchedules, what: str | None) -> int:
    """Run as many schedules as the command line says, and report; return the exit code, 1 with findings.

    Args:
        run: A module's function; runs the schedules of some seeds, and returns what they did in all and the findings.
        what: The module's docstring.
    """
    parser = argparse.ArgumentParser(description=(what or "").partition("\n")[0])
    parser.add_argument("--schedules", type=int, default=2000, help="how many, with seeds from --seed on")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    args = parser.parse_args()
    began_s, total, findings, busy_s = time.monotonic(), Counter[str](), list[str](), 0.0
    num_done, size = 0, max(1, min(500, args.schedules // args.jobs))
    seeds = range(args.seed, args.seed + args.schedules)
    parts = [seeds[at : at + size] for at in range(0, len(seeds), size)]
    with ProcessPoolExecutor(args.jobs) as pool:
        for did, found, used_s in pool.map(partial(_timed, run), parts):
            total += did
            findings += found
            busy_s += used_s
            num_done += size
            if num_done % _REPORT_EVERY < size:
                print(f"{min(num_done, len(seeds))} schedules, {len(findings)} findings", file=sys.stderr, flush=True)
    print("\n".join(findings[:50]))
    print(f"{args.schedules} schedules from seed {args.seed}: {len(findings)} findings, {dict(total)}")
    elapsed_s = time.monotonic() - began_s
    print(f"{elapsed_s:.1f} s, {args.schedules / busy_s:.0f} schedules for each second of a processor")
    return 1 if findings else 0


def _timed(run: RunSchedules, seeds: range) -> tuple[Counter[str], list[str], float]:
    began_s = time.process_time()
    return *run(seeds), time.process_time() - began_s
