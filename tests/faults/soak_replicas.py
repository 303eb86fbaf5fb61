"""The serving side of the soak: a process with three replicas, threads that look up in them, and what they must see."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from soak_rows import FREE, PAIR, STORED_TYPES, TABLES, Watch, read_stamps
from soak_trainer import Settled
from waiting import pause

from headrace.paramserver.reading.reader import EmbeddingReader, Rows
from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.api.config import DiskStorage
from headrace.paramserver.replica.copy.shard_tail import Change
from headrace.paramserver.replica.copy.table_set import TableSet
from headrace.schemas.errors import HeadraceError, UnavailableError

__all__ = ["BREAKAGES", "REPLICAS", "Served", "run_replicas"]

_WAIT_S = 120.0
_BATCH = 64
_LOOKUP_PAUSE_S, _AUDIT_PAUSE_S = 0.004, 0.5
_NUM_THREADS = 2
_PRESENT = 1
_MAX_PROBLEMS = 5
# Hot rows and blocks of each table on disk: room for a few dozen rows.
_DISK_TABLE_BYTES = 40_000
# How many updates a broken replica takes before it leaves one out.
_SKIPS_EVERY = 8

REPLICAS: dict[str, dict[str, Any]] = {
    "latest": {"consistency": "latest"},
    "step": {"consistency": "step"},
    "disk": {"consistency": "latest", "storage": {"*": DiskStorage(memory_bytes=_DISK_TABLE_BYTES)}},
}
"""By name: settings."""


@dataclass(kw_only=True)
class Served:
    """What the lookups in one replica have come to; sent from process to process.

    Attributes:
        name: The replica's.
        num_lookups: Of all threads.
        problems: What must not be, and lookups that failed; the first few.
        num_failed: Lookups that raised.
        num_gone: Rows that were seen to be deleted or expired.
        num_audits: Audits beside all that, each of all tables, that found no difference.
        num_audits_given_up: Those that came to no end: the server was away, another copy took this one's place, or by
            step rows came all the time.
        digest: What its audit said, and whether all was equal.
    """

    name: str
    num_lookups: int = 0
    problems: list[str] = field(default_factory=list)
    num_failed: int = 0
    num_gone: int = 0
    num_audits: int = 0
    num_audits_given_up: int = 0
    digest: str = ""


def run_replicas(address: str, directory: Path, seed: int, breakage: str, requests: Connection) -> None:
    """Serve until told to settle; the process's main function.

    Requests and answers: ("load", name, folder): ("done", None or why it was refused). "look": ("seen", [problems]).
    ("settle", `Settled`): ("settled", [`Served`]). Of itself: ("ready",), ("failed", traceback).
    """
    try:
        torch.set_num_threads(1)
        BREAKAGES[breakage]()
        audits = breakage == "none"  # else lookups are to find it
        replicas = {name: _Replica(name, address, directory, seed + at, audits) for at, name in enumerate(REPLICAS)}
        requests.send(("ready",))
        while True:
            match requests.recv():
                case ("load", name, folder):
                    requests.send(("done", replicas[name].load(Path(folder))))
                case "look":
                    requests.send(("seen", [text for replica in replicas.values() for text in replica.look()]))
                case ("settle", settled):
                    found = [replica.settle(settled, address) for replica in replicas.values()]
                    requests.send(("settled", found))
                    return
    except EOFError:
        return  # the harness has ended
    except (Exception, KeyboardInterrupt):
        requests.send(("failed", traceback.format_exc()))


class _Replica:
    """One replica, the threads that look up in it, and one that audits it."""

    def __init__(self, name: str, address: str, directory: Path, seed: int, audits: bool) -> None:
        folders = {key: directory / name / key for key in ("disk", "snapshots")}
        for folder in folders.values():
            folder.mkdir(parents=True)
        self._served = Served(name=name)
        self._watches = {fqn: Watch(table) for fqn, table in TABLES.items()}
        self._lock = threading.Lock()
        self._is_done = False
        self._replica = EmbeddingReplica(
            address,
            disk_dir=folders["disk"],
            snapshot_dir=folders["snapshots"],
            name=f"soak-{name}",
            open_timeout_s=_WAIT_S,
            **REPLICAS[name],
        )
        self._threads = [
            threading.Thread(target=self._look_up, args=(seed * 100 + at,), name=f"lookups-{name}-{at}", daemon=True)
            for at in range(_NUM_THREADS)
        ]
        if audits:
            self._threads.append(threading.Thread(target=self._audit, name=f"audits-{name}", daemon=True))
        for thread in self._threads:
            thread.start()

    def load(self, folder: Path) -> str | None:
        """Swap a snapshot in; return why it was refused. A server that goes away meanwhile may be a reason."""
        try:
            self._replica.load_snapshot(folder, timeout_s=_WAIT_S)
        except UnavailableError as exc:
            return str(exc)
        return None

    def look(self) -> list[str]:
        """Return what must not be, until now."""
        found = [*self._served.problems, *(text for watch in self._watches.values() for text in watch.problems)]
        return [f"{self._served.name}: {text}" for text in found]

    def settle(self, settled: Settled, address: str) -> Served:
        """Catch up with the trainer, end the lookups, and compare everything with the store and the trainer."""
        served, replica = self._served, self._replica
        replica.wait_for(settled.step, _WAIT_S, epoch=settled.epoch)
        self._is_done = True
        for thread in self._threads:
            thread.join(_WAIT_S)
        report = replica.audit(timeout_s=_WAIT_S)
        served.digest = f"{'EQUAL' if report.is_equal else 'DIFFERENT'}\n{report}"
        if not report.is_equal:
            served.problems.append("the replica's audit found differences")
        asyncio.run(self._compare(settled, address))
        served.num_gone = sum(watch.num_gone for watch in self._watches.values())
        served.problems = [text.partition(": ")[2] for text in self.look()]
        replica.close()
        return served

    def _look_up(self, seed: int) -> None:
        rng, pause, num_lookups = np.random.default_rng(seed), threading.Event(), 0
        while not self._is_done:
            num_lookups += 1
            try:
                self._look_up_once(rng)
            except Exception:  # of whatever kind: no lookup may fail
                with self._lock:
                    self._served.num_failed += 1
                self._note(f"a lookup failed: {traceback.format_exc()}")
            pause.wait(_LOOKUP_PAUSE_S)
        with self._lock:
            self._served.num_lookups += num_lookups

    def _audit(self) -> None:
        pause, served = threading.Event(), self._served
        while not self._is_done:
            try:
                report = self._replica.audit(timeout_s=_WAIT_S)
            except HeadraceError:
                served.num_audits_given_up += 1
            except Exception:
                self._note(f"an audit failed: {traceback.format_exc()}")
            else:
                served.num_audits += report.is_equal
                if not report.is_equal:
                    self._note(f"an audit found differences: {report.difference}")
            pause.wait(_AUDIT_PAUSE_S)

    def _look_up_once(self, rng: np.random.Generator) -> None:
        """Look up rows of one table, or of the pair, and check them."""
        fqns = [*PAIR, *TABLES, *FREE]
        fqn = fqns[int(rng.integers(len(fqns)))]
        if fqn in FREE:
            self._replica.lookup(fqn, rng.integers(0, FREE[fqn][0], _BATCH))
            return
        together = PAIR if fqn in PAIR else (fqn,)
        numbers = np.sort(rng.choice(TABLES[fqn].num_rows, min(_BATCH, TABLES[fqn].num_rows // 2), replace=False))
        ids = TABLES[fqn].ids_of(numbers)
        if rng.random() < 0.1:
            self._replica.prefetch(fqn, ids)
        begun = {name: self._watches[name].begin(numbers) for name in together}
        found = self._replica.lookup_many(dict.fromkeys(together, ids))
        stamps = [self._watches[name].end(begun[name], numbers, found[name].float().numpy()) for name in together]
        if self._served.name == "step" and (stamps[0] != stamps[-1]).any():
            at = int(np.argmax(stamps[0] != stamps[-1]))
            self._note(f"half a step: row {numbers[at]} of {PAIR} has stamps {stamps[0][at]} and {stamps[-1][at]}")

    def _note(self, text: str) -> None:
        with self._lock:
            if len(self._served.problems) < _MAX_PROBLEMS:
                self._served.problems.append(text)

    async def _compare(self, settled: Settled, address: str) -> None:
        """Compare all rows with the store's, and both with the trainer's stamps."""
        async with await EmbeddingReader.connect(address, timeout_s=_WAIT_S) as reader:
            for fqn, table in TABLES.items():
                numbers = np.arange(table.num_rows)
                ids = table.ids_of(numbers)
                stored, ours = await self._rows(reader, fqn, ids)
                is_there = stored.presence == _PRESENT
                theirs = np.where(is_there[:, None], stored.weights, np.float32(0))
                stamps, _ = read_stamps(table, numbers, theirs)
                gone, last = self._watches[fqn].gone()
                came_back = np.zeros(table.num_rows, np.bool_)
                came_back[gone] = is_there[gone] & (stamps[gone] <= last)
                wrong = {
                    "other bytes than the store's": (ours != theirs).any(axis=1),
                    "other updates in the store than the trainer's": is_there & (stamps != settled.stamps[fqn]),
                    "rows that the store lacks": settled.must[fqn] & ~is_there,
                    "rows that should not be in the store": settled.must_not[fqn] & is_there,
                    "rows that were gone and are back": came_back,
                }
                for what, rows in wrong.items():
                    if rows.any():
                        self._note(f"at the end: {fqn}: {what}: {rows.sum()}, the first {numbers[rows][:5].tolist()}")
            for fqn, rows in settled.free_rows.items():
                stored, ours = await self._rows(reader, fqn, np.arange(len(rows)))
                theirs = np.where(stored.presence[:, None] == _PRESENT, rows, np.float32(0))
                for whose, found in (("the store", stored.weights), ("this replica", ours)):
                    if differ := int((found != theirs).any(axis=1).sum()):
                        self._note(f"at the end: {fqn}: {differ} rows of {whose} are not the trainer's")

    async def _rows(self, reader: EmbeddingReader, fqn: str, ids: npt.NDArray[np.int64]) -> tuple[Rows, Any]:
        """Return a table's rows in the store and here, all as float32."""
        stored = await reader.get(fqn, ids)
        weights = torch.from_numpy(stored.weights)
        values = weights.view(STORED_TYPES.get(fqn, torch.float32))
        ours = (await asyncio.to_thread(self._replica.lookup, fqn, ids)).float().numpy()
        return dataclasses.replace(stored, weights=values.float().numpy()), ours


