"""Logs opened by their directory: to append to, and to read."""

from __future__ import annotations

from pathlib import Path

import pytest
from log_files import SMALL, fill

from headrace.paramserver.log.opening import open_log, open_source
from headrace.schemas.errors import GoneError


async def test_source_reads_ranges_of_what_was_appended(tmp_path: Path) -> None:
    """A source has the records and nonces of a log that is still open, in any range, and not what was trimmed."""
    log = open_log(tmp_path / "log", config=SMALL)
    try:
        assert (open_source(tmp_path / "log").log_id, open_source(tmp_path / "log").last_seq) == ("", 0)
        await fill(log, 100, one_by_one=True)
        first = log.trim(50)
        source = open_source(tmp_path / "log")
        assert (source.first_seq, source.last_seq, len(bytes.fromhex(source.log_id))) == (first, 100, 16)
        assert [record.seq for record in source.read(60, 70)] == list(range(60, 71))
        assert [record.seq for record in source.read(99)] == [99, 100]
        assert list(source.read(60, 59)) == []
        here = [log.nonce_of(seq) for seq in range(first, 101)]
        assert list(dict.fromkeys(here)) == source.nonces(first, 100)
        assert source.nonces(100, 100) == source.nonces(first, 100)[-1:]
        with pytest.raises(GoneError, match=str(first)):
            source.read(first - 1)
    finally:
        await log.close()
