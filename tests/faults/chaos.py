"""The chaos harness: kills, cuts and corrupts a real server and a real trainer, and checks that nothing acked is lost.

    python tests/faults/chaos.py --cycles 200 --seed 7
    python tests/faults/chaos.py --cycles 200 --seed 7 --nodes 3 --shards 4 --relay
    python tests/faults/chaos.py --cycles 200 --seed 7 --nodes 3 --shards 4 --log nats
    python tests/faults/chaos.py --cycles 200 --seed 7 --shards 3 --reshards

The first is a server on one machine, the second one on several hosts with an object store, whose disks may be lost too.
The third has its log in NATS, with standbys. With `--reshards`, partitions move between the shards all the time.
It ends at the first cycle that finds something, with exit code 1, and leaves the directory for a look.
"""

from __future__ import annotations

import random
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
from chaos_cycles import BREAKAGES, FAULTS, Chaos, ChaosError
from chaos_nodes import NODE_FAULTS, RELAY_FAULTS, NodesChaos
from chaos_replicated import LAST_FAULTS, REPLICATED_FAULTS, ReplicatedChaos
from chaos_reshards import RESHARD_FAULTS
from new_directory import new_directory

__all__ = ["deck", "main"]


def deck(cycles: int, seed: int, faults: Sequence[str] = tuple(FAULTS)) -> list[str]:
    """Return the faults of a run: each as often as the others, shuffled round by round."""
    rng, dealt = random.Random(seed), []
    while len(dealt) < cycles:
        dealt += rng.sample(list(faults), len(faults))
    return dealt[:cycles]


def summarize(chaos: Chaos, *, cycles: int, seed: int, seconds: float) -> str:
    """Return what a run has shown, in a few lines."""
    found = chaos.found
    told = ("lost", "stale", "resurrected", "wrong", "unacked")
    outputs = chaos.outputs
    served = ", ".join(f"{outputs.found[kind]} {kind}" for kind in ("lost", "stale", "wrong", "unknown", "failed"))
    faults = ", ".join(f"{name} {number}" for name, number in sorted(chaos.faults.items()))
    troubles = ", ".join(f"{name} {number}" for name, number in sorted(chaos.proxy.counts.items()) if number)
    ledger = chaos.ledger
    asked = ""
    if isinstance(chaos, ReplicatedChaos):
        asked = f"\nasked while taken over: {chaos.asked['answered']} answered, {chaos.asked['refused']} refused"
    if (reshards := chaos.reshards) is not None:
        struck = ", ".join(f"{phase or 'begin'} {number}" for phase, number in sorted(reshards.phases.items()))
        counts = ", ".join(f"{number} {kind}" for kind, number in sorted(reshards.counts.items()))
        asked += f"\nreshards: {counts or 'none'}; faults of moves in {struck or 'no phase'}"
        asked += "".join(f"\naborted: {why}" for why in reshards.stuck)
    gone = f"; {ledger.num_lost} went with a disk and were sent again" if chaos.loses_disks else ""
    return (
        f"{cycles} cycles, seed {seed}, {seconds:.0f} s: {', '.join(f'{found[kind]} {kind}' for kind in told)} rows\n"
        f"acked: {ledger.num_rows} rows in {ledger.num_batches} batches{gone}\n"
        f"served: {outputs.num_compared} outputs, {served}; {chaos.num_compared_rows} rows\n"
        f"faults: {faults}\nframes: {troubles or 'no trouble'}{asked}"
    )


