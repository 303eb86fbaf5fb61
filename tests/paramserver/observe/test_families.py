"""The metrics of a server."""

from __future__ import annotations

import dataclasses
from itertools import permutations

import pytest
from metric_samples import TABLE, WRITER, state
from prometheus_client.parser import text_string_to_metric_families

from headrace.paramserver.observe.families import server_families
from headrace.paramserver.observe.monitor import expose
from headrace.paramserver.observe.sample import ShardState, WriterSample, merge_writers


def _values(*states: ShardState) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    text = expose(list(server_families(states))).body.decode()
    return {
        (sample.name.removeprefix("headrace_"), tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_values() -> None:
    """Gauges, counters and histograms have the sample's values under the shard's label."""
    values = _values(state(num_restarts=2))
    shard = (("shard", "0"),)
    assert values["log_seq", shard] == 9
    assert values["apply_lag_seconds", shard] == 0.25
    assert values["shard_restarts_total", shard] == 2
    assert values["block_cache_hits_total", shard] == 9
    assert values["table_rows", (("shard", "0"), ("table", "user.weight"))] == 70
    assert [labels for name, labels in values if name == "table_rows"] == [(("shard", "0"), ("table", "user.weight"))]
    assert {labels: size for (name, labels), size in values.items() if name == "dense_bytes"} == {
        (("model", "ctr"),): (64 + 4) * 4
    }
    buckets = [values["log_fsync_seconds_bucket", (("le", le), ("shard", "0"))] for le in ("0.5", "1", "+Inf")]
    assert buckets == [3, 3, 5]
    assert values["log_fsync_seconds_sum", shard] == 4.5
    assert values["snapshot_step", ()] == 30


def test_writer_is_as_all_shards_see_it() -> None:
    """A writer's step is the lowest of all shards; one that is connected nowhere has no step."""
    away = WriterSample(run="old", client="rank0", epoch=1, step=99, is_connected=False)
    slower = WriterSample(run=WRITER.run, client=WRITER.client, epoch=2, step=38, is_connected=False)
    values = _values(state(writers=(WRITER, away)), state(shard=1, writers=(slower, away)))
    assert values["writer_step", (("client", "rank0"), ("run", "ctr"))] == 38
    assert values["writer_connected", (("client", "rank0"), ("run", "ctr"))] == 1
    assert values["writer_connected", (("client", "rank0"), ("run", "old"))] == 0
    assert ("writer_step", (("client", "rank0"), ("run", "old"))) not in values


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (((40, None), (40, 2.5)), (40, 2.5, False)),  # a shard that has just started knows none
        (((38, 9.0), (41, 2.5), (39, 7.0)), (38, 2.5, False)),
        (((38, 2.5), (41, 9.0), (39, 7.0)), (38, 9.0, True)),
    ],
)
def test_a_writers_cost_is_as_of_its_newest_step(
    seen: tuple[tuple[int, float | None], ...], expected: tuple[int, float, bool]
) -> None:
    """A shard that is behind has an older figure, whichever place it has; the step is still the lowest."""
    known = [
        dataclasses.replace(WRITER, step=step, cost_percent=cost, is_cost_bound=None if cost is None else cost > 3)
        for step, cost in seen
    ]
    for writers in permutations(known):
        samples = [state(shard=shard, writers=(writer,)).sample for shard, writer in enumerate(writers)]
        (found,) = merge_writers(sample for sample in samples if sample is not None)
        assert (found.step, found.cost_percent, found.is_cost_bound) == expected


def test_live_writers_come_first_and_failed_attaches_not_at_all() -> None:
    """Whoever is away, never ended a step and owns no table, on no shard, is no writer: its `attach` has failed."""

    def writer(run: str, epoch: int, step: int, *, is_connected: bool = False) -> WriterSample:
        return WriterSample(run=run, client="rank0", epoch=epoch, step=step, is_connected=is_connected)

    live, begun = writer("live", 3, 40, is_connected=True), writer("begun", 5, -1, is_connected=True)
    attached, table = writer("attached", 2, -1), dataclasses.replace(TABLE, owner="attached", owner_epoch=2)
    away, older, failed = writer("away", 4, 7), writer("older", 1, 7), writer("failed", 6, -1)
    slow = writer("away", 4, -1)  # another shard has none of its steps yet
    of_shards = ((older, failed, away, live, attached), (slow, failed, begun))
    samples = [state(writers=writers, tables=(table,)).sample for writers in of_shards]
    found = merge_writers(sample for sample in samples if sample is not None)
    assert [each.run for each in found] == ["begun", "live", "away", "attached", "older"]


def test_names_of_users_are_escaped() -> None:
    """Any table name survives the exposition format; control characters of a run or client are written out."""
    name = 'a"b\\cd{}=,ü'
    table = dataclasses.replace(TABLE, spec=dataclasses.replace(TABLE.spec, fqn=name))
    writer = dataclasses.replace(WRITER, run=f"{name}\n", client="rank\x1b[2J\x7f\x9b0")
    values = _values(state(tables=(table,), writers=(writer,)))
    assert values["table_rows", (("shard", "0"), ("table", name))] == 70
    assert values["writer_step", (("client", r"rank\x1b[2J\x7f\x9b0"), ("run", rf"{name}\n"))] == 40


def test_shards_without_an_answer() -> None:
    """A shard that does not answer is down and has no other figures, also where none answers."""
    down = ShardState(shard=1, address="127.0.0.1:7602", error="gone")
    names = ("shard_up", "shard_stopped", "shard_restarts_total")
    expected = {(name, (("shard", "1"),)): 0 for name in names}
    assert _values(down) == expected
    values = _values(state(), down)
    assert {key: value for key, value in values.items() if ("shard", "1") in key[1]} == expected
    assert values["shard_up", (("shard", "0"),)] == 1
    stopped = dataclasses.replace(down, error="its disk is full", is_stopped=True)
    assert _values(stopped)["shard_stopped", (("shard", "1"),)] == 1
