"""What the log of a move's destination has of a copy without rows."""

from __future__ import annotations

from headrace.paramserver.store.copy_chunks import encode_runs
from headrace.schemas.move_records import LoadRecord

__all__ = ["LOAD_NOTHING", "NOTHING"]

LOAD_NOTHING = LoadRecord(move_id="a", number=1, is_last=True)
NOTHING = memoryview(encode_runs(()))
