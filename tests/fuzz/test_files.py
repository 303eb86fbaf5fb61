"""Files of every format that Headrace reads, cut and altered: a `HeadraceError` of one line, soon, or what is there.

The long run: `HEADRACE_FUZZ_FILES=20000 python -m pytest -s tests/fuzz/test_files.py`.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import json
import os
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from crc32c import crc32c
from offline_snapshot import snapshot_of
from peak_memory import peak_memory
from row_batches import SPEC as ROWS_SPEC
from row_batches import make_batch, parts_of
from safetensors.numpy import save_file

from headrace.paramserver.log.claims import Claim
from headrace.paramserver.snapshots.contents import SnapshotReader
from headrace.paramserver.snapshots.directory import SnapshotFiles, verify_snapshot
from headrace.paramserver.store.coalescing import coalesce
from headrace.paramserver.store.sst.format import TRAILER_BYTES, mask_crc
from headrace.paramserver.store.sst.table_reader import BlockCheck, TableFileReader
from headrace.paramserver.store.sst.table_writer import TableFileWriter
from headrace.schemas.errors import HeadraceError
from headrace.schemas.row_records import RecordLayout, key_prefix
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotFile, SnapshotManifest
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec
from headrace.scripts.commands.backfill import build_directory
from headrace.scripts.table_io.source import BackfillConfig

NUM_FILES = int(os.environ.get("HEADRACE_FUZZ_FILES", "150"))
SEED = int(os.environ.get("HEADRACE_FUZZ_SEED", "1"))
TABLE = "items.weight"
_MAX_BYTES = 600 << 20
_MAX_S = 10.0
_VALUES = np.arange(64, dtype=np.float32).reshape(16, 4)
_ODD: tuple[Any, ...] = (None, "", "7", -1, 0, 0.5, 1e300, 2**31, 2**63, 2**64, 10**400, [], {}, [[]], True, "a\nb")


def _alter(data: bytes, chance: random.Random) -> bytes:
    """Return bytes that are cut, or differ in some places."""
    kind = chance.randrange(6)
    altered = bytearray(data)
    if kind == 0:
        del altered[chance.randrange(len(data)) :]
    elif kind == 1:  # a number, of any length
        at, width = chance.randrange(len(data)), chance.choice([1, 2, 4, 8])
        number = chance.choice([0, 1, 2**7, 2**15 - 1, 2**31 - 1, 2**32 - 1, 2**63 - 1, 2**64 - 1])
        altered[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, chance.choice(["little", "big"]))
    elif kind == 2:  # a piece elsewhere
        start, at = chance.randrange(len(data)), chance.randrange(len(data))
        altered[at:at] = data[start : start + chance.randrange(1, 80)]
    elif kind == 3:  # a piece less
        start = chance.randrange(len(data))
        del altered[start : start + chance.randrange(1, 80)]
    else:
        for _ in range(chance.randint(1, 4)):
            altered[chance.randrange(len(data))] = chance.randrange(256)
    return bytes(altered)


@contextlib.contextmanager
def _checked(what: str) -> Iterator[None]:
    """Let an error of ours pass if it is one line, and no other; within time and memory."""
    began_s = time.process_time()
    with peak_memory() as peak:
        try:
            yield
        except HeadraceError as exc:
            assert "\n" not in str(exc) and len(str(exc)) < 2000, f"{what}: {exc}"
        except Exception as exc:
            raise AssertionError(f"{what}: {type(exc).__name__}: {exc}") from exc
    assert time.process_time() - began_s < _MAX_S, what
    assert peak.grown_bytes < _MAX_BYTES, what


def _parquet(folder: Path) -> tuple[Path, Path]:
    weights = pa.FixedSizeListArray.from_arrays(pa.array(_VALUES.ravel()), 4)
    pq.write_table(pa.table({"row_id": pa.array(range(16), pa.int64()), "weights": weights}), folder / "t.parquet")
    return folder / "t.parquet", folder / "t.parquet"


def _state_dict(folder: Path) -> tuple[Path, Path]:
    torch.save({TABLE: torch.from_numpy(_VALUES), "optimizer": {"state": {"m": torch.ones(16)}}}, folder / "t.pt")
    return folder / "t.pt", folder / "t.pt"


def _safetensors(folder: Path) -> tuple[Path, Path]:
    note = {"spec": [TABLE, 16, 4, 1, [], False], "first_row": 0, "precision": None, "weights": TABLE}
    notes = json.dumps({"version": 1, "tables": [note | {"states": {}, "identities": None}]})
    save_file({TABLE: _VALUES}, folder / "t.safetensors", metadata={"headrace": notes})
    return folder / "t.safetensors", folder / "t.safetensors"


def _metadata(folder: Path) -> tuple[Path, Path]:
    dcp.save({TABLE: torch.from_numpy(_VALUES)}, checkpoint_id=str(folder / "c"), no_dist=True)
    return folder / "c", folder / "c" / ".metadata"


def _part(folder: Path) -> tuple[Path, Path]:
    return _metadata(folder)[0], folder / "c" / "__0_0.distcp"


@pytest.mark.parametrize("make", [_parquet, _state_dict, _safetensors, _metadata, _part])
def test_sources_of_a_backfill(make: Callable[[Path], tuple[Path, Path]], tmp_path: Path) -> None:
    """Whatever bytes a source has, opening it and reading its rows ends soon, with rows or one line."""
    path, file = make(tmp_path)
    good, chance = file.read_bytes(), random.Random(SEED)
    config = BackfillConfig(tables=None if make in (_parquet, _safetensors) else (TABLE,), zero_states=True)
    for number in range(NUM_FILES):
        file.write_bytes(_alter(good, chance) if number else good)
        with _checked(f"seed {SEED}, file {number}"):
            for table in config.open(path, None).tables:
                table.check_ids()
                for _ in table.chunks(1 << 20):
                    pass
                assert number or table.num_rows == 16


def _rows_file(path: Path) -> list[tuple[int, int]]:
    """Write a file of a store, and return the offset and the size of each of its blocks."""
    runs = [coalesce(1, parts_of(make_batch(1, range(600)))).copied()]
    TableFileWriter(block_bytes=1024, bloom_bits_per_key=10).write(path, runs)
    reader = TableFileReader.open(path)
    assert reader is not None
    with reader:
        return [(int(at), int(size)) for at, size in zip(*reader.blocks(), strict=True)]


@pytest.mark.parametrize("is_sealed", [False, True], ids=["wrong checksums", "right checksums"])
def test_files_of_a_store(tmp_path: Path, is_sealed: bool) -> None:
    """Whatever bytes a file of rows has, also with right checksums, a check and a read of all rows end soon."""
    path, chance = tmp_path / "rows.sst", random.Random(SEED)
    blocks, good = _rows_file(path), path.read_bytes()
    layout = RecordLayout(ROWS_SPEC, ROWS_SPEC.whole)
    for number in range(4 * NUM_FILES):
        data = bytearray(good)
        if is_sealed:
            at, size = chance.choice(blocks[-4:] if number % 2 else blocks)
            block = _alter(good[at : at + size], chance)[:size].ljust(size, b"\0") + b"\0"
            sealed = int(mask_crc(np.array([crc32c(block)], np.uint32))[0])
            data[at : at + size + TRAILER_BYTES] = block + sealed.to_bytes(4, "little")
        path.write_bytes(data if is_sealed else _alter(good, chance))
        with _checked(f"seed {SEED}, file {number}"):
            check, whole = BlockCheck.open(path), path.read_bytes()
            check.take(memoryview(whole))
            check.finish()
        with _checked(f"seed {SEED}, file {number}"), contextlib.ExitStack() as stack:
            if (reader := TableFileReader.open(path)) is None:
                continue
            stack.enter_context(reader)
            reader.count_by_prefix(8)
            sizes = {"record_bytes": layout.dtype.itemsize, "header_bytes": layout.header_dtype.itemsize}
            for _ in reader.read(key_prefix(1, ROWS_SPEC.whole), first_row=0, last_row=2**63 - 1, **sizes):
                pass


def test_folders_of_snapshots(tmp_path: Path) -> None:
    """Whatever bytes a snapshot's files have, a check finds the damage, and what reads its rows ends soon."""
    save_file({TABLE: _VALUES, f"{TABLE}/m": _VALUES[:, 0].copy()}, tmp_path / "t.safetensors")
    source = BackfillConfig(tables=(TABLE,)).open(tmp_path / "t.safetensors", None)
    build_directory(source, tmp_path / "data", num_shards=1)
    folder, chance = snapshot_of(tmp_path / "data", tmp_path / "snapshots"), random.Random(SEED)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    for number in range(NUM_FILES):
        path = files[number % len(files)]
        good = path.read_bytes()
        # Of the same length: all readers check that first.
        bad = _alter(good, chance)[: len(good)].ljust(len(good), b"\0")
        path.unlink()  # it may be the same file as the store's
        path.write_bytes(bad)
        what = f"seed {SEED}, file {number}: {path.name}"
        with _checked(what):
            verify_snapshot(folder)
            assert bad == good, what
        with _checked(what), SnapshotReader(folder) as reader:
            for fqn in reader.tables:
                reader.scalars(fqn)
                for _ in reader.rows(fqn):
                    pass
        path.write_bytes(good)


