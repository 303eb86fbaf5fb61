"""The chaos harness: kills, cuts and corrupts a real server and a real trainer, and checks that nothing acked is lost.

    python tests/faults/chaos.py --cycles 200 --seed 7

Each cycle trains, makes one fault, lets things recover, and then compares: every acked row is there, none is older than
acked or has other bytes, no delete has come undone; and after a final flush the store equals the trainer, bit for bit.
Served copies of the trainer's models compute all the time, and their outputs are the trainer's at the step they show.
It ends at the first cycle that finds something, with exit code 1, and leaves the directory for a look.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Self

import typer
from chaos_ledger import Findings, Ledger
from chaos_model import GROWING, MAX_ROWS, TORCH_TABLES
from chaos_proxy import CALM, FrameProxy, Trouble
from chaos_served import BREAKAGES as SERVED_BREAKAGES
from chaos_served import Outputs, ServedCopies
from chaos_server import HOST, PROXY_HOST, WAIT_S, ChaosServer
from chaos_shard import BREAKAGES as SHARD_BREAKAGES
from chaos_shard import Synced
from chaos_trainer import DIMS, ROWS, TrainerOrder
from chaos_trainer_process import ChaosError, Trainer
from new_directory import new_directory

from headrace.paramserver.log.inspection import find_logs, inspect_log
from headrace.paramserver.log.segment_reader import SegmentReader
from headrace.paramserver.log.segments import list_segments
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.shard.child import EXIT_STORAGE
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.log_records import RecordKind
from headrace.schemas.version import Version

__all__ = ["FAULTS", "Chaos", "ChaosError", "deck", "main"]

_SECTOR_BYTES = 512
_NUM_SHARDS = 2
_TROUBLE_S = 0.5
_POLICIES = ("coalesce", "coalesce", "spool", "block")

BREAKAGES = SHARD_BREAKAGES | SERVED_BREAKAGES
TROUBLES = {
    "resets": Trouble(reset=0.03),
    "delays": Trouble(delay=0.2),
    "duplicates": Trouble(duplicate=0.3, echo=0.02),
    "reorders": Trouble(reorder=0.1),
    "old_frames": Trouble(old=0.3, reset=0.02),
    "bad_network": Trouble(reset=0.02, delay=0.05, duplicate=0.1, echo=0.01, reorder=0.05, old=0.1),
}


class Chaos:
    """One server, one trainer at a time, and what is done to them. Use with `with`.

    Attributes:
        faults: How often each fault was made.
        proxy: Between the two.
        found: What was found to be wrong, by kind.
        ledger: What was acked.
        outputs: What the trainer's models and their served copies compute.
    """

    def __init__(self, directory: Path, *, seed: int, breakage: str = "none") -> None:
        self.faults: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.ledger = Ledger(ROWS, DIMS)
        self.outputs = Outputs()
        self._lock = threading.Lock()
        self._random = random.Random(seed)
        self._seed = seed
        self._spool = directory / "spool"
        self._spool.mkdir(parents=True)
        self._server = ChaosServer(
            directory, num_shards=_NUM_SHARDS, breakage=breakage if breakage in SHARD_BREAKAGES else "none"
        )
        self._served_breakage = breakage if breakage in SERVED_BREAKAGES else "none"
        self._served: ServedCopies | None = None
        ports = range(self._server.port, self._server.port + _NUM_SHARDS)
        self.proxy = FrameProxy(listen_host=PROXY_HOST, target_host=HOST, ports=ports, seed=seed)
        self._trainer: Trainer | None = None
        self._num_trainers = self._num_grown = 0

    def __enter__(self) -> Self:
        self.proxy.start()
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.proxy.make(CALM)
        if self._served is not None:
            self._served.kill()
        if self._trainer is not None:
            self._trainer.kill()
        self._server.close()
        self.proxy.close()

    def run_cycle(self, fault: str) -> None:
        """Train, make a fault, recover, compare.

        Raises:
            ChaosError: A promise is broken.
        """
        trainer, _ = self._running_trainer(), self._running_served()
        time.sleep(self._random.uniform(0.05, 0.3))
        self.faults[fault] += 1
        FAULTS[fault](self)
        self.proxy.make(CALM)
        # Before all is flushed: what was acked is there by itself.
        self._compare(is_final=False)
        if self._trainer is not None:
            trainer.check()
        trainer = self._running_trainer()
        versions = trainer.flush()
        self._compare(is_final=True)
        self._compare_served(versions)
        trainer.go_on()

    # Faults. Each returns when the server is ready again; the trainer may be gone.

    def kill_shard(self) -> None:
        """`kill -9` one shard; the supervisor replaces it."""
        self._server.kill_shard(self._random.randrange(_NUM_SHARDS))

    def kill_server(self) -> None:
        """`kill -9` the supervisor and all shards."""
        self._server.kill()
        time.sleep(self._random.uniform(0, 0.2))
        self._server.start()

    def kill_trainer(self) -> None:
        """`kill -9` the trainer; the next one takes a higher epoch."""
        self._kill_trainer()

    def grow(self) -> None:
        """`kill -9` the trainer; the next one has more rows in a table, while the served copies go on."""
        self._kill_trainer()
        most = MAX_ROWS - TORCH_TABLES[GROWING][0]
        self._num_grown = min(self._num_grown + self._random.randrange(1, 30), most)

    def kill_both(self) -> None:
        """`kill -9` trainer and one shard."""
        self._kill_trainer()
        self.kill_shard()

    def pause_shard(self) -> None:
        """Stop a shard's process for a while, as a machine that swaps does."""
        pid = self._server.shard_pid(self._random.randrange(_NUM_SHARDS))
        os.kill(pid, signal.SIGSTOP)
        time.sleep(_TROUBLE_S)
        os.kill(pid, signal.SIGCONT)

    def kill_served(self) -> None:
        """`kill -9` the serving process; the next one builds its copies while the trainer goes on."""
        self._restart_served()

    def kill_trainer_and_served(self) -> None:
        """`kill -9` trainer and serving process; its copies begin anew before the next trainer says hello, or amid."""
        self._kill_trainer()
        self._restart_served()
        time.sleep(self._random.uniform(0, 0.5))

    def pause_served(self) -> None:
        """Stop the serving process for a while."""
        self._running_served().pause(_TROUBLE_S)

    def trouble(self, name: str) -> None:
        """Make trouble on the network for a while, until some frame has met with it."""
        before, deadline_s = self.proxy.counts.total(), time.monotonic() + WAIT_S
        self.proxy.make(TROUBLES[name])
        time.sleep(_TROUBLE_S)
        while self.proxy.counts.total() == before:  # after a start it takes a moment until frames flow again
            self._running_trainer().check()
            if time.monotonic() > deadline_s:
                raise ChaosError(f"no frame has met with any of {name!r}")
            time.sleep(0.01)
        if self._random.random() < 0.3:
            self.proxy.reset_all()

    def trouble_and_kill(self) -> None:
        """`kill -9` one shard while the network is bad."""
        self.proxy.make(TROUBLES["bad_network"])
        self.kill_shard()

    def fail_disk(self, code: int) -> None:
        """Let a write or sync of the log fail: the server must stop and say so; then the disk is mended."""
        shard = self._random.randrange(_NUM_SHARDS)
        operations = ("pwritev", "allocate") if code == errno.ENOSPC else ("pwritev", "fdatasync")
        # `allocate` comes once a segment; the writes and syncs behind it come with every batch.
        operation = self._random.choice((*operations, operations[0]))
        # In one command: after the first fault nobody may be there to take a second.
        after = {"allocate": 0, "pwritev": 40} if operation == "allocate" else {operation: 3}
        self._server.command(shard, do="fail", errno=code, after=after)
        exit_code = self._server.wait_end()
        if exit_code != EXIT_STORAGE or os.strerror(code) not in self._server.tail():
            raise ChaosError(f"a failing disk ended the server with {exit_code}: {self._server.tail()}")
        self._server.start()

    def lose_unsynced(self) -> None:
        """Cut the power of a server amid writes: what was not synced is lost, or in part."""
        first = self._random.randrange(_NUM_SHARDS)
        for shard in sorted(range(_NUM_SHARDS), key=lambda shard: shard != first):
            self._server.command(shard, do="hold")
        # Under the policy `block` a trainer that waits for one shard may write nothing to the other any more.
        if not self._server.command(first, do="wait_held"):
            raise ChaosError("no write came while syncs were held")
        time.sleep(0.1)
        self._server.kill()
        for shard in range(_NUM_SHARDS):
            self._cut_unsynced(shard)
        try:
            self._server.start()
        except AssertionError as refusal:
            # A store that is ahead of its log: something was applied, so acked, that was not synced.
            if "records are lost" not in str(refusal):
                raise
            self.found["lost"] += 1
            raise ChaosError(f"the server itself misses acked records: {refusal}") from refusal

    def flip_byte(self) -> None:
        """Flip one byte of a record that a start reads: the server must refuse to start, and say where it is."""
        self._server.kill()
        logs = find_logs(self._server.data)
        records = [(log, *record) for log in logs for record in _acked_records(log)]
        if not records:  # all is in the store, and the last segments are empty
            self.faults["flipped_byte"] -= 1
            return self._server.start()
        log, path, offset, end = self._random.choice(records)
        at = self._random.randrange(offset, end)
        _flip(path, at)
        try:
            self._server.launch()
            exit_code, said = self._server.wait_end(), self._server.tail()
            if exit_code != EXIT_STORAGE or str(path) not in said or f"offset {offset}" not in said:
                raise ChaosError(f"byte {at} of {path} was flipped; the server ended with {exit_code}:\n{said}")
            if not any(f"offset {offset}" in line for line in inspect_log(log).damage):
                raise ChaosError(f"byte {at} of {path} was flipped, and `log inspect` did not find it")
        finally:
            _flip(path, at)
        self._server.start()

    # What the faults are made of.

    def _kill_trainer(self) -> None:
        assert self._trainer is not None
        self._trainer.kill()
        self._trainer = None

    def _running_served(self) -> ServedCopies:
        if self._served is None:
            self._served = ServedCopies(f"{PROXY_HOST}:{self._server.port}", self._served_breakage)
        return self._served

    def _restart_served(self) -> None:
        self._running_served().kill()
        self._served = None
        self._running_served()

    def _running_trainer(self) -> Trainer:
        if self._trainer is None:
            self._num_trainers += 1
            order = TrainerOrder(
                address=f"{PROXY_HOST}:{self._server.port}",
                seed=self._seed * 10_007 + self._num_trainers,
                policy=self._random.choice(_POLICIES),
                spool_dir=self._spool,
                num_grown=self._num_grown,
            )
            self._trainer = Trainer(order, self.ledger, self.outputs, self._lock)
            self._trainer.wait_ready()
        return self._trainer

    def _cut_unsynced(self, shard: int) -> None:
        """Leave of a shard's last segment what a disk would have: of the unsynced sectors none, or some."""
        synced = Synced.read(self._server.control, shard)
        path = list_segments(self._server.data / f"shard-{shard:04d}" / "log")[-1]
        if int(path.name.partition(".")[0]) != synced.first_seq:
            raise ChaosError(f"{path} is not the segment that was synced last, {synced.first_seq}")
        keeps = self._random.random() < 0.5
        with path.open("r+b") as file:
            data = bytearray(file.read())
            for start in range(synced.end, len(data), _SECTOR_BYTES):
                end = min(start - start % _SECTOR_BYTES + _SECTOR_BYTES, len(data))
                if not keeps or self._random.random() < 0.5:
                    data[start:end] = bytes(end - start)
            file.seek(0)
            file.write(data)

    def _compare(self, *, is_final: bool) -> None:
        """Compare the store with what was acked until now."""
        with self._lock:
            acked = self.ledger.copy()
        findings = asyncio.run(self._read_and_compare(acked, is_final=is_final))
        self.found.update(findings.counts)
        if findings:
            when = "after the flush" if is_final else "after the fault"
            raise ChaosError(f"{when}: " + "; ".join(findings.lines))

    def _compare_served(self, versions: dict[str, Version]) -> None:
        """Compare what served copies computed until they came to these versions with the trainer's outputs."""
        kind, why, seen = self._running_served().settle(versions)
        with self._lock:
            lines = self.outputs.compare(seen)
        if kind:
            self.outputs.found[kind] += 1
            lines.append(f"{kind}: {why}")
        if lines:
            raise ChaosError(f"{len(lines)} of served outputs: " + "; ".join(lines[:5]))

    async def _read_and_compare(self, acked: Ledger, *, is_final: bool) -> Findings:
        findings = Findings()
        address = f"{PROXY_HOST}:{self._server.port}"
        async with await EmbeddingReader.connect(address, timeout_s=WAIT_S) as reader:
            for fqn, row_ids in acked.row_ids.items():
                if (spec := reader.tables.get(fqn)) is not None:
                    row_ids = row_ids[row_ids < (spec.num_rows or 2**63)]
                    stored = await reader.get(fqn, row_ids, with_states=True, with_versions=True)
                    found = acked.compare(fqn, stored, is_final=is_final)
                else:
                    found = acked.compare_absent(fqn)
                findings.counts += found.counts
                findings.lines += found.lines
        return findings


