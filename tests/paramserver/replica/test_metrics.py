"""A replica's figures."""

from __future__ import annotations

import dataclasses

from fake_replica import FakeReplica
from prometheus_client.parser import text_string_to_metric_families

from headrace.paramserver.replica.metrics import replica_metrics
from headrace.schemas.errors import GoneError


def _values(replica: FakeReplica) -> dict[tuple[str, str], float]:
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
    """Freshness is told by shard, rows and hot rows by table."""
    values = _values(FakeReplica())
    assert (values["epoch", ""], values["step", ""], values["up_to_date", ""]) == (4, 17, 1)
    assert (values["lag_seconds", "0"], values["lag_steps", "0"], values["behind", "0"]) == (0.5, 2, 1)
    assert (values["delay_seconds_count", "0"], values["table_rows", "user.weight"]) == (3, 12)
    assert [values["delay_seconds_bucket", f"0/{bound}"] for bound in ("0.0128", "0.0256", "+Inf")] == [0, 3, 3]
    assert (values["hot_rows_hits_total", "user.weight"], values["hot_rows_misses_total", "user.weight"]) == (7, 3)
    assert values["missing_total", "user.weight"] == 5


def test_idle_shard_is_not_stale() -> None:
    """A replica that has all there is lags by nothing; one that cannot follow is not up to date."""
    replica = FakeReplica()
    replica.shards = [dataclasses.replace(replica.shards[0], is_behind=False, lag_s=0.0, lag_steps=0)]
    replica.failure = GoneError("the log is gone")
    values = _values(replica)
    assert (values["lag_seconds", "0"], values["behind", "0"], values["up_to_date", ""]) == (0, 0, 0)