# Replicas that are broken on purpose, to see that it is noticed. In the process of the replicas alone.


def _skip_updates() -> None:
    apply = TableSet._apply
    count = 0

    def apply_most(self: TableSet, change: Change) -> None:
        nonlocal count
        count += bool(change.deltas)
        if not change.deltas or count % _SKIPS_EVERY:
            apply(self, change)

    TableSet._apply = apply_most  # type: ignore[method-assign]


def _tear_steps() -> None:
    def show_torn(self: TableSet) -> bool:
        cut = None if self.limits is not None else self._next_cut()
        if cut is None or cut[:2] == self.visible:
            return False
        for tail in self.tails:
            with self.seqlock.write():
                self._show_pending(tail, max((change.seq for change in tail.pending if change.cut == cut), default=0))
            pause(0.001)
        self.visible = cut[:2]
        return True

    TableSet._show_step = show_torn  # type: ignore[method-assign]


def _keep_expired() -> None:
    apply = TableSet._apply

    def apply_but_expiry(self: TableSet, change: Change) -> None:
        if not any(delta.deleted_row_ids is not None for delta in change.deltas):
            apply(self, change)

    TableSet._apply = apply_but_expiry  # type: ignore[method-assign]


BREAKAGES: dict[str, Callable[[], None]] = {
    "none": lambda: None,
    "skips_updates": _skip_updates,
    "tears_steps": _tear_steps,
    "keeps_expired": _keep_expired,
}
"""By name: breaks the replicas of this process."""