def _acked_records(log: Path) -> list[tuple[Path, int, int]]:
    """Return (segment, offset, end) of the acked records of a killed log that its next start reads."""
    applied_seq = 0
    if (log.parent / "store" / "CURRENT").is_file():
        store = RowStore.open_read_only(log.parent / "store")
        applied_seq = store.applied_seq
        store.close()
    found = []
    for path in list_segments(log):
        records, durable_seq = [], 0
        with SegmentReader(path) as file:
            is_sealed = file.read_seal() is not None
            while (record := file.peek()) is not None:
                durable_seq = max(durable_seq, record.durable_seq)
                if record.kind is not RecordKind.DATA:
                    break
                records.append((record.seq, file.offset, file.offset + record.size_bytes))
                file.offset += record.size_bytes
        # Of a sealed segment the store's backlog is read, of the last one everything; and what nothing behind it proves
        # to be acked would pass for a torn tail.
        found += [
            (path, offset, end)
            for seq, offset, end in records
            if (seq > applied_seq if is_sealed else seq <= durable_seq)
        ]
    return found


def _flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def _trouble(name: str) -> Callable[[Chaos], None]:
    return lambda chaos: chaos.trouble(name)


# By name: what it does. A run goes round them in an order that the seed shuffles.
FAULTS: dict[str, Callable[[Chaos], None]] = {
    "kill_shard": Chaos.kill_shard,
    "kill_server": Chaos.kill_server,
    "kill_trainer": Chaos.kill_trainer,
    "kill_both": Chaos.kill_both,
    "grow": Chaos.grow,
    "pause_shard": Chaos.pause_shard,
    "kill_served": Chaos.kill_served,
    "kill_trainer_and_served": Chaos.kill_trainer_and_served,
    "pause_served": Chaos.pause_served,
    **{name: _trouble(name) for name in TROUBLES},
    "trouble_and_kill": Chaos.trouble_and_kill,
    "disk_full": lambda chaos: chaos.fail_disk(errno.ENOSPC),
    "disk_error": lambda chaos: chaos.fail_disk(errno.EIO),
    "lost_unsynced": Chaos.lose_unsynced,
    "flipped_byte": Chaos.flip_byte,
}


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
    return (
        f"{cycles} cycles, seed {seed}, {seconds:.0f} s: {', '.join(f'{found[kind]} {kind}' for kind in told)} rows\n"
        f"acked: {chaos.ledger.num_rows} rows in {chaos.ledger.num_batches} batches\n"
        f"served: {outputs.num_compared} outputs, {served}\n"
        f"faults: {faults}\nframes: {troubles or 'no trouble'}"
    )


