"""What must be true of moves, kept apart from the code under test: who wrote what, and what was acked."""

from __future__ import annotations

from typing import Any

from move_shards import ROWS, Key, ModelShard, Row, Rows, partition_of
from simulator import Finding

from headrace.schemas.errors import HeadraceError
from headrace.schemas.move_records import Move, MoveRecord, MoveStep, step_of
from headrace.schemas.version import NO_FLOOR, Version

__all__ = ["MoveLedger"]


class MoveLedger:
    """Knows what was sent and acked, and compares.

    Attributes:
        acked_versions: The newest acked version of each row that the trainer wrote.
        num_setbacks: How often a shard lost acked records; what was acked before counts when it was sent again.
    """

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self._written: dict[Key, dict[Version, tuple[int | None, int]]] = {}
        self._newest: dict[Key, Version] = {}  # of the trainer's, or of the replay's where no trainer writes
        self.acked_versions: dict[Key, Version] = {}
        self.num_setbacks = 0
        self.set_back_to: dict[int, int] = {}  # the last record of each such shard that was left
        self.epoch = 2  # of the newest trainer
        self.steps: dict[Version, list[Key]] = {}  # what each step of the newest epoch has written
        self._at_seal: dict[tuple[int, int | None], Rows] = {}  # by source's seq and mark

    # Told by clients.

    def sent(self, writer: Any, step: int, rows: dict[Key, tuple[int | None, int]]) -> None:
        version = (writer.version_epoch, step)
        for key, row in rows.items():
            self._written.setdefault(key, {})[version] = row
            if key[0] == "b" or (writer.is_trainer and writer.epoch == self.epoch):
                self._newest[key] = max(version, self._newest.get(key, version))
        if writer.is_trainer and writer.epoch == self.epoch:
            self.steps[version] = list(rows)

    def acked(self, writer: Any, batch: Any) -> None:
        version = (writer.version_epoch, batch.step)
        for key in batch.rows:
            if key[0] == "b" or writer.is_trainer:
                self.acked_versions[key] = max(version, self.acked_versions.get(key, version))

    def forget_steps(self) -> None:
        """A new trainer begins."""
        self.epoch += 1
        self.steps.clear()

    def set_back(self, shard: ModelShard) -> None:
        """A shard has lost acked records."""
        self.num_setbacks += 1
        self.set_back_to[shard.number] = len(shard.log)
        self.acked_versions.clear()

    # Checks.

    def check_row(self, where: str, key: Key, row: Row | None) -> None:
        """A row is one that was written."""
        if row is not None and self._written.get(key, {}).get(row.version) != (row.value, row.identity):
            raise Finding(f"{where}: wrong row {key}: {row}")

    def check_read(self, shard: ModelShard, key: Key, row: Row | None, least: Version | None) -> None:
        """A read has all that was acked before it."""
        self.check_row(f"a read of shard {shard.number}", key, row)
        if least is None or (row is not None and row.version >= least):
            return
        if row is None and self.was_deleted(key, least):
            return
        raise Finding(f"a read of shard {shard.number} is stale: {key} is {row}, {least} was acked")

    def was_deleted(self, key: Key, version: Version) -> bool:
        """Return whether no row may stand for a version or a newer one: a tombstone may have been dropped."""
        return any(row[0] is None for each, row in self._written[key].items() if each >= version)

    def took(self, shard: ModelShard, seq: int, record: Any) -> None:
        """A record has its place: at the seal and at the activation, compare both sides; no cut has newer rows."""
        try:
            if isinstance(record, MoveRecord):
                self._schedule.did[str(record.step)] += 1
                self._check_step(shard, seq, record)
            elif record is None:
                self._check_cut(shard, seq)
        except Finding as exc:
            self._schedule.fail(exc)

    def _check_step(self, shard: ModelShard, seq: int, record: MoveRecord) -> None:
        at = shard.position(seq)
        if record.step is MoveStep.SEAL:
            self._at_seal[at.seq, at.mark] = shard.state.cut(record.move.partitions)
        elif record.step is MoveStep.ACTIVATE:
            assert record.position is not None
            source = self._at_seal.get((record.position.seq, record.position.mark))
            if source is None:
                raise Finding(f"move {record.move.move_id} activates at {record.position}, where nothing was sealed")
            self._compare(record.move, source, shard.state)

    def _check_cut(self, shard: ModelShard, seq: int) -> None:
        session = shard.state.sessions[shard.log[seq - 1].header["client"]]
        if session.is_at_exact_cut:
            self._schedule.did["cuts"] += 1
            if session.newest_step > session.step:
                raise Finding(
                    f"shard {shard.number}: record {seq} makes a cut of step {session.step}, and has rows of step "
                    f"{session.newest_step}"
                )

    def _compare(self, move: Move, source: Rows, here: Rows) -> None:
        cut = here.cut(move.partitions)
        sides = [
            {
                k: row
                for k, row in of.rows.items()
                if row.value is not None or row.version > here.floors.get(k[0], NO_FLOOR)
            }
            for of in (cut, source)  # the destination may know of a later floor already
        ]
        if sides[0] != sides[1] or cut.claims != source.claims:
            raise Finding(
                f"move {move.move_id}: rows differ at activation: {set(sides[0].items()) ^ set(sides[1].items())}"
            )
        for table, floor in source.floors.items():
            if here.floors.get(table, NO_FLOOR) < floor:
                raise Finding(f"move {move.move_id}: the floor of {table} is lower than at the source")
        for run, epoch in source.epochs.items():
            if here.epochs.get(run, 0) < epoch:
                raise Finding(f"move {move.move_id}: run {run} is not fenced as at the source")
        for name, session in source.sessions.items():
            if name not in here.sessions or here.sessions[name].epoch < session.epoch:
                raise Finding(f"move {move.move_id}: the session of {name} is missing")
        for table, scalar in source.scalars.items():
            if here.scalars.get(table, scalar) < scalar or table not in here.scalars:
                raise Finding(f"move {move.move_id}: scalars of {table} are older than at the source")

    def check_end(self, replica: Any) -> None:
        """Every row is where it belongs, only there, and newest; every batch was applied once; the replica is equal."""
        shards = self._schedule.shards
        known = shards[0].partitions.known
        for shard in shards[1:]:
            known = known.merged(shard.partitions.known)
        for key, version in self._newest.items():
            owner = int(known.owners[partition_of(key)])
            for shard in shards:
                row = shard.state.rows.get(key)
                if shard.number != owner and row is not None:
                    raise Finding(f"shard {shard.number} still has {key} of shard {owner}: {row}")
            self._check_newest(f"shard {owner}", shards[owner].state, key, version)
            self._check_newest("the replica", replica.state, key, version)
        for shard in shards:
            self._check_log(shard)
            if shard.incoming:
                raise Finding(f"shard {shard.number} still has rows on their way in: {list(shard.incoming)}")
            try:
                owned = set(known.partitions_of(shard.number).tolist())
                shard.check_rows({row for row in ROWS if partition_of(("a", row)) in owned}, is_write=True)
            except HeadraceError as exc:
                raise Finding(f"shard {shard.number} does not serve what it owns: {exc}") from exc

    def _check_newest(self, where: str, state: Rows, key: Key, version: Version) -> None:
        row, wanted = state.rows.get(key), self._written[key][version]
        self.check_row(where, key, row)
        if row is None and wanted[0] is None:
            return  # its tombstone was dropped
        if row is None or row.version != version:
            is_lost = row is None or row.version < version
            what = "lost" if is_lost else "resurrected" if wanted[0] is None else "newer than was written"
            raise Finding(f"{where}: {key} is {what}: {row}, where {version} {wanted} was written")

    def _check_log(self, shard: ModelShard) -> None:
        uids: set[int] = set()
        for seq, entry in enumerate(shard.log, 1):
            step = step_of(entry.header)
            if step is None and (uid := entry.header.get("uid")) is not None:
                if uid in uids:
                    raise Finding(f"shard {shard.number}: record {seq} was applied twice")
                uids.add(uid)
