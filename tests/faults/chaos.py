"""The chaos harness: kills, cuts and corrupts a real server and a real trainer, and checks that nothing acked is lost.

    python tests/faults/chaos.py --cycles 200 --seed 7
    python tests/faults/chaos.py --cycles 200 --seed 7 --nodes 3 --shards 4 --follower
    python tests/faults/chaos.py --cycles 200 --seed 7 --nodes 3 --shards 4 --log nats
    python tests/faults/chaos.py --cycles 200 --seed 7 --soak

The first is a server on one machine, the second one on several hosts with an object store, whose disks may be lost too.
The third has its log in NATS, with standbys. With `--soak` replicas of all kinds answer lookups, while rows expire and
snapshots are swapped in (`soak.py`).
It ends at the first cycle that finds something, with exit code 1, and leaves the directory for a look.
"""

from __future__ import annotations

import random
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from chaos_cycles import Chaos
from chaos_nodes import FOLLOWER_FAULTS, NodesChaos
from chaos_replicated import LAST_FAULTS, ReplicatedChaos
from soak import Soak

__all__ = ["deck", "main"]


def deck(cycles: int, seed: int, faults: Sequence[str]) -> list[str]:
    """Return the faults of a run: each as often as the others, shuffled round by round."""
    rng, dealt = random.Random(seed), []
    while len(dealt) < cycles:
        dealt += rng.sample(list(faults), len(faults))
    return dealt[:cycles]


def _new_directory(data: Path | None) -> Path:
    """Return the directory of `--data`, made and empty, or a temporary one."""
    if data is None:
        return Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    try:
        data.mkdir(parents=True, exist_ok=True)
        names = sorted(path.name for path in data.iterdir())
    except OSError as exc:
        raise typer.BadParameter(f"--data {data}: {exc.strerror}; name a new directory") from exc
    if names:
        raise typer.BadParameter(f"--data {data}: holds {names[0]!r}; name a new directory")
    return data


def main(
    cycles: Annotated[int, typer.Option(min=1, help="How many faults to make.")] = 20,
    seconds: Annotated[
        float, typer.Option(min=0, help="Begin no cycle after this time; 0 for no bound.", show_default=False)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Chooses the faults, and what each does.")] = 0,
    fault: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.", show_default=False)] = None,
    breakage: Annotated[str, typer.Option(help="Break shards, served copies or, with --soak, replicas.")] = "none",
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Run the server as so many nodes with an object store.", show_default=False),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(min=1, help="How many shards there are: 4 on nodes, otherwise 2.", show_default=False),
    ] = None,
    follower: Annotated[
        bool, typer.Option("--follower", help="With nodes: let some served copies follow one.")
    ] = False,
    log: Annotated[str, typer.Option(help="With nodes: files, or nats for a replicated log and standbys.")] = "files",
    soak: Annotated[
        bool, typer.Option("--soak", help="Look up in replicas of all kinds, with deeds for faults.")
    ] = False,
    data: Annotated[
        Path | None, typer.Option(help="New directory to work in, and to keep.", metavar="DIR", show_default=False)
    ] = None,
) -> None:
    """Kill, cut and corrupt a server and a trainer, and check that nothing acked is lost."""
    shards = shards or (2 if nodes is None else 4)
    kind = Soak if soak else ReplicatedChaos if log == "nats" else Chaos if nodes is None else NodesChaos
    faults = kind.faults_of_runs | (FOLLOWER_FAULTS if follower else {})
    known = faults | (LAST_FAULTS if log == "nats" else {})
    wrong = {
        "--soak goes with no other kind of server": soak and (nodes is not None or log != "files"),
        "--follower goes with --nodes": nodes is None and follower,
        f"--nodes {nodes}: more than --shards {shards}": nodes is not None and shards < nodes,
        f"no log in {log!r}; there is files, nats": log not in ("files", "nats"),
        "--log nats goes with --nodes of 2 or more and no --follower": log == "nats" and ((nodes or 0) < 2 or follower),
        f"no breakage {breakage!r}; there is {', '.join(kind.breakages)}": breakage not in kind.breakages,
        **{f"no fault {name!r}; there is {', '.join(known)}": name not in known for name in fault or ()},
    }
    for why, is_so in wrong.items():
        if is_so:
            raise typer.BadParameter(why)
    directory = _new_directory(data)
    settings = {"num_shards": shards, "num_nodes": nodes, "has_follower": follower}
    started_s, done, doing, error = time.monotonic(), 0, "start", None
    with kind(directory, seed=seed, breakage=breakage, **{key: each for key, each in settings.items() if each}) as run:
        try:
            for doing in deck(cycles, seed, fault or tuple(faults)):
                now_s = time.monotonic() - started_s
                if seconds and now_s > seconds:
                    break
                print(f"{now_s:5.0f} s  {doing}", flush=True)
                run.run_cycle(doing)
                done += 1
            doing = "finish"
            run.finish()
        except AssertionError as exc:
            error = f"FAILED in cycle {done + 1} ({doing}): {exc}\nleft in {directory}"
    print(f"{done} cycles, seed {seed}, {time.monotonic() - started_s:.0f} s\n{run.summary()}")
    if error is not None:
        print(error, file=sys.stderr)
        raise typer.Exit(1)
    if data is None:
        shutil.rmtree(directory)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    app()
