"""A store whose process is killed while it writes opens and has all that it claimed."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.paramserver.store.coalescing import SortedRun
from headrace.paramserver.store.rocksdb import StoreConfig
from headrace.paramserver.store.rows import RowStore
from headrace.schemas.row_records import RecordLayout, encode_keys
from headrace.schemas.tables import DType, TableSpec

NUM_ROWS = 3000
SPEC = TableSpec(fqn="killed.weight", num_rows=0, dim=32, dtype=DType.FLOAT32, states=())
LAYOUT = RecordLayout(SPEC, SPEC.whole)


def write_for_ever(path: Path, file_bytes: int) -> None:
    """Write all rows again and again, and print what should be there after each time."""
    store = RowStore.open(path, config=StoreConfig(block_cache_bytes=8 << 20, file_bytes=file_bytes))
    for seq in range(store.applied_seq + 1, store.applied_seq + 10_000):
        records = np.zeros(NUM_ROWS, LAYOUT.dtype)
        LAYOUT.set_header(records, slice(None), epoch=1, step=seq, time_us=seq)
        records["weights"] = np.full(128, seq % 251, np.uint8).tobytes()
        store.write_runs([SortedRun(1, LAYOUT, np.arange(NUM_ROWS), records, None)], meta={}, applied_seq=seq)
        if seq % 3 == 0:
            store.flush()
        print(seq, store.durable_seq, flush=True)


@pytest.mark.parametrize("file_bytes", [0, 1 << 40])
def test_kills_at_any_moment(tmp_path: Path, file_bytes: int) -> None:
    """After a kill, no row is older than the store's position, and none is half written."""
    dice = random.Random(file_bytes)
    for _ in range(5):
        command = [sys.executable, __file__, str(tmp_path / "db"), str(file_bytes)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdout is not None
            durable_seq = 0
            for _ in range(dice.randint(2, 12)):
                durable_seq = int(child.stdout.readline().split()[1])
            # From here on it is somewhere in the next writes.
            child.kill()
        store = RowStore.open(tmp_path / "db", config=StoreConfig(block_cache_bytes=8 << 20))
        try:
            assert store.applied_seq >= durable_seq
            records, presence = LAYOUT.decode(store.get(encode_keys(1, SPEC.whole, np.arange(NUM_ROWS))))
            assert (presence == 1).all() or store.applied_seq == 0
            assert (records["step"] >= store.applied_seq).all()
            weights = np.frombuffer(records["weights"].tobytes(), np.uint8).reshape(NUM_ROWS, 128)
            assert (weights == (records["step"] % 251)[:, None]).all()
            assert not (tmp_path / "db" / "incoming-rows").exists()
        finally:
            store.close()


if __name__ == "__main__":
    write_for_ever(Path(sys.argv[1]), int(sys.argv[2]))