def main(
    cycles: Annotated[int, typer.Option(min=1, help="How many faults to make.")] = 20,
    seconds: Annotated[
        float, typer.Option(min=0, help="Begin no cycle after this time; 0 for no bound.", show_default=False)
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Chooses the faults, and what each does.")] = 0,
    fault: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.", show_default=False)] = None,
    breakage: Annotated[str, typer.Option(help=f"Break shards or served copies: {', '.join(BREAKAGES)}.")] = "none",
    nodes: Annotated[
        int | None,
        typer.Option(min=1, help="Run the server as so many nodes with an object store.", show_default=False),
    ] = None,
    shards: Annotated[
        int | None,
        typer.Option(min=1, help="How many shards there are: 4 on nodes, otherwise 2.", show_default=False),
    ] = None,
    relay: Annotated[bool, typer.Option("--relay", help="With nodes: let some served copies follow a relay.")] = False,
    reshards: Annotated[
        bool, typer.Option("--reshards", help="Move partitions between the shards all the time.")
    ] = False,
    log: Annotated[str, typer.Option(help="With nodes: files, or nats for a replicated log and standbys.")] = "files",
    data: Annotated[
        Path | None, typer.Option(help="New directory to work in, and to keep.", metavar="DIR", show_default=False)
    ] = None,
) -> None:
    """Kill, cut and corrupt a server and a trainer, and check that nothing acked is lost."""
    shards = shards or (2 if nodes is None else 4)
    if reshards and shards < 2:
        raise typer.BadParameter("--reshards goes with --shards of 2 or more")
    if nodes is None and relay:
        raise typer.BadParameter("--relay goes with --nodes")
    if nodes is not None and shards < nodes:
        raise typer.BadParameter(f"--nodes {nodes}: more than --shards {shards}")
    if log not in ("files", "nats"):
        raise typer.BadParameter(f"no log in {log!r}; there is files, nats")
    is_replicated = log == "nats"
    if is_replicated and (nodes is None or nodes < 2 or relay):
        raise typer.BadParameter("--log nats goes with --nodes of 2 or more, and without --relay")
    faults = (
        REPLICATED_FAULTS
        if is_replicated
        else FAULTS
        if nodes is None
        else NODE_FAULTS | (RELAY_FAULTS if relay else {})
    )
    faults = faults | (RESHARD_FAULTS if reshards else {})
    known = faults | (LAST_FAULTS if is_replicated else {})
    for name in fault or ():
        if name not in known:
            raise typer.BadParameter(f"no fault {name!r}; there is {', '.join(known)}")
    if breakage not in BREAKAGES:
        raise typer.BadParameter(f"no breakage {breakage!r}; there is {', '.join(BREAKAGES)}")
    directory = new_directory(data, prefix="headrace-chaos-")
    started_s, done, error = time.monotonic(), 0, None
    if nodes is None:
        made = Chaos(directory, seed=seed, breakage=breakage, num_shards=shards, has_reshards=reshards)
    elif is_replicated:
        made = ReplicatedChaos(
            directory, seed=seed, breakage=breakage, num_nodes=nodes, num_shards=shards, has_reshards=reshards
        )
    else:
        made = NodesChaos(
            directory,
            seed=seed,
            breakage=breakage,
            num_nodes=nodes,
            num_shards=shards,
            has_relay=relay,
            has_reshards=reshards,
        )
    with made as chaos:
        for name in deck(cycles, seed, fault or tuple(faults)):
            now_s = time.monotonic() - started_s
            if seconds and now_s > seconds:
                break
            print(f"{now_s:5.0f} s  {name}", flush=True)
            try:
                chaos.run_cycle(name)
            except (ChaosError, AssertionError) as exc:
                error = f"FAILED in cycle {done + 1} ({name}): {exc}\nleft in {directory}"
                break
            done += 1
        if reshards and error is None:
            try:
                chaos.finish()
            except (ChaosError, AssertionError) as exc:
                error = f"FAILED at the end: {exc}\nleft in {directory}"
    print(summarize(chaos, cycles=done, seed=seed, seconds=time.monotonic() - started_s))
    if error is not None:
        print(error, file=sys.stderr)
        raise typer.Exit(1)
    if data is None:
        shutil.rmtree(directory)


if __name__ == "__main__":
    app = typer.Typer(add_completion=False)
    app.command()(main)
    app()
