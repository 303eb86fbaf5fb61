"""Find what is wrong with a server, most urgent first, with advice. Every display of a server begins with this."""

from __future__ import annotations

import enum
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass

from headrace.paramserver.observe.sample import (
    ArchiveSample,
    FollowingSample,
    LogSample,
    ShardDetail,
    ShardSample,
    ShardState,
    merge_tables,
)
from headrace.paramserver.reading.dense_parts import dense_sets
from headrace.paramserver.system.text import first_of, format_seconds
from headrace.schemas.table_lacks import INCOMPLETE

__all__ = ["Problem", "Severity", "find_problems"]

# The store holds rows back for two seconds by design; several times that means that it does not keep up.
_MAX_APPLY_LAG_S = 15.0
_MAX_LOOP_PAUSE_S = 0.25
_MAX_STANDBY_LAG = 100_000
_MIN_FREE_PART = 0.1
_YOUNG_S = 60.0
_MAX_FOLLOWER_AGE_S = 30.0
_REFUSED_S = 900.0  # a refusal that is longer ago is no news


class Severity(enum.IntEnum):
    """How urgent a problem is."""

    CRITICAL = 0  # something does not work now
    WARNING = 1  # something works badly, or may soon fail
    NOTE = 2  # something that may explain other findings


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding: the facts, with names and numbers, and advice on what to do."""

    severity: Severity
    text: str
    advice: str

    def to_json(self) -> dict[str, str]:
        """Return a form for `json`."""
        return {"severity": self.severity.name.lower(), "text": self.text, "advice": self.advice}


def find_problems(states: Sequence[ShardState]) -> list[Problem]:
    """Return the problems of a server, most urgent first, from the states of all or some of its shards."""
    samples = [state.sample for state in states if state.sample is not None]
    away = _nodes_away(states)
    found = [_of_node(node, of_node) for node, of_node in away.items()]
    found += [problem for state in states if state.node not in away for problem in _of_state(state)]
    found += [problem for sample in samples for problem in _of_sample(sample)]
    found += _of_server(samples)
    return sorted(found, key=lambda problem: problem.severity)


def _nodes_away(states: Sequence[ShardState]) -> dict[str, list[ShardState]]:
    """Return the nodes of a cluster of which no shard answers, with their shards."""
    of_nodes: dict[str, list[ShardState]] = {}
    for state in states:
        if state.node is not None:
            of_nodes.setdefault(state.node, []).append(state)
    return {
        node: of_node
        for node, of_node in of_nodes.items()
        if all(state.sample is None and not state.is_stopped for state in of_node)
    }


def _of_node(node: str, states: Sequence[ShardState]) -> Problem:
    shards = f"shard{'s' * (len(states) > 1)} {', '.join(str(state.shard) for state in states)}"
    return Problem(
        Severity.CRITICAL,
        f"node {node} does not answer, with {shards}: {states[0].error or 'no reason is known'}",
        "The other nodes go on, and trainers keep the rows of these shards. Start the node, or move its shards to "
        "another (docs/cluster.md). Nothing acked is lost while its disk lives.",
    )


def _of_state(state: ShardState) -> Iterator[Problem]:
    if state.is_stopped:
        yield Problem(
            Severity.CRITICAL,
            f"shard {state.shard}: {state.error}",
            "The other shards go on, and trainers keep this one's rows. Nothing restarts it: mend what the error "
            "names, then restart the server. Nothing acked is lost.",
        )
    elif state.sample is None:
        yield Problem(
            Severity.CRITICAL,
            f"shard {state.shard} does not answer: {state.error or 'no reason is known'}",
            "Its rows cannot be read, and trainers keep theirs. The server's log says whether it has died. "
            "A shard that hangs is killed and restarted after --hang-timeout-s. Nothing acked is lost.",
        )
    elif state.num_restarts and state.sample.uptime_s < _YOUNG_S:
        since = f"{state.sample.uptime_s:.0f} s ago"
        yield Problem(
            Severity.WARNING,
            f"shard {state.shard} was restarted {since}; restarts: {state.num_restarts}",
            "The server's log says why it ended. Nothing acked is lost.",
        )


def _of_sample(sample: ShardSample) -> Iterator[Problem]:
    name = f"shard {sample.shard}"
    if sample.updates_refusal is not None:
        yield Problem(
            Severity.CRITICAL,
            sample.updates_refusal,
            "Reads go on, and trainers keep its rows. Prune snapshots, lower --log-hold-bytes, or add disk.",
        )
    if sample.expiry is not None and sample.expiry.num_failed:
        yield Problem(
            Severity.WARNING,
            f"{name}: {sample.expiry.num_failed} expiry runs ended in an error",
            "The log says why after `expiry failed`; `headrace expire --dry-run` tries it again.",
        )
    if sample.following is not None:
        yield from _of_following(name, sample.following)
    if sample.worst_loop_pause_s > _MAX_LOOP_PAUSE_S:
        yield Problem(
            Severity.WARNING,
            f"{name} paused for {sample.worst_loop_pause_s:.2f} s in the last minute",
            "Other processes use its processors or disk, or there are too few processors for the shards.",
        )
    if sample.archive is not None:
        yield from _of_archive(name, sample.archive)
    if sample.log is not None and sample.log.is_owner:
        yield from _of_log(name, sample, sample.log)
    if sample.detail is not None:
        yield from _of_detail(name, sample.detail)
    yield from _of_refusals(name, sample)


def _of_refusals(name: str, sample: ShardSample) -> Iterator[Problem]:
    counts = {"requests or connections": sample.num_refused} if sample.detail is None else sample.detail.refused
    refused = ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count)
    ago_s = sample.refused_ago_s
    if refused and (ago_s is None or ago_s <= _REFUSED_S):
        ago = "" if ago_s is None else f", the last {format_seconds(ago_s)} ago"
        yield Problem(
            Severity.NOTE, f"{name} has refused since its start: {refused}{ago}", "The server's log says whose and why."
        )


def _of_archive(name: str, archive: ArchiveSample) -> Iterator[Problem]:
    if archive.num_lost:
        yield Problem(
            Severity.WARNING,
            f"{name}: {archive.num_lost:,} records were removed before they were archived",
            "Make a snapshot: the archive cannot go beyond the gap from an earlier one. Raise --log-hold-bytes.",
        )
    if archive.is_late:
        why = f": {archive.error}" if archive.error else ""
        yield Problem(
            Severity.WARNING,
            f"{name}: the archive is {archive.behind_s:.0f} s behind{why}",
            "What is not archived is lost with the disk. Training goes on; the log is kept up to --log-hold-bytes.",
        )


def _of_log(name: str, sample: ShardSample, log: LogSample) -> Iterator[Problem]:
    if log.is_full:
        yield Problem(
            Severity.CRITICAL,
            f"{name}: its stream is full",
            "Trainers keep their rows. Make a snapshot, so that log can go, or raise --log-max-bytes.",
        )
    if log.leader is None:
        yield Problem(
            Severity.CRITICAL,
            f"{name}: no server leads its stream",
            "Trainers keep their rows, and reads wait. A majority of the log's servers must be up.",
        )
    if log.peers_away:
        yield Problem(
            Severity.WARNING,
            f"{name}: {log.peers_away} of its stream's servers {'is' if log.peers_away == 1 else 'are'} away",
            "Acks go on with the others, and stop if another one goes. See docs/replicated-log.md.",
        )
    for standby in log.standbys:
        if standby.failure is not None:
            yield Problem(
                Severity.WARNING,
                f"{name}: its standby at {standby.address} does not answer: {standby.failure}",
                "If the owner is lost now, nobody takes the shard over. Start that node.",
            )
        elif standby.applied_seq >= 0 and sample.log_seq - standby.applied_seq > _MAX_STANDBY_LAG:
            yield Problem(
                Severity.WARNING,
                f"{name}: its standby at {standby.address} is {sample.log_seq - standby.applied_seq:,} records behind",
                "It would take over only when it has them all. Its disk or processor does not keep up.",
            )


def _of_following(name: str, following: FollowingSample) -> Iterator[Problem]:
    if following.failure is not None:
        yield Problem(
            Severity.WARNING,
            f"{name}, a copy of the one at {following.source}: {following.failure}",
            "It answers with the rows that it has. Its log says since when.",
        )
    if following.behind_s > _MAX_FOLLOWER_AGE_S:
        yield Problem(
            Severity.CRITICAL,
            f"{name}: {following.behind_s:,.0f} s behind {following.source}, which it follows",
            "The source is away, or the network or this disk does not keep up.",
        )


def _of_detail(name: str, detail: ShardDetail) -> Iterator[Problem]:
    if detail.apply_lag_s > _MAX_APPLY_LAG_S:
        yield Problem(
            Severity.WARNING,
            f"{name}: the store is {detail.apply_lag_s:.0f} s behind the log",
            "The disk or the processor does not keep up. Acks will wait at --max-backlog-bytes.",
        )
    if detail.disk_free_bytes < _MIN_FREE_PART * detail.disk_bytes:
        yield Problem(
            Severity.WARNING,
            f"{name}: {100 * detail.disk_free_bytes / max(detail.disk_bytes, 1):.0f} % of its disk is free",
            "Before it is full, the shard refuses updates. Lower --log-retention-bytes, prune snapshots or add disk.",
        )
    if detail.num_holds_broken:
        yield Problem(
            Severity.WARNING,
            f"{name}: log that replicas or snapshots needed was removed {detail.num_holds_broken:,} times",
            "Those replicas start over. Raise --log-hold-bytes, or make a snapshot for them to start from.",
        )
    if detail.num_failed:
        yield Problem(
            Severity.WARNING,
            f"{name}: {detail.num_failed} requests failed because of a bug",
            "The log has the traceback; please report it.",
        )


def _of_server(samples: Sequence[ShardSample]) -> Iterator[Problem]:
    versions = sorted({sample.version for sample in samples})
    if len(versions) > 1:
        yield Problem(
            Severity.WARNING, f"the shards run different versions: {', '.join(versions)}", "Restart the server."
        )
    tables = merge_tables(samples)
    incomplete = [table for table in tables if table.lacks == INCOMPLETE]
    connected_runs = {w.run for sample in samples for w in sample.writers if w.is_connected}
    for run in sorted({table.owner for table in incomplete}):
        owned = [table for table in incomplete if table.owner == run]
        is_backfilled, has_ended = owned[0].is_backfilled, owned[0].has_owner_ended
        is_sent = run in connected_runs
        who = "backfill" if is_backfilled else "trainer"
        again = "Run the same `headrace backfill` again; or attach a trainer, which sends all rows."
        if not run or (is_backfilled and has_ended):  # a backfill had not all the rows
            again = "Attach a trainer, which sends all rows."
        elif not is_backfilled:
            again = f"Start run {run!r} again, with this model: it sends them all."
        yield Problem(
            Severity.NOTE if is_sent else Severity.WARNING,
            f"incomplete: {first_of([table.spec.fqn for table in owned])}; the {who} has not sent all rows"
            + ("" if is_sent else ", and is not connected"),
            "Replicas by step show no row of it before, others answer missing rows with zeros. "
            + ("It is complete once all rows are there." if is_sent else f"{again} Or drop it: headrace table drop."),
        )
    yield from _of_dense(samples, connected_runs)
    open_tables = [table for table in tables if table.is_backfilled and not table.has_owner_ended]
    whole = [table for table in open_tables if table.lacks != INCOMPLETE]
    if left := [table.spec.fqn for table in whole if table.owner not in connected_runs]:
        yield Problem(
            Severity.WARNING,
            f"a backfill of {first_of(left)} has not ended, and is not connected",
            "Rows may be missing. Run the same `headrace backfill` again; or attach a trainer, which takes the table.",
        )
    for run in sorted(connected_runs):
        told = [w.num_unstreamed for sample in samples for w in sample.writers if w.run == run and w.num_unstreamed]
        if told:
            are = "is" if max(told) == 1 else "are"
            yield Problem(
                Severity.WARNING,
                f"run {run}: of its tables and modules, {max(told):,} {are} trained and not streamed",
                "Served rows of these stay as they are. The trainer's print(streamer) and audit() name them "
                "(docs/taps.md).",
            )
    # A step becomes visible when every rank has ended it. Nobody waits for the ranks of a run's older epochs, nor for a
    # start that has sent nothing yet. A rank that has ended is not away.
    ranks = [w for sample in samples for w in sample.writers if w.world_size]
    for run in sorted({w.run for w in ranks}):
        epoch = max(w.epoch for w in ranks if w.run == run)
        newest = [w for w in ranks if (w.run, w.epoch) == (run, epoch)]
        connected = {w.client for w in newest if w.is_connected}
        clients, here = {w.client for w in newest}, connected | {w.client for w in newest if w.has_ended}
        away = sorted(clients - here)
        num_ranks = max(len(clients), *(w.world_size or 0 for w in newest))
        if connected and (num_away := num_ranks - len(here)):
            among = f", among them {away[0]}" if away else ": they have not come yet"
            yield Problem(
                Severity.WARNING,
                f"run {run}: {num_away} of {num_ranks} trainers are away{among}",
                "Replicas with consistency `step` wait for them once one has sent something; until then they keep the "
                "step of the start before."
                if all(w.step < 0 for w in newest)
                else "Replicas with consistency `step` wait for them.",
            )


def _of_dense(samples: Sequence[ShardSample], connected_runs: Container[str]) -> Iterator[Problem]:
    """Name dense parts of which tensors are registered and were never sent, where no trainer is there to send them."""
    tables = [table for sample in samples for table in sample.tables if table.spec.is_dense]
    if not samples or len({sample.shard for sample in samples}) < samples[0].num_shards:
        return
    sent = {table.spec.fqn for table in tables if table.num_rows_estimate}
    owners = {table.spec.fqn: table.owner for table in tables}
    for model, specs in sorted(dense_sets((table.spec, table.owner_epoch) for table in tables).items()):
        missing = sorted(name for name in specs if name not in sent and owners[name] not in connected_runs)
        if missing:
            yield Problem(
                Severity.WARNING,
                f"dense part of {model}: {len(missing)} of {len(specs)} tensors have no values: {first_of(missing)}",
                f"Replicas serve it once it is whole. Start run {owners[missing[0]]!r} again, with this model: it "
                "sends them all. Or drop them: headrace table drop.",
            )
