"""Runs a function on several ranks of `torch.distributed`: real processes, gloo, a file as rendezvous, no port."""

from __future__ import annotations

import datetime
import multiprocessing
import multiprocessing.connection
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

__all__ = ["run_ranks"]

# Imported once by the server that the ranks are forked from; a missing one is passed over there.
_PRELOAD = ["torch", "torch.distributed", "torchrec", "torchrec.distributed.model_parallel", "fbgemm_gpu"]


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    local_size: int | None = None,
    timeout_s: float = 100.0,
    uses_gpu: bool = False,
) -> list[Any]:
    """Return what `function(rank, *args)` returns on each rank; its process group is initialized.

    Args:
        function: Of a module that can be imported: those of `tests/support` can.
        world_size: Ranks.
        args: Picklable.
        local_size: Ranks of one "node", for shardings that tell nodes apart; None for all.
        timeout_s: For all together; then every rank is killed.
        uses_gpu: Begin each rank anew, which takes seconds: CUDA cannot be used in a fork of a process that has it.

    Raises:
        AssertionError: A rank has raised, ended or not answered in time; with its traceback.
    """
    context = multiprocessing.get_context("spawn" if uses_gpu else "forkserver")
    context.set_forkserver_preload(_PRELOAD)
    deadline_s = time.monotonic() + timeout_s
    with tempfile.TemporaryDirectory(prefix="headrace-ranks-") as folder:
        pipes: list[Connection] = []
        processes = []
        try:
            for rank in range(world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=_rank_main,
                    args=(theirs, function, rank, world_size, local_size or world_size, folder, timeout_s, args),
                    daemon=True,
                )
                process.start()
                theirs.close()
                pipes.append(ours)
                processes.append(process)
            results = _collect(pipes, deadline_s)
            for process in processes:
                process.join(max(0.0, deadline_s - time.monotonic()))
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                    process.join()
            for pipe in pipes:
                pipe.close()
    return results


def _collect(pipes: list[Connection], deadline_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for rank, pipe in enumerate(pipes) if rank not in results]
        ready = multiprocessing.connection.wait(waiting, timeout=max(0.0, deadline_s - time.monotonic()))
        late = [rank for rank in range(len(pipes)) if rank not in results]
        assert ready, f"ranks {late} did not answer in time"
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                is_good, value = pipes[rank].recv()
            except EOFError:
                raise AssertionError(f"rank {rank} has ended without an answer") from None
            assert is_good, f"rank {rank}:\n{value}"
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    pipe: Connection,
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    local_size: int,
    folder: str,
    timeout_s: float,
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    # What else ranks print (gloo, the planner) would mix into the test's output.
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    os.environ |= {
        "LOCAL_WORLD_SIZE": str(local_size),
        "LOCAL_RANK": str(rank % local_size),
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
    }
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(Path(folder) / "store"), world_size),
            rank=rank,
            world_size=world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        result = function(rank, *args)
        dist.barrier()
        pipe.send((True, result))
        dist.destroy_process_group()
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    # Without Python's exit: threads of libraries must not hold up a rank that has answered.
    pipe.close()
    os._exit(0)
