"""Audits tell apart why rows are not in the store, and call no table equal that has lost some."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from command_line import CommandLine
from torch import nn

from headrace.paramserver.shard.launch import ServerProcess
from headrace.schemas.row_records import MISSING
from headrace.streamer import RawEmbeddingStreamer
from headrace.streamer.absent_rows import AbsentRows, StoredTable, count_absent, stored_tables
from headrace.streamer.audit import AuditReport, TableAudit


class _Reader:
    """A store without rows."""

    async def get(self, fqn: str, row_ids: Any) -> Any:
        return SimpleNamespace(row_ids=row_ids, presence=np.full(row_ids.size, MISSING))

    async def status(self) -> list[Any]:
        def table(fqn: str, filling: Any, deletes: bool | None) -> Any:
            return SimpleNamespace(spec=SimpleNamespace(fqn=fqn), filling=filling, has_deletes=deletes)

        some, none = SimpleNamespace(updated_only=None, from_row=None), None
        only = SimpleNamespace(updated_only=True, from_row=8)
        shards = [[table("a", some, None), table("b", only, None)], [table("a", only, True), table("b", none, None)]]
        return [SimpleNamespace(tables=tables) for tables in shards]


def _table() -> Any:
    evicted = SimpleNamespace(contains=lambda row_ids: row_ids == 7)
    return SimpleNamespace(spec=SimpleNamespace(fqn="a"), index=None, row_offset=0, deleted=evicted)


@pytest.mark.parametrize(
    ("stored", "updated_only", "absent", "text"),
    [
        (StoredTable(), (), AbsentRows(num_deleted=1, num_lost=9), "1 evicted, 9 should be there"),
        (
            StoredTable(has_deletes=True),
            (),
            AbsentRows(num_deleted=1, num_maybe_deleted=9),
            "9 may have expired: nothing can tell",
        ),
        (StoredTable(), ("a",), AbsentRows(num_not_sent=10), "10 never sent, as publish='updated' says"),
        (
            StoredTable(lacks="updated rows only", lacks_from=8),
            ("a",),
            AbsentRows(num_deleted=1, num_not_sent=2, num_lost=7),
            "7 should be there",
        ),
    ],
)
async def test_each_absent_row_is_counted_once(
    stored: StoredTable, updated_only: tuple[str, ...], absent: AbsentRows, text: str
) -> None:
    """By the trainer's evictions and the user's word; where rows have expired, none is called lost."""
    reader: Any = _Reader()
    found = await count_absent(_table(), np.arange(10), reader, stored, updated_only=updated_only)
    assert found == absent
    assert text in str(found)


async def test_what_one_shard_says_of_a_table_is_true_of_it() -> None:
    """The worst of it counts."""
    reader: Any = _Reader()
    assert await stored_tables(reader) == {
        "a": StoredTable(lacks="incomplete", has_deletes=True),
        "b": StoredTable(lacks="updated rows only", lacks_from=8),
    }


def _report(absent: AbsentRows, **arguments: bool) -> AuditReport:
    part: dict[str, int] = dict(rank=0, row_offset=0, num_local_rows=10, column_offset=0, num_columns=4, num_rows=9)
    table = TableAudit(fqn="a", absent=absent, **part)
    return AuditReport(tables=(table,), step=1, **{"only_present": False, **arguments})


def test_no_audit_is_equal_while_a_row_may_be_lost() -> None:
    """A row that should be there counts, and one that may have expired; the user may say that it is all the same."""
    absent = AbsentRows(num_maybe_deleted=1)
    assert not _report(absent).is_equal
    assert _report(absent, only_present=True).is_equal
    assert "1 not in the store (1 may have expired: nothing can tell)" in str(_report(absent))
    assert _report(AbsentRows(num_deleted=1)).is_equal
    assert not _report(AbsentRows(num_lost=1)).is_equal


def _attach(address: str, model: nn.Module, **arguments: Any) -> tuple[RawEmbeddingStreamer, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    streamer = RawEmbeddingStreamer(address, run="ctr", model="ctr")
    streamer.attach(model, optimizer, **arguments)
    return streamer, optimizer


def test_rows_that_should_be_there_make_an_audit_unequal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not those that this start of the run has evicted, nor those of `publish="updated"`."""
    run = CommandLine(capsys)
    torch.manual_seed(1)
    model = nn.Embedding(50, 4)
    with ServerProcess.start(tmp_path / "data", shards=2) as server:
        streamer, _ = _attach(server.address, model)
        with streamer:
            streamer.flush()
            streamer.evict("weight", [3, 4])
            assert streamer.audit().is_equal
        streamer, _ = _attach(server.address, model)
        with streamer:
            streamer.evict("weight", [5])
            report = streamer.audit()
            assert not report.is_equal and not report.only_present
            assert report.tables[0].absent == AbsentRows(num_deleted=1, num_maybe_deleted=2)
            assert "3 not in the store (1 evicted, 2 may have expired: nothing can tell)" in str(report)
        run("table", "grow", "weight", 60, "--server", server.address)
        larger = nn.Embedding(60, 4)
        with torch.no_grad():
            larger.weight[:50] = model.weight
        for publish, is_equal in (("auto", False), ("updated", True), ("all", True)):
            streamer, _ = _attach(server.address, larger, publish=publish)
            with streamer:
                report = streamer.audit()
                assert report.is_equal is is_equal, publish
                assert ("may have expired" in str(report)) is not is_equal
                assert streamer.audit(only_present=True).is_equal
                assert report.tables[0].num_missing == (0 if publish == "all" else 13), "`all` sends evicted rows too"