def main(
    cycles: Annotated[int, typer.Option(min=1, help="How many faults to make.")] = 20,
    seed: Annotated[int, typer.Option(help="Chooses the faults, and what each does.")] = 0,
    fault: Annotated[list[str] | None, typer.Option(help="Only this one; may be repeated.", show_default=False)] = None,
    breakage: Annotated[str, typer.Option(help=f"Break shards or served copies: {', '.join(BREAKAGES)}.")] = "none",
    data: Annotated[
        Path | None, typer.Option(help="New directory to work in, and to keep.", metavar="DIR", show_default=False)
    ] = None,
) -> None:
    """Kill, cut and corrupt a server and a trainer, and check that nothing acked is lost."""
    for name in fault or ():
        if name not in FAULTS:
            raise typer.BadParameter(f"no fault {name!r}; there is {', '.join(FAULTS)}")
    if breakage not in BREAKAGES:
        raise typer.BadParameter(f"no breakage {breakage!r}; there is {', '.join(BREAKAGES)}")
    directory = new_directory(data, prefix="headrace-chaos-")
    started_s, done, error = time.monotonic(), 0, None
    with Chaos(directory, seed=seed, breakage=breakage) as chaos:
        for name in deck(cycles, seed, fault or tuple(FAULTS)):
            print(f"{time.monotonic() - started_s:5.0f} s  {name}", flush=True)
            try:
                chaos.run_cycle(name)
            except (ChaosError, AssertionError) as exc:
                error = f"FAILED in cycle {done + 1} ({name}): {exc}\nleft in {directory}"
                break
            done += 1
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
