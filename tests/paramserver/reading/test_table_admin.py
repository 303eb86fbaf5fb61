"""What an administrator is told of tables, by shards that are not there."""

from __future__ import annotations

from typing import Any

from headrace.paramserver.reading.link import Dial
from headrace.paramserver.reading.table_admin import TableAdmin
from headrace.schemas.idl import idl, spec_to_idl
from headrace.schemas.tables import DType, TableSpec

DIAL = Dial(ssl_context=None, server_hostname=None, token=None, timeout_s=1.0, role=idl.Role.ADMIN)


class Link:
    """A shard that estimates some rows of each table."""

    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    async def status(self) -> Any:
        specs = [TableSpec(fqn=name, num_rows=n, dim=4, dtype=DType.FLOAT32) for name, n in (("t", 1229), ("v", 0))]
        tables = [idl.TableStatus(spec=spec_to_idl(spec), num_rows_estimate=self._num_rows) for spec in specs]
        return idl.StatusReply(tables=tables, clients=[])


async def test_no_more_rows_are_stored_than_a_table_has() -> None:
    """A row that was written again counts twice until files are merged; ids without a bound have no limit."""
    links: Any = [Link(1000), Link(961)]
    tables = await TableAdmin(DIAL, links).tables()
    assert {table.spec.fqn: table.num_rows_estimate for table in tables} == {"t": 1229, "v": 1961}
