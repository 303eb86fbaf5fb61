"""Snapshot manifests: golden bytes, round trip, refusals."""

from __future__ import annotations

import dataclasses
import json
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
    assert json.loads(manifest().encode())["crc32c"] == 3144180064
    assert decoded.tables == {"t.weight": SPEC} and list(decoded.files()) == [
        "shard-0000/CURRENT",
        "shard-0001/CURRENT",
    ]
    for name in ("", ".hidden", "a/b", "../a", "a" * 101, "-a"):  # could lead out of the directory, or hide
        with pytest.raises(RequestError):
            check_snapshot_name(name)
    assert (decoded.server_id, decoded.epoch, decoded.step, decoded.size_bytes) == ("s", 3, 7, 32)


@pytest.mark.parametrize("lease_s", [-1, "60", 0.5, None])
def test_a_lease_is_a_number_of_seconds(lease_s: object) -> None:
    """A manifest keeps for how long its snapshot outlives its last reader; anything else is none."""
    leased = dataclasses.replace(manifest(), lease_s=60)
    assert SnapshotManifest.decode(leased.encode()) == leased
    wrong = dataclasses.replace(manifest(), lease_s=lease_s or "none")  # type: ignore[arg-type]
    with pytest.raises(CorruptionError, match="lease_s is"):
        SnapshotManifest.decode(wrong.encode())


def test_a_part_comes_back() -> None:
    """So does the mark of its last record with the term of its copy; parts of before there were any have none."""
    spec = dataclasses.replace(SPEC, fqn="ids", num_rows=0, has_identities=True)
    for told in (part(0), dataclasses.replace(part(0), tables=(SPEC, spec), mark=-(2**63), term=3)):
        assert ShardPart.decode(told.encode()) == told
    assert (part(0).mark, part(0).term) == (None, 0)


def _made_elsewhere(**change: Any) -> bytes:
    """Return a manifest with changes and a right checksum over it; None takes a value out."""
    values = json.loads(manifest().encode()) | change
    values = {name: value for name, value in values.items() if value is not None and name != "crc32c"}
    body = json.dumps(values, indent=2, sort_keys=True).encode() + b"\n"
    return json.dumps(values | {"crc32c": crc32c(body)}).encode()


_DEEP = b'{"format":"headrace-snapshot","format_version":3,"crc32c":1,"a":' + b"[" * 900 + b"]" * 900 + b"}"


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (manifest().encode().replace(b'"seq": 5', b'"seq": 6'), None),
        (manifest().encode().replace(b'"headrace-snapshot"', b'"another"'), None),
        (manifest().encode().replace(b'"format_version": 3', b'"format_version": 2'), None),
        (manifest().encode().replace(b"{", b"[", 1), None),
        (b"[" * 100_000, None),  # deeper than Python goes, to be read
        (_DEEP, None),  # or to be written again
        (_made_elsewhere(name="../a"), "not a snapshot manifest"),
        (_made_elsewhere(name=7), "not a snapshot manifest"),
        (_made_elsewhere(shards=None), "not a snapshot manifest"),
    ],
)
def test_what_is_no_manifest_is_refused(data: bytes, words: str | None) -> None:
    """A manifest of which any byte has changed, and one with a right checksum that another program has made."""
    assert data != manifest().encode()
    with pytest.raises(CorruptionError, match=words):
        SnapshotManifest.decode(data)


_EARLIER = dataclasses.replace(part(1), epoch=4)


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (part(1),),
        (part(0), part(1, step=8)),
        (part(0), _EARLIER),
        (part(0), part(1, server_id="b")),
        (part(0), part(2)),
    ],
    ids=["none", "no first", "steps", "epochs", "servers", "a gap"],
)
def test_parts_must_be_of_one_cut(parts: tuple[ShardPart, ...]) -> None:
    """Shards of different steps, epochs or stores, or with one missing, make no snapshot."""
    with pytest.raises(CorruptionError):
        SnapshotManifest(name="one", created_us=1, parts=parts)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"step": 7', '"step": "7"', "a field is not an integer"),
        ('"seq": 5', '"seq": null', "a field is not an integer"),
        ('"mark": 4', '"mark": "x"', "a field is not an integer"),
        *(('"size_bytes": 16', f'"size_bytes": {size}', "size") for size in ("null", '"4"', "-1", "0.5", "1e400")),
        *(('"num_rows": 10', f'"num_rows": {number}', "no integers") for number in ("null", '"4"', "10.0", "true")),
        ('"server_id": "s"', '"server_id": null', "no text"),
        ('"fqn": ', '"fqn": null, "was": ', None),
        ('"dim": 2', '"dim": 3', "another fingerprint"),
        ('"dim": 2', '"dim": 0', "dim 0 is not in"),
        ('"name": "sum"', '"name": "mean"', "another fingerprint"),
        *(('"name": "CURRENT"', f'"name": "{name}"', None) for name in ("../../etc/passwd", "..", ".")),
        *(("{", text, "not a shard's part") for text in ("[" * 100_000, "{{", "7")),
    ],
)
def test_a_part_that_contradicts_itself_is_refused(old: str, new: str, words: str | None) -> None:
    """A position that is no number, a spec that is not what its fingerprint says, a path for a file, and other text."""
    text = dataclasses.replace(part(0), mark=4).encode()
    assert old in text
    with pytest.raises(CorruptionError, match=words):
        ShardPart.decode(text.replace(old, new, 1))