SPEC = TableSpec(
    fqn=TABLE,
    num_rows=16,
    dim=4,
    dtype=DType.FLOAT32,
    states=(StateSpec(name="m", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),),
)
MANIFEST = SnapshotManifest(
    name="one",
    created_us=5,
    lease_s=60,
    parts=tuple(
        ShardPart(
            shard=shard,
            server_id="a",
            seq=3,
            epoch=1,
            step=2,
            tables=(SPEC, TableSpec.of_tensor("bias", [2, 3], DType.FLOAT32)),
            files=(SnapshotFile(name="CURRENT", size_bytes=4, crc32c=9),),
            mark=7,
            term=1,
        )
        for shard in range(2)
    ),
)


def _places(values: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each container of JSON values, with each key or index."""
    items = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    for key, value in list(items):
        yield values, key
        yield from _places(value)


def test_manifests_of_snapshots(tmp_path: Path) -> None:
    """Text, null or any other value in any place of a manifest, with a right checksum, is damage or does no harm."""
    values = json.loads(MANIFEST.encode())
    del values["crc32c"]
    files = SnapshotFiles(tmp_path)
    (tmp_path / "one").mkdir()
    for number in range(len(list(_places(values)))):
        for odd in _ODD:
            altered = copy.deepcopy(values)
            container, key = list(_places(altered))[number]
            container[key] = odd
            text = json.dumps(altered, indent=2, sort_keys=True).encode() + b"\n"
            altered["crc32c"] = crc32c(text)
            (tmp_path / "one" / "manifest.json").write_bytes(json.dumps(altered).encode())
            with _checked(f"{key} {odd!r}"):
                manifest = files.manifest_of("one")
                assert manifest.size_bytes >= 0 and manifest.tables
                assert SnapshotManifest.decode(manifest.encode()) == manifest
                files.list()
                files.prune_abandoned()


def test_claims() -> None:
    """Any value in any field of a claim, such as an object store may have, is damage or a claim that can be shown."""
    claim = Claim(server_id="a", shard=0, term=2, nonce="n", owner="h", claimed_us=5, seq=7, mark=None)
    values = json.loads(claim.encode())
    for key in values:
        for odd in (*_ODD, 2**62):
            with _checked(f"{key} {odd!r}"):
                found = Claim.decode(json.dumps(values | {key: odd}).encode(), "claims/1")
                numbers = [each for each in dataclasses.astuple(found) if type(each) is int]
                assert all(-(2**63) <= each < 2**63 for each in numbers)
                assert str(found) and Claim.decode(found.encode(), "claims/1") == found
