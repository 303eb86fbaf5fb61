"""The cycles of the chaos harness: a server, a trainer and served copies, the faults that befall them, and the checks.

Each cycle trains, makes one fault, lets things recover, and then compares: every acked row is there, none is older than
acked or has other bytes, no delete has come undone; and after a final flush the store equals the trainer, bit for bit.
Served copies of the trainer's models compute all the time. Their outputs are the trainer's at the step they show, and
after the flush their rows are.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import os
import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from chaos_ledger import Findings, Ledger
from chaos_model import GROWING, MAX_ROWS, MODELS, TORCH_TABLES
from chaos_proxy import CALM, FrameProxy, Route, Trouble
from chaos_served import BREAKAGES as SERVED_BREAKAGES
from chaos_served import Outputs, ServedCopies
from chaos_server import ChaosServer, Place
from chaos_shard import BREAKAGES as SHARD_BREAKAGES
from chaos_shard import Synced
from chaos_trainer import DIMS, RAW_ROWS, ROWS, TrainerOrder
from chaos_trainer_process import Trainer
from held_ports import hold_ports
from processes import WAIT_S, ChaosError
from waiting import pause, wait_until

from headrace.paramserver.log.inspection import find_logs, inspect_log
from headrace.paramserver.log.segment_reader import SegmentReader
from headrace.paramserver.log.segments import list_segments
from headrace.paramserver.reading.reader import EmbeddingReader
from headrace.paramserver.shard.child import EXIT_STORAGE
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.errors import UnavailableError
from headrace.schemas.log_records import RecordKind
from headrace.schemas.table_names import model_of, path_of
from headrace.schemas.version import Version

__all__ = ["FAULTS", "TROUBLE_S", "Chaos", "flip_byte", "named"]

TROUBLE_S = 0.5
_SECTOR_BYTES = 512
_NUM_SHARDS = 2
_HOST, _PROXY_HOST = "127.0.0.1", "127.0.0.2"
_POLICIES = ("coalesce", "coalesce", "block")

_WEIGHTS = {f"{name}.weight" for name in TORCH_TABLES}

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

    This is a server on one machine; `chaos_nodes.py` derives one on several.

    Attributes:
        faults: How often each fault was made.
        servers: All of the server, or its nodes.
        proxy: Between them and everybody else.
        address: The addresses of any shards.
        found: What was found to be wrong, by kind.
        ledger: What was acked.
        outputs: What the trainer's models and their served copies compute.
        num_compared_rows: Rows of served copies.
        was_set_back: Whether shards have lost, in this cycle, what they had acked.
        loses_disks: Whether shards may lack what they had acked; elsewhere a trainer that meets this ends.
        faults_of_runs: By name: what a run goes round, in an order that the seed shuffles.
    """

    loses_disks: ClassVar[bool] = False
    faults_of_runs: ClassVar[dict[str, Callable[[Any], None]]]
    breakages: ClassVar[Mapping[str, Callable[[], None]]] = SHARD_BREAKAGES | SERVED_BREAKAGES

    def __init__(
        self,
        directory: Path,
        *,
        seed: int,
        breakage: str = "none",
        num_shards: int = _NUM_SHARDS,
    ) -> None:
        """Prepare in a directory that is new or empty."""
        self._num_shards = num_shards
        self.faults: Counter[str] = Counter()
        self.found: Counter[str] = Counter()
        self.ledger = Ledger(ROWS, DIMS, deletes=RAW_ROWS)
        self.outputs = Outputs()
        self.num_compared_rows = 0
        self.was_set_back = False
        self.lock = threading.Lock()  # of the two
        self.random = random.Random(seed)
        self._seed = seed
        self._directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._served_breakage = breakage if breakage in SERVED_BREAKAGES else "none"
        self.servers, routes = self._make_servers(directory, breakage if breakage in SHARD_BREAKAGES else "none")
        self.address = ",".join(f"{route.listen_host}:{route.ports[0]}" for route in routes)
        self.proxy, self._proxies = FrameProxy(routes, seed=seed), contextlib.ExitStack()
        self._trainer: Trainer | None = None
        self._served: dict[str, ServedCopies] = {}
        self._num_trainers = self._num_grown = 0

    def _make_servers(self, directory: Path, breakage: str) -> tuple[list[ChaosServer], list[Route]]:
        """Return what is to run, and where the proxy listens for it."""
        shards = range(self._num_shards)
        place = Place(_HOST, _PROXY_HOST, hold_ports(self._num_shards, (_HOST, _PROXY_HOST)))
        routes = [Route(place.proxy_host, place.host, [place.port + shard for shard in shards])]
        return [ChaosServer(directory, shards=shards, place=place, breakage=breakage)], routes

    @property
    def served_models(self) -> dict[str, tuple[str, Sequence[str]]]:
        """The address that each serving process follows, and the models that it serves."""
        return {"server": (self.address, MODELS)}

    def __enter__(self) -> Self:
        self._proxies.enter_context(self.proxy)
        self._start_all()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.push(self._proxies)
            for server in self.servers:
                stack.callback(server.close)
            if self._trainer is not None:
                stack.callback(self._trainer.kill)
            for served in self._served.values():
                stack.callback(served.kill)
            self.proxy.make(CALM)

    def run_cycle(self, fault: str) -> None:
        """Train, make a fault, recover, compare.

        Raises:
            ChaosError: A promise is broken.
        """
        trainer, _ = self.running_trainer(), self._running_served()
        self.was_set_back = False
        pause(self.random.uniform(0.05, 0.3))
        self.faults[fault] += 1
        self.menu[fault](self)
        self.proxy.make(CALM)
        # Before all is flushed: what was acked is there by itself.
        self._compare(is_final=False)
        if self._trainer is not None:
            trainer.check()
        trainer = self.running_trainer()
        versions = trainer.flush()
        self._compare(is_final=True)
        self._compare_served(versions)
        trainer.go_on()

    def summary(self) -> str:
        """Return what a run has shown, in a few lines."""

        def text(counts: Counter[str]) -> str:
            return ", ".join(f"{name} {number}" for name, number in sorted(counts.items()) if number) or "nothing"

        ledger, outputs = self.ledger, self.outputs
        lines = [
            f"found: {text(self.found)}",
            f"acked: {ledger.num_rows} rows in {ledger.num_batches} batches; {ledger.num_lost} went with a disk",
            f"served: {outputs.num_compared} outputs and {self.num_compared_rows} rows; found: {text(outputs.found)}",
            f"faults: {text(self.faults)}",
            f"frames: {text(self.proxy.counts)}",
        ]
        return "\n".join(lines)

    def finish(self) -> None:
        """Do what a run ends with; nothing, of these runs."""

    @property
    def menu(self) -> Mapping[str, Callable[[Any], None]]:
        """All faults, by name."""
        return self.faults_of_runs

    # Faults. Each returns when the server is ready again; the trainer may be gone.

    def kill_shard(self) -> None:
        """`kill -9` one shard; the supervisor replaces it."""
        server, shard = self._any_shard()
        server.kill_shard(shard)

    def kill_server(self) -> None:
        """`kill -9` the supervisor and all shards."""
        server = self.random.choice(self.servers)
        server.kill()
        pause(self.random.uniform(0, 0.2))
        server.start()

    def kill_trainer(self) -> None:
        """`kill -9` the trainer; the next one, at the end of the cycle, takes a higher epoch."""
        assert self._trainer is not None
        self._trainer.kill()
        self._trainer = None

    def pause_trainer(self) -> None:
        """Stop the trainer's process for a while."""
        self.running_trainer().pause(TROUBLE_S)

    def grow(self) -> None:
        """`kill -9` the trainer; the next one has more rows in a table, while the served copies go on."""
        self.kill_trainer()
        most = MAX_ROWS - TORCH_TABLES[GROWING][0]
        self._num_grown = min(self._num_grown + self.random.randrange(1, 30), most)

    def kill_both(self) -> None:
        """`kill -9` trainer and one shard."""
        self.kill_trainer()
        self.kill_shard()

    def pause_shard(self) -> None:
        """Stop a shard's process for a while, as a machine that swaps does."""
        server, shard = self._any_shard()
        with server.paused(shard):
            pause(TROUBLE_S)

    def kill_served(self) -> None:
        """`kill -9` the serving process; the next one builds its copies while the trainer goes on."""
        self._running_served()
        self._served.pop(self.random.choice(list(self._served))).kill()
        self._running_served()

    def kill_trainer_and_served(self) -> None:
        """`kill -9` trainer and serving process; its copies begin anew before the next trainer says hello, or amid."""
        self.kill_trainer()
        self.kill_served()
        pause(self.random.uniform(0, 0.5))

    def pause_served(self) -> None:
        """Stop the serving process for a while."""
        self.random.choice(self._running_served()).pause(TROUBLE_S)

    def trouble(self, name: str) -> None:
        """Make trouble on the network for a while, until some frame has met with it."""
        before = self.proxy.counts.total()

        def has_met() -> bool:  # after a start it takes a moment until frames flow again
            self.running_trainer().check()
            return self.proxy.counts.total() > before

        self.proxy.make(TROUBLES[name])
        pause(TROUBLE_S)
        wait_until(has_met, f"a frame that meets with any of {name!r}", within_s=WAIT_S)
        if self.random.random() < 0.3:
            self.proxy.reset()

    def trouble_and_kill(self) -> None:
        """`kill -9` one shard while the network is bad."""
        self.proxy.make(TROUBLES["bad_network"])
        self.kill_shard()

    def fail_disk(self, code: int) -> None:
        """Let a write or sync of a log fail: the shard must stop and say so; then the disk is mended, or has room."""
        server, shard = self._any_shard()
        operations = ("pwritev", "allocate") if code == errno.ENOSPC else ("pwritev", "fdatasync")
        # `allocate` comes once a segment; the writes and syncs behind it come with every batch.
        operation = self.random.choice((*operations, operations[0]))
        # In one command: after the first fault nobody may be there to take a second.
        after = {"allocate": 0, "pwritev": 40} if operation == "allocate" else {operation: 3}
        pid = server.shard_pids()[shard]
        server.command(shard, do="fail", errno=code, after=after)
        if code == errno.ENOSPC:
            server.wait_replaced(pid)
            if "disk is full" not in server.said() or os.strerror(code) not in server.said():
                raise ChaosError(f"a full disk is not named: {server.tail()}")
            return
        exit_code = server.end_failed()
        if exit_code != EXIT_STORAGE or os.strerror(code) not in server.said():
            raise ChaosError(f"a failing disk ended the server with {exit_code}: {server.tail()}")
        server.start()

    def lose_unsynced(self) -> None:
        """Cut the power of a server amid writes: what was not synced is lost, or in part."""
        server, first = self._any_shard()
        for shard in sorted(server.shards, key=lambda shard: shard != first):
            server.command(shard, do="hold")
        # Under the policy `block` a trainer that waits for one shard may write nothing to the other any more.
        if not server.command(first, do="wait_held"):
            raise ChaosError("no write came while syncs were held")
        pause(0.1)
        server.kill()
        for shard in server.shards:
            self._cut_unsynced(server, shard)
        try:
            server.start()
        except AssertionError as refusal:
            # A store that is ahead of its log: something was applied, so acked, that was not synced.
            if "records are lost" not in str(refusal):
                raise
            self.found["lost"] += 1
            raise ChaosError(f"the server itself misses acked records: {refusal}") from refusal

    def flip_byte(self) -> None:
        """Flip one byte of a record that a start reads: its shard must refuse to start, and say where it is."""
        server = self.random.choice(self.servers)
        server.kill()
        logs = find_logs(server.data)
        records = [(log, *record) for log in logs for record in _acked_records(log)]
        if not records:  # all is in the store, and the last segments are empty
            self.faults["flipped_byte"] -= 1
            return server.start()
        log, path, offset, end = self.random.choice(records)
        at = self.random.randrange(offset, end)
        flip_byte(path, at)
        try:
            server.launch()
            exit_code, said = server.end_failed(), server.said()
            if exit_code != EXIT_STORAGE or str(path) not in said or f"offset {offset}" not in said:
                raise ChaosError(f"byte {at} of {path} was flipped; the server ended with {exit_code}:\n{said}")
            if not any(f"offset {offset}" in line for line in inspect_log(log).damage):
                raise ChaosError(f"byte {at} of {path} was flipped, and `log inspect` did not find it")
        finally:
            flip_byte(path, at)
        server.start()

    # What the faults are made of.

    def _start_all(self) -> None:
        for server in self.servers:
            server.launch()
        for server in self.servers:
            server.wait_ready()

    def server_of(self, shard: int) -> ChaosServer:
        """Return the server, or node, that owns a shard."""
        return next(server for server in self.servers if shard in server.shards)

    def _any_shard(self) -> tuple[ChaosServer, int]:
        return self.random.choice([(server, shard) for server in self.servers for shard in server.shards])

    def _running_served(self) -> list[ServedCopies]:
        for name, (address, models) in self.served_models.items():
            if name not in self._served:
                log_path = self._directory / f"served-by-{name}.log"
                self._served[name] = ServedCopies(address, models, self._served_breakage, log_path)
        return list(self._served.values())

    def running_trainer(self) -> Trainer:
        """Return the trainer, after a kill a new one."""
        if self._trainer is None:
            self._num_trainers += 1
            order = TrainerOrder(
                address=self.address,
                seed=self._seed * 10_007 + self._num_trainers,
                policy=self.random.choice(_POLICIES),
                num_grown=self._num_grown,
                resends=self.loses_disks,
            )
            self._trainer = Trainer(order, self.ledger, self.outputs, self.lock)
        return self._trainer

    def _cut_unsynced(self, server: ChaosServer, shard: int) -> None:
        """Leave of a shard's last segment what a disk would have: of the unsynced sectors none, or some."""
        synced = Synced.read(server.control, shard)
        path = list_segments(server.shard_path(shard) / "log")[-1]
        if int(path.name.partition(".")[0]) != synced.first_seq:
            raise ChaosError(f"{path} is not the segment that was synced last, {synced.first_seq}")
        keeps = self.random.random() < 0.5
        with path.open("r+b") as file:
            data = bytearray(file.read())
            for start in range(synced.end, len(data), _SECTOR_BYTES):
                end = min(start - start % _SECTOR_BYTES + _SECTOR_BYTES, len(data))
                if not keeps or self.random.random() < 0.5:
                    data[start:end] = bytes(end - start)
            file.seek(0)
            file.write(data)

    def _compare(self, *, is_final: bool) -> None:
        """Compare the store with what was acked until now."""
        with self.lock:
            acked = self.ledger.copy()
        try:
            findings = asyncio.run(self._read_and_compare(acked, is_final=is_final))
        except UnavailableError as exc:
            raise ChaosError(f"the store cannot be read: {exc}") from exc
        self.found.update(findings.counts)
        if findings:
            when = "after the flush" if is_final else "after the fault"
            raise ChaosError(f"{when}: " + "; ".join(findings.lines))

    def _compare_served(self, versions: dict[str, Version]) -> None:
        """Compare what served copies computed until they came to these versions, and their rows, with the trainer's."""
        rows = {fqn: self.ledger.present_rows(fqn) for fqn in ROWS if path_of(fqn) in _WEIGHTS}
        self._running_served()
        for name, served in self._served.items():
            models = self.served_models[name][1]
            asked = {fqn: ids for fqn, (ids, _) in rows.items() if model_of(fqn) in models}
            settled = served.settle({model: versions[model] for model in models}, asked)
            with self.lock:
                lines = self.outputs.compare(settled.seen, of=name, may_go_back=self.was_set_back)
            for fqn, data in settled.rows.items():
                acked = rows[fqn][1]
                self.num_compared_rows += len(acked)
                differ = (np.frombuffer(data, np.uint8).reshape(acked.shape) != acked).any(axis=1)
                if differ.any():
                    self.outputs.found["wrong"] += int(differ.sum())
                    lines.append(f"{differ.sum()} rows of {fqn} of the copies by {name} are not the trainer's")
            if lines:
                raise ChaosError(f"{len(lines)} of outputs of the copies by {name}: " + "; ".join(lines[:5]))

    async def _read_and_compare(self, acked: Ledger, *, is_final: bool) -> Findings:
        findings = Findings()
        async with await EmbeddingReader.connect(self.address, timeout_s=WAIT_S) as reader:
            specs = [table.spec for status in await reader.status() for table in status.tables]
            for fqn, row_ids in acked.row_ids.items():
                if fqn in reader.tables:
                    # A shard whose disk was lost may lack a table's last growth, too, until the trainer is back.
                    num_rows = min(spec.num_rows or 2**63 for spec in specs if spec.fqn == fqn)
                    row_ids = row_ids[row_ids < num_rows]
                    stored = await reader.get(fqn, row_ids, with_states=True, with_versions=True)
                else:
                    stored = None
                found = acked.compare(fqn, stored, is_final=is_final)
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


def flip_byte(path: Path, at: int) -> None:
    """Flip a bit of a file's byte."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 0x10]))


def named(of: type[Chaos], names: str) -> dict[str, Callable[[Any], None]]:
    """Return the faults that methods of those names make."""
    return {name: getattr(of, name) for name in names.split()}


FAULTS = named(
    Chaos,
    "kill_shard kill_server kill_trainer pause_trainer kill_both grow pause_shard kill_served kill_trainer_and_served"
    " pause_served trouble_and_kill",
) | {
    **{name: functools.partial(Chaos.trouble, name=name) for name in TROUBLES},
    "disk_full": functools.partial(Chaos.fail_disk, code=errno.ENOSPC),
    "disk_error": functools.partial(Chaos.fail_disk, code=errno.EIO),
    "lost_unsynced": Chaos.lose_unsynced,
    "flipped_byte": Chaos.flip_byte,
}
Chaos.faults_of_runs = FAULTS
