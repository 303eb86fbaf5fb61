"""Metrics of a replica."""

from __future__ import annotations

import asyncio
import dataclasses
from pathlib import Path

import pytest
from fake_replica import FakeReplica
from identity_writer import IdentityWriter, identity_spec
from prometheus_client.parser import text_string_to_metric_families
from shard_servers import serve_shards

from headrace.paramserver.replica import EmbeddingReplica
from headrace.paramserver.replica.copy.live import LiveCopy
from headrace.paramserver.replica.endpoint.metrics import replica_metrics
from headrace.paramserver.replica.tables.in_memory import MemoryTable
from headrace.schemas.errors import GoneError, StorageError, UnknownTableError


def _values(replica: FakeReplica | EmbeddingReplica) -> dict[tuple[str, str], float]:
    page = replica_metrics(replica).decode()  # type: ignore[arg-type]
    return {
        (
            sample.name.removeprefix("headrace_replica_"),
            "/".join(sample.labels[name] for name in sorted(sample.labels, reverse=True)),
        ): sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
    }


def test_values() -> None:
    """Freshness is reported by shard, rows and hot rows by table."""
    values = _values(FakeReplica())
    assert (values["epoch", ""], values["step", ""], values["up_to_date", ""]) == (4, 17, 1)
    assert (values["lag_seconds", "0"], values["lag_steps", "0"], values["behind", "0"]) == (0.5, 2, 1)
    assert (values["delay_seconds_count", "0"], values["table_rows", "user.weight"]) == (3, 12)
    assert [values["delay_seconds_bucket", f"0/{bound}"] for bound in ("0.0128", "0.0256", "+Inf")] == [0, 3, 3]
    assert (values["hot_rows_hits_total", "user.weight"], values["hot_rows_misses_total", "user.weight"]) == (7, 3)
    assert values["missing_total", "user.weight"] == 5


def test_idle_shard_is_not_stale() -> None:
    """A replica with everything has no lag; one that cannot follow is not up to date."""
    replica = FakeReplica()
    replica.shards = [dataclasses.replace(replica.shards[0], is_behind=False, lag_s=0.0, lag_steps=0)]
    replica.failure = GoneError("the log is gone")
    values = _values(replica)
    assert (values["lag_seconds", "0"], values["behind", "0"], values["up_to_date", ""]) == (0, 0, 0)


async def test_a_replica_that_answers_nothing_has_its_figures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Metrics work while a copy's disk has failed or a shard hangs."""
    async with serve_shards(tmp_path, 1) as ports:
        writer = await IdentityWriter.connect(ports)
        await writer.write({1: 10, 2: 20})
        await writer.close()
        replica = await asyncio.to_thread(lambda: EmbeddingReplica(f"127.0.0.1:{ports[0]}", fetch_wait_s=0.1))
        try:
            fqn = identity_spec().fqn
            values = _values(replica)
            assert (values["up_to_date", ""], values["table_rows", fqn]) == (1, 2)
            monkeypatch.setattr(LiveCopy, "silence", "the shard has not answered for 40 s")
            assert str(replica.failure) == "the shard has not answered for 40 s"
            table_set = replica._copies.current
            assert table_set is not None

            def fail(_: object) -> int:
                table_set.failure = StorageError("no space left on device")
                return 2

            with monkeypatch.context() as amid_the_page:
                amid_the_page.setattr(MemoryTable, "num_present", property(fail))
                assert _values(replica)["table_rows", fqn] == 0
            values = _values(replica)
            assert (values["up_to_date", ""], values["table_rows", fqn]) == (0, 0)
            with pytest.raises(UnknownTableError):
                replica.num_rows("no.such")
        finally:
            await asyncio.to_thread(replica.close)
