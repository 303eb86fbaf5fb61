"""Snapshot manifests: golden bytes, round trip, refusals."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import pytest
from crc32c import crc32c

from headrace.schemas.errors import CorruptionError, RequestError
from headrace.schemas.snapshot_manifest import ShardPart, SnapshotFile, SnapshotManifest, check_snapshot_name
from headrace.schemas.tables import DType, StateKind, StateSpec, TableSpec

SPEC = TableSpec(
    fqn="t.weight",
    num_rows=10,
    dim=2,
    dtype=DType.FLOAT32,
    states=(StateSpec(name="sum", kind=StateKind.ROWWISE, dtype=DType.FLOAT32, width=1),),
)


def part(shard: int, *, step: int = 7, seq: int = 5, server_id: str = "s") -> ShardPart:
    files = (SnapshotFile(name="CURRENT", size_bytes=16, crc32c=1),)
    return ShardPart(shard=shard, server_id=server_id, seq=seq, epoch=3, step=step, tables=(SPEC,), files=files)


def manifest() -> SnapshotManifest:
    return SnapshotManifest(name="one", created_us=1, parts=(part(0), part(1, seq=9)))


def test_round_trip() -> None:
    """What is encoded is decoded, with every spec and file."""
    decoded = SnapshotManifest.decode(manifest().encode())
    assert decoded == manifest()
    # The bytes of a manifest never change.
    assert json.loads(manifest().encode())["crc32c"] == 3366028174
    assert decoded.tables == {"t.weight": SPEC} and list(decoded.files()) == [
        "shard-0000/CURRENT",
        "shard-0001/CURRENT",
    ]
    assert (decoded.server_id, decoded.epoch, decoded.step, decoded.size_bytes) == ("s", 3, 7, 32)


@pytest.mark.parametrize("lease_s", [-1, "60", 0.5, None])
def test_a_lease_is_a_number_of_seconds(lease_s: object) -> None:
    """A manifest keeps for how long its snapshot outlives its last reader; anything else is none."""
    leased = dataclasses.replace(manifest(), lease_s=60)
    assert SnapshotManifest.decode(leased.encode()) == leased
    wrong = dataclasses.replace(manifest(), lease_s=lease_s or "none")  # type: ignore[arg-type]
    with pytest.raises(CorruptionError, match="lease_s is"):
        SnapshotManifest.decode(wrong.encode())


def test_a_part_may_tell_its_last_record() -> None:
    """Its mark and the term of its copy come back; parts of before there were any have none."""
    marked = dataclasses.replace(part(0), mark=-(2**63), term=3)
    assert ShardPart.decode(marked.encode()) == marked
    old = ShardPart.decode(part(0).encode())
    assert (old.mark, old.term) == (None, 0)
    with pytest.raises(CorruptionError, match="a field is not an integer"):
        ShardPart.decode(marked.encode().replace("-9223372036854775808", '"x"'))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"seq": 5', b'"seq": 6'),
        (b'"headrace-snapshot"', b'"another"'),
        (b'"format_version": 1', b'"format_version": 2'),
        (b"{", b"["),
    ],
)
def test_a_changed_byte_is_found(old: bytes, new: bytes) -> None:
    """A manifest of which any byte has changed is refused."""
    data = manifest().encode()
    assert old in data
    with pytest.raises(CorruptionError):
        SnapshotManifest.decode(data.replace(old, new, 1))


@pytest.mark.parametrize("data", [b"[" * 100_000, b'{"crc32c":1,"a":' + b"[" * 900 + b"]" * 900 + b"}"])
def test_a_deep_nest_is_no_manifest(data: bytes) -> None:
    """JSON that nests deeper than Python goes, to be read or to be written again, is refused like any other."""
    data = data.replace(b'{"crc32c"', b'{"format":"headrace-snapshot","format_version":1,"crc32c"')
    with pytest.raises(CorruptionError):
        SnapshotManifest.decode(data)


@pytest.mark.parametrize("text", ["[" * 100_000, "{", "7"])
def test_a_text_that_is_no_part_is_refused(text: str) -> None:
    """What a shard tells of its part is checked as a file is; what it tells rightly comes back."""
    with pytest.raises(CorruptionError, match="not a shard's part"):
        ShardPart.decode(text)
    spec = dataclasses.replace(SPEC, fqn="ids", num_rows=0, has_identities=True)
    told = dataclasses.replace(part(0), tables=(SPEC, spec))
    assert ShardPart.decode(told.encode()) == told


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (part(1),),
        (part(0), part(1, step=8)),
        (part(0), dataclasses.replace(part(1), epoch=4)),
        (part(0), part(1, server_id="other")),
        (part(0), part(2)),
    ],
)
def test_parts_must_be_of_one_cut(parts: tuple[ShardPart, ...]) -> None:
    """Shards of different steps, epochs or stores, or with one missing, make no snapshot."""
    with pytest.raises(CorruptionError):
        SnapshotManifest(name="one", created_us=1, parts=parts)


@pytest.mark.parametrize("name", ["", ".hidden", "a/b", "../a", "a" * 101, "-a"])
def test_names_are_file_names(name: str) -> None:
    """A name that could lead out of the directory, or hide, is refused."""
    with pytest.raises(RequestError):
        check_snapshot_name(name)


@pytest.mark.parametrize("name", ["../../etc/passwd", "..", "."])
def test_a_file_cannot_lie_outside(name: str) -> None:
    """A shard's part with a path for a file name is refused."""
    values = part(0).to_json()
    values["files"][0]["name"] = name
    with pytest.raises(CorruptionError):
        ShardPart.from_json(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda values: values.update(step="7"), "a field is not an integer"),
        (lambda values: values.update(seq=None), "a field is not an integer"),
        (lambda values: values["tables"][0].update(dim=3), "another fingerprint"),
        (lambda values: values["tables"][0].update(dim=0), "dim 0 is not in"),
        (lambda values: values["tables"][0]["states"][0].update(name="mean"), "another fingerprint"),
    ],
)
def test_a_part_that_contradicts_itself_is_refused(change: Callable[[dict[str, Any]], None], words: str) -> None:
    """A position that is no number, or a spec that is not what its fingerprint says, makes no snapshot."""
    values = part(0).to_json()
    change(values)
    with pytest.raises(CorruptionError, match=words):
        ShardPart.from_json(values)


@pytest.mark.parametrize("change", [{"name": "../a"}, {"name": 7}, {"shards": None}])
def test_a_manifest_with_a_right_checksum_may_still_be_none(change: dict[str, Any]) -> None:
    """What was made by another program, with a checksum over it, is refused by what it says, and as nothing else."""
    values = json.loads(manifest().encode()) | change
    values.pop("crc32c")
    for name, value in change.items():
        if value is None:
            del values[name]
    body = json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"
    with pytest.raises(CorruptionError, match="not a snapshot manifest"):
        SnapshotManifest.decode(json.dumps(values | {"crc32c": crc32c(body)}).encode())
